"""`Alone`: the documents of a row, each alone, in fp64 (the reference) and in the tested dtype.

Of a row of trees, the samples take the documents' place. Shapes: T tokens of the row; L tokens of a
document; N = hidden, or the vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from flexvarlen.reference.acceptance import Error, allowed, largest, why_wrong
from flexvarlen.reference.model import Float64, Loss, ModelResults, float64_model, run_alone, share
from flexvarlen.verify.experiment.step import checkpoint_layers, free
from flexvarlen.verify.experiment.tree_batch import Row

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Outputs = Literal["hidden states", "logits"]
LossOf = Callable[["PreTrainedModel"], Loss]
"""The model that a document runs through -> its loss."""
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class Errors:
    """Errors of a model's results against the reference.

    Attributes:
        outputs: over all tokens of the reference's documents; None: not compared.
        documents: the same of each document; empty for logits.
        argmax: share of tokens whose largest output is the reference's: of logits, the most likely
            next token.
        loss: None for a forward alone.
        gradients: of each parameter, by name; empty for a forward alone.
        gradient: of all of them that are there, as one vector.
    """

    outputs: Error | None = None
    documents: tuple[Error, ...] = ()
    argmax: float = 0.0
    loss: Error | None = None
    gradients: Mapping[str, Error] = field(default_factory=dict)
    gradient: Error | None = None

    @classmethod
    def of_step(
        cls,
        loss: float,
        gradients: Mapping[str, Tensor],
        reference_loss: float,
        reference_gradients: Mapping[str, Tensor],
    ) -> Errors:
        """The errors of a loss, and of the gradient of each parameter that the reference has."""
        each = _gradient_errors(gradients, reference_gradients)
        return cls(loss=scalar_error(loss, reference_loss), gradients=each)

    @property
    def worst_gradient(self) -> float:
        """The largest relative error of a parameter's gradient."""
        return largest(error.relative for error in self.gradients.values())

    def beside(self, baseline: Errors) -> Iterator[Compared]:
        """The loss and every gradient, with the baseline's.

        The baseline of a gradient is at least the worst, relative to its size, of the same
        parameter in any layer: of one that holds a number a head, it may be exact by luck.
        """
        worst: dict[str, float] = {}
        for name, error in baseline.gradients.items():
            of_layers = _NUMBER.sub("", name)
            worst[of_layers] = largest([worst.get(of_layers, 0.0), min(error.relative, 1.0)])
        if self.loss is not None and baseline.loss is not None:
            yield Compared("the loss", self.loss, baseline.loss)
        for name, error in self.gradients.items():
            plain = baseline.gradients[name].at_least(worst[_NUMBER.sub("", name)])
            yield Compared(f"the gradient of {name}", error, plain, True)


class Compared(NamedTuple):
    """One result: its name, its error and the baseline's, and whether it is a gradient."""

    name: str
    error: Error
    baseline: Error
    gradient: bool = False


@dataclass(frozen=True)
class Alone:
    """Some documents of a row, each alone.

    Attributes:
        row: the row.
        documents: which of `row.samples`.
        outputs: which are compared; None: loss and gradients alone. Hidden states, and gradients
            beside them, are kept in the host's memory, so that they are in no variant's peak.
        dtype: that is tested.
        results: in fp64.
        baseline: the errors of each document alone in that dtype.
    """

    row: Row
    documents: tuple[int, ...]
    outputs: Outputs | None
    dtype: torch.dtype
    results: ModelResults
    baseline: Errors

    @classmethod
    def of(
        cls,
        base: PreTrainedModel,
        row: Row,
        *,
        outputs: Outputs | None = "hidden states",
        documents: Sequence[int] | None = None,
        loss: LossOf | None = None,
        parameters: Sequence[str] | None = None,
        baseline: Callable[[PreTrainedModel], PreTrainedModel] = share,
        dtype: torch.dtype | None = None,
        precision: Callable[[], AbstractContextManager[Any]] = nullcontext,
        checkpoint: bool = True,
    ) -> Alone:
        """Run them in fp64, then in the tested dtype.

        Args:
            base: unpatched; it is not changed.
            row: the documents.
            outputs: which are compared.
            documents: None: all.
            loss: what to differentiate; None: a forward alone.
            parameters: whose gradients are compared; None: all.
            baseline: makes the model that runs in the tested dtype. The default attends as `base`
                does: the scores of eager attention would not fit for the longest documents.
            dtype: that is tested; default: that of `base`.
            precision: what the baseline's forward runs in (autocast).
            checkpoint: whether the layers are computed again in the backward; the copies are then
                put into training mode, or into evaluation mode for a forward alone.
        """
        samples = row.samples
        chosen = tuple(range(len(samples.lengths)) if documents is None else documents)

        def run(model: PreTrainedModel) -> ModelResults:
            if checkpoint:
                # The backward computes layers again outside of the mode that the forward ran in.
                again = Float64 if model.dtype == torch.float64 else nullcontext
                model.train(loss is not None)
                checkpoint_layers(model, lambda: (nullcontext(), again()))
            found = run_alone(
                model,
                samples.input_ids,
                samples.lengths,
                documents=chosen,
                loss=None if loss is None else loss(model),
                parameters=parameters,
                images=samples.images_alone,
            )
            return found if outputs == "logits" else _on_host(found, outputs)

        results = run(float64_model(base))
        free(base.device, base)
        with precision():
            low = run(baseline(base))
        free(base.device, base)
        pairs = (
            (found, expected)
            for (_, _, found), (_, _, expected) in zip(
                _pieces(low, outputs), _pieces(results, outputs), strict=True
            )
        )
        errors = _errors(results, outputs, pairs, None if loss is None else low.loss, low.gradients)
        return cls(row, chosen, outputs, dtype or base.dtype, results, errors)

    def errors(
        self,
        outputs: Tensor | None = None,
        loss: float | None = None,
        gradients: Mapping[str, Tensor | None] | None = None,
    ) -> Errors:
        """The errors of the row.

        Args:
            outputs: `[T, N]`; None where none are compared.
            loss: None for a forward alone.
            gradients: of the parameters, by name; None where none came. Default: not compared.
        """

        def pairs() -> Iterator[tuple[Tensor, Tensor]]:
            assert outputs is not None
            paths = self.row.paths
            for document, offset, expected in _pieces(self.results, self.outputs):
                yield outputs[paths[document][offset : offset + len(expected)]], expected

        return _errors(self.results, self.outputs, pairs(), loss, gradients)

    def compared(self, errors: Errors) -> Iterator[Compared]:
        """Every result with its baseline.

        Every document's hidden states count by themselves too: the leak of a short one does not
        show in the norm of a long row. Their baseline is at least the whole row's.
        """
        base = self.baseline
        if errors.outputs is not None and base.outputs is not None:
            name = "logits" if self.outputs == "logits" else "outputs"
            yield Compared(name, errors.outputs, base.outputs)
            each = zip(self.documents, errors.documents, base.documents, strict=True)
            for document, error, plain in each if errors.documents else ():
                name = f"outputs of document {document}"
                yield Compared(name, error, plain.or_larger(base.outputs))
        yield from errors.beside(base)

    def why_wrong(self, errors: Errors) -> str | None:
        """The acceptance rule: a sentence about what is wrong, or None."""
        return why_one_is_wrong(self.compared(errors), self.dtype)

    def check(
        self, outputs: Tensor, gradients: Mapping[str, Tensor | None] | None = None
    ) -> tuple[dict[str, Any], str | None]:
        """Errors of hidden states as measures, and the sentence about what is wrong, or None."""
        errors = self.errors(outputs, gradients=gradients)
        measures: dict[str, Any] = {
            **both_relative("error", errors.outputs, self.baseline.outputs),
            "error_worst_document": largest(x.relative for x in errors.documents),
            "baseline_error_worst_document": largest(x.relative for x in self.baseline.documents),
        }
        if gradients is not None:
            measures["grad_error"] = errors.worst_gradient
            measures["baseline_grad_error"] = self.baseline.worst_gradient
        measures["error_over_allowed"] = over_allowed(self.compared(errors), self.dtype)
        return measures, self.why_wrong(errors)

    def of_samples(self) -> Alone:
        """The same for outputs of the samples one after another, which share nothing."""
        return replace(self, row=self.row.samples)


def why_one_is_wrong(results: Iterable[Compared], dtype: torch.dtype) -> str | None:
    """The acceptance rule: a sentence about the first that is wrong, or None."""
    reasons = (
        why_wrong(name, error, baseline, dtype, gradient=gradient)
        for name, error, baseline, gradient in results
    )
    return next((reason for reason in reasons if reason is not None), None)


def over_allowed(results: Iterable[Compared], dtype: torch.dtype) -> float:
    """The largest ratio of an error to its limit; above 1, or NaN, is wrong."""
    return largest(
        allowed(baseline, dtype, gradient=gradient).ratio(error)
        for _, error, baseline, gradient in results
    )


def gradients_of(model: nn.Module) -> dict[str, Tensor | None]:
    """The gradients that a backward left in the parameters."""
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def from_gradient(gradient: Callable[[int, Tensor], Tensor]) -> LossOf:
    """A loss of hidden states by its gradient: where the backward of a base model starts.

    Args:
        gradient: a document's index and its hidden states `[L, hidden]` -> the gradient.
    """

    def loss(document: int, states: Tensor) -> Tensor:
        return (states * gradient(document, states.detach()).to(states.dtype)).sum()

    return lambda model: loss


def _on_host(results: ModelResults, outputs: Outputs | None) -> ModelResults:
    hidden = tuple(x.cpu() for x in results.hidden) if outputs is not None else ()
    gradients = {name: x.cpu() for name, x in results.gradients.items()}
    return replace(results, hidden=hidden, gradients=gradients, head=None)


def _pieces(results: ModelResults, outputs: Outputs | None) -> Iterable[tuple[int, int, Tensor]]:
    """Document, its token at which the piece starts, `[tokens, N]`."""
    if outputs == "logits":
        return results.logits()
    if outputs is None:
        return ()
    return ((document, 0, x) for document, x in zip(results.documents, results.hidden, strict=True))


def _errors(
    results: ModelResults,
    outputs: Outputs | None,
    pairs: Iterable[tuple[Tensor, Tensor]],
    loss: float | None,
    gradients: Mapping[str, Tensor | None] | None,
) -> Errors:
    """Errors of outputs that come in pieces, each with its reference."""
    same, tokens = 0, 0
    documents: list[Error] = []

    def counted() -> Iterator[tuple[Tensor, Tensor]]:
        nonlocal same, tokens
        for found, expected in pairs:
            if outputs == "logits":
                same += int((found.argmax(-1) == expected.argmax(-1)).sum())
                tokens += len(expected)
            else:
                documents.append(Error.between(found, expected))
            yield found, expected

    whole = None if outputs is None else Error.of_pieces(counted())
    given = {name: found for name, found in (gradients or {}).items() if found is not None}
    there = ((given[name], x) for name, x in results.gradients.items() if name in given)
    return Errors(
        whole,
        tuple(documents),
        same / max(1, tokens),
        None if loss is None else scalar_error(loss, results.loss),
        {} if gradients is None else _gradient_errors(given, results.gradients),
        Error.of_pieces(there),
    )


def _gradient_errors(
    found: Mapping[str, Tensor], reference: Mapping[str, Tensor]
) -> dict[str, Error]:
    """The errors of gradients; where no document reaches a parameter, None is as good as 0."""
    return {
        name: Error.between(found.get(name, x), x)
        if name in found or not bool(x.any())
        else Error.missing()
        for name, x in reference.items()
    }


def both_relative(name: str, error: Error | None, baseline: Error | None) -> dict[str, Any]:
    """A result's relative error and the baseline's, as measures; both were compared."""
    assert error is not None
    assert baseline is not None
    return {name: error.relative, f"baseline_{name}": baseline.relative}


def scalar_error(found: float, reference: float) -> Error:
    """The error of one number."""
    pair = (torch.tensor([x], dtype=torch.float64, device="cpu") for x in (found, reference))
    return Error.between(*pair)
