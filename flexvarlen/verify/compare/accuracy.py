"""The documents of a row, each alone: the reference, and the errors of the baseline.

Of a row of trees, the samples take the documents' place.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flexvarlen.reference.acceptance import Error, allowed, largest, why_wrong
from flexvarlen.reference.model import (
    ModelResults,
    baseline_model,
    float64_model,
    run_alone,
)
from flexvarlen.verify.batch import PackedBatch
from flexvarlen.verify.tree_batch import Row

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Attention matrices that the reference's autograd keeps a layer: scores, probabilities, a spare.
KEPT_MATRICES = 3
REFERENCE_MEMORY_SHARE = 1 / 3  # of what is free
REFERENCE_TOKENS = 8192  # on a GPU: fp64 is slow there


@dataclass(frozen=True)
class ModelErrors:
    """Errors of a model's results against the reference.

    Attributes:
        logits: over all tokens of the reference's documents.
        loss: of the training loss; None for a forward alone.
        argmax: share of tokens whose most likely next token is the reference's.
        gradients: of each parameter, by name; empty for a forward alone.
    """

    logits: Error
    loss: Error | None
    argmax: float
    gradients: dict[str, Error] = field(default_factory=dict)

    def measures(self) -> dict[str, Any]:
        """For a record."""
        gradients = self.gradients.values()
        found = {
            "logits_max": self.logits.max_abs,
            "logits_mean": self.logits.mean_abs,
            "argmax_agreement": self.argmax,
        }
        if self.loss is not None:
            found["loss_error"] = self.loss.max_abs
        if self.gradients:
            found["gradient_max"] = largest([error.max_abs for error in gradients])
            found["gradient_mean"] = sum(x.mean_abs for x in gradients) / len(self.gradients)
        return found


@dataclass(frozen=True)
class Reference:
    """Some documents of a row, each alone.

    Attributes:
        batch: the row.
        documents: which of `batch.samples`; the others had no room.
        labels: int64 `[1, T]`, of these documents alone.
        counted: 0-d tensor, how many labels count.
        results: in fp64.
        baseline: the errors of each document alone in the tested dtype.
    """

    batch: Row
    documents: tuple[int, ...]
    labels: Tensor
    counted: Tensor
    results: ModelResults
    baseline: ModelErrors

    @classmethod
    def of(cls, base: PreTrainedModel, batch: Row, *, train: bool, seed: int) -> Reference:
        """Run the documents that there is room for.

        Raises:
            ValueError: there is no room for the fp64 copy of `base`.
        """
        documents = tuple(sample_documents(base, batch.samples, train=train, seed=seed))
        labels = batch.labels(documents)
        try:
            results = alone(float64_model(base), batch, documents, train=train)
            release(base)
            low = alone(baseline_model(base), batch, documents, train=train)
        except torch.OutOfMemoryError as error:
            raise ValueError(
                "model must leave room for its fp64 copy (and, in training, gradients in fp64), "
                "got too little memory; take fewer layers (name@LAYERS) or the forward alone."
            ) from error
        release(base)
        pairs = (
            (found, expected)
            for (_, _, found), (_, _, expected) in zip(low.logits(), results.logits(), strict=True)
        )
        loss = low.loss if train else None
        baseline = _errors(pairs, loss, low.gradients, results)
        return cls(batch, documents, labels, batch.counted(labels), results, baseline)

    def errors(
        self, logits_TV: Tensor, loss: float | None, gradients: Mapping[str, Tensor | None]
    ) -> ModelErrors:
        """The errors of a packed row.

        Args:
            logits_TV: `[T, V]`.
            loss: over `labels`; None for a forward alone.
            gradients: of the parameters, by name; None where none came.
        """
        paths = self.batch.paths

        def pairs() -> Iterator[tuple[Tensor, Tensor]]:
            for document, offset, expected in self.results.logits():
                tokens = paths[document][offset : offset + len(expected)]
                yield logits_TV[tokens], expected

        return _errors(pairs(), loss, gradients, self.results)

    def why_wrong(self, errors: ModelErrors, dtype: torch.dtype) -> str | None:
        """The acceptance rule: a sentence about what is wrong, or None."""
        base = self.baseline
        reason = why_wrong("logits", errors.logits, base.logits, dtype)
        if reason is None and errors.loss is not None and base.loss is not None:
            reason = why_wrong("the loss", errors.loss, base.loss, dtype)
        if reason is not None:
            return reason
        for name, error in errors.gradients.items():
            what = f"the gradient of {name}"
            reason = why_wrong(what, error, base.gradients[name], dtype, gradient=True)
            if reason is not None:
                return reason
        return None

    def limits(self, errors: ModelErrors, dtype: torch.dtype) -> dict[str, Any]:
        """For a record: what the rule allows, and the gradient that comes nearest to its limit."""
        found: dict[str, Any] = {"logits_limit": allowed(self.baseline.logits, dtype).max_abs}
        ratios = {
            name: allowed(self.baseline.gradients[name], dtype, gradient=True).ratio(error)
            for name, error in errors.gradients.items()
        }
        if ratios:
            worst = largest(list(ratios.values()))
            nearest = next(name for name, x in ratios.items() if x == worst or x != x)
            found |= {"worst_gradient": nearest, "worst_gradient_ratio": worst}
        return found

    @property
    def whole(self) -> bool:
        """Whether it covers every document."""
        return len(self.documents) == len(self.batch.samples.lengths)

    @property
    def description(self) -> str:
        """Which documents it covers."""
        lengths = self.batch.samples.lengths
        text = f"{len(self.documents)} of {len(lengths)} {self.batch.sample}s alone, fp64"
        if self.whole:
            return text
        longest = max(lengths[document] for document in self.documents)
        return f"{text} (a sample that fits; the longest of {longest:,} tokens)"

    def without_tensors(self) -> Reference:
        """What is needed once all variants are checked."""
        return replace(self, results=replace(self.results, hidden=(), gradients={}, head=None))


def alone(
    model: PreTrainedModel, batch: Row, documents: tuple[int, ...], *, train: bool
) -> ModelResults:
    """Run these documents one by one; with loss and gradients if `train`."""
    loss = batch.loss_alone(model, documents) if train else None
    samples = batch.samples
    return run_alone(model, samples.input_ids, samples.lengths, documents=documents, loss=loss)


def _errors(
    pairs: Iterator[tuple[Tensor, Tensor]],
    loss: float | None,
    gradients: Mapping[str, Tensor | None],
    results: ModelResults,
) -> ModelErrors:
    """Errors of logits that come in pieces, each with its reference."""
    same, tokens = 0, 0

    def counted() -> Iterator[tuple[Tensor, Tensor]]:
        nonlocal same, tokens
        for found, expected in pairs:
            same += int((found.argmax(-1) == expected.argmax(-1)).sum())
            tokens += len(expected)
            yield found, expected

    logits = Error.of_pieces(counted())
    of_gradients = {}
    for name, expected in results.gradients.items() if gradients else ():
        found = gradients[name]
        of_gradients[name] = Error.missing() if found is None else Error.between(found, expected)
    loss_error = None
    if loss is not None:
        both = (torch.tensor(x, dtype=torch.float64) for x in (loss, results.loss))
        loss_error = Error.between(*both)
    return ModelErrors(logits, loss_error, same / tokens, of_gradients)


def sample_documents(
    base: PreTrainedModel, batch: PackedBatch, *, train: bool, seed: int
) -> list[int]:
    """The documents of the reference: all on the CPU; a random choice that fits a GPU."""
    everything = list(range(len(batch.lengths)))
    if base.device.type != "cuda":
        return everything
    free, _ = torch.cuda.mem_get_info(base.device)
    layers = base.config.num_hidden_layers if train else 1
    chosen: list[int] = []
    tokens = 0
    for document in random.Random(seed).sample(everything, len(everything)):
        length = batch.lengths[document]
        matrices = layers * KEPT_MATRICES * base.config.num_attention_heads * length * length
        logits = 3 * length * base.config.vocab_size
        fits = 8 * (matrices + logits) <= free * REFERENCE_MEMORY_SHARE
        if fits and tokens + length <= REFERENCE_TOKENS:
            chosen.append(document)
            tokens += length
    shortest = min(everything, key=lambda document: batch.lengths[document])
    return sorted(chosen) or [shortest]


def release(base: PreTrainedModel) -> None:
    """Drop gradients; on a GPU also what the allocator keeps for reuse."""
    base.zero_grad(set_to_none=True)
    if base.device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
