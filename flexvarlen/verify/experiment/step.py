"""One step: forward, loss and backward of a model on one batch of documents or several.

Shapes: B rows of S positions, S = T for a packed row of T tokens; V = vocabulary.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from flexvarlen.reference.model import IGNORE_INDEX
from flexvarlen.verify.experiment.batch import ModelInputs
from flexvarlen.verify.experiment.tree_batch import Row
from flexvarlen.verify.experiment.variant import Variant

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Tokens whose logits exist at once: in fp32, with their gradient, 5 GiB at a vocabulary of 152k.
LOSS_ROWS = 4096

# ---- a causal language model and its own loss ----


@dataclass(frozen=True)
class StepResult:
    """What a step gives; the parameters' gradients are in their `.grad`.

    Attributes:
        logits: `[T, V]`, detached.
        loss: over the labels given.
        embedding_gradients: `[T, hidden]`, of the embeddings looked up; None without training.
    """

    logits: Tensor
    loss: float
    embedding_gradients: Tensor | None


def causal_step(
    variant: Variant, row: Row, labels: Tensor, counted: Tensor, *, gradients: bool = False
) -> StepResult:
    """One step of a causal language model on a packed row.

    The embedding lookup is not in the compiled part: the model gets `inputs_embeds`, so that a
    token's own gradient can be seen. The loss is transformers' own, of trees `tree_loss`, divided
    by `counted` (as Trainer does).

    Args:
        row: the documents.
        labels: int64 `[1, T]`.
        counted: 0-d tensor, what the loss is divided by.
        gradients: keep the embeddings' gradients.
    """
    variant.model.zero_grad(set_to_none=True)
    with torch.set_grad_enabled(variant.train):
        embeds: Tensor = variant.model.get_input_embeddings()(row.input_ids)
        if gradients and variant.train:
            embeds.retain_grad()
        forward = variant.forward(row, inputs_embeds=embeds, **row.loss_inputs(labels, counted))
        output = variant.call(**forward.inputs)
        if variant.train:
            output.loss.backward()
    found = embeds.grad[0] if gradients and embeds.grad is not None else None
    return StepResult(forward.tokens_of(output.logits.detach()), output.loss.item(), found)


# ---- a base model: the logits of long rows would not fit ----


def base_step(
    variant: Variant,
    forwards: Sequence[ModelInputs],
    gradient: Callable[[Tensor, ModelInputs], Tensor] | None = None,
    *,
    parameters_of: nn.Module | None = None,
    keep: bool = False,
) -> list[Tensor]:
    """One step of a base model: each forward and its backward, gradients summed.

    Args:
        variant: what is called; one that does not train runs the forwards alone.
        forwards: of one step.
        gradient: outputs `[B, S, hidden]` -> where their backward starts; default: at each
            forward's `grad_output`.
        parameters_of: the module whose gradients are dropped first; default: the variant's model.
        keep: whether to return the outputs.

    Returns:
        Tokens' outputs `[tokens, hidden]`, forward by forward; none unless kept.
    """
    (variant.model if parameters_of is None else parameters_of).zero_grad(set_to_none=True)
    kept = []
    with torch.set_grad_enabled(variant.train):
        for each in forwards:
            outputs: Tensor = variant.call(**each.inputs).last_hidden_state
            if variant.train:
                outputs.backward(each.grad_output if gradient is None else gradient(outputs, each))
            if keep:
                kept.append(each.tokens_of(outputs.detach()))
            del outputs  # before the next forward
    return kept


def next_token_loss(
    hidden: Tensor, head: Tensor, labels: Tensor, counts: Tensor, counted: int
) -> Tensor:
    """transformers' own: cross-entropy in fp32 or wider, summed, over `counted`.

    Args:
        hidden: `[N, hidden]`, what the head gets.
        head: `[V, hidden]`.
        labels: int64 `[N]`, the next token, `IGNORE_INDEX` where nothing is predicted.
        counts: integer `[N]`, the number of samples that each label counts for.
        counted: the labels that count, of the whole step.
    """
    logits = linear(hidden, head)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    losses = cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="none")
    return (losses * counts).sum() / counted


@dataclass(frozen=True)
class HeadLoss:
    """The loss of an LM head over a base model's outputs, as a gradient of these.

    A chunk of logits at a time, as in fused linear cross-entropy kernels: of a long row they would
    not fit, they are 40 GB in bf16 at 128K tokens.

    Attributes:
        head: `[V, hidden]`; a parameter gets a gradient, another tensor does not.
        counted: as in `next_token_loss`.
        labelled_alone: compute the logits of tokens that have a label, and no others.
        loss_of: `next_token_loss`, or the same compiled.
    """

    head: Tensor
    counted: int
    labelled_alone: bool = False
    loss_of: Callable[..., Tensor] = next_token_loss

    def gradient(self, outputs: Tensor, inputs: ModelInputs) -> Tensor:
        """For `base_step`."""
        assert inputs.labels is not None
        return self.of(outputs, inputs.labels, inputs.counts)

    def alone(self, labels: Sequence[Tensor]) -> Callable[[int, Tensor], Tensor]:
        """The same of a document by its index, for `from_gradient`; the head gets no gradient.

        Args:
            labels: of each document, int64 `[L]`.
        """

        def gradient(document: int, states: Tensor) -> Tensor:
            head = self.head.detach().to(states.dtype)
            return replace(self, head=head, loss_of=next_token_loss).of(states, labels[document])

        return gradient

    def of(self, hidden: Tensor, labels: Tensor, counts: Tensor | None = None) -> Tensor:
        """The gradient of `hidden`, of its shape and dtype.

        Args:
            hidden, labels, counts: as in `next_token_loss`, of any shape; counts of None are ones.
        """
        counts = torch.ones_like(labels) if counts is None else counts
        hidden = hidden.detach()
        if self.labelled_alone:
            has_label, found = labels != IGNORE_INDEX, torch.zeros_like(hidden)
            given = (hidden[has_label], labels[has_label], counts[has_label])
            found[has_label] = self._of_rows(*given)
            return found
        rows = self._of_rows(hidden.flatten(0, -2), labels.flatten(), counts.flatten())
        return rows.view_as(hidden)

    def _of_rows(self, hidden: Tensor, labels: Tensor, counts: Tensor) -> Tensor:
        """`[N, hidden]`, `[N]`, `[N]` -> `[N, hidden]`."""
        found = []
        pieces = (x.split(LOSS_ROWS) for x in (hidden, labels, counts))
        for chunk, wanted, weights in zip(*pieces, strict=True):
            chunk.requires_grad_()
            loss = self.loss_of(chunk, self.head, wanted, weights, self.counted)
            loss.backward()  # type: ignore[no-untyped-call]
            assert chunk.grad is not None
            found.append(chunk.grad)
        return torch.cat(found)


# ---- memory ----


def checkpoint_layers(model: PreTrainedModel, context_fn: Callable[[], Any] | None = None) -> None:
    """Gradient checkpointing of every layer, not reentrant.

    Args:
        model: changed in place.
        context_fn: as in `torch.utils.checkpoint.checkpoint`.
    """
    # transformers 5.2x calls it activation checkpointing, and warns of the old name.
    enable = getattr(model, "activation_checkpointing_enable", None)
    options: dict[str, Any] = {"use_reentrant": False}
    if context_fn is not None:
        options["context_fn"] = context_fn
    (enable or model.gradient_checkpointing_enable)(options)


def free(device: torch.device, *modules: nn.Module) -> None:
    """Drop gradients; on CUDA give back what the allocator holds free, and what cycles hold."""
    for module in modules:
        module.zero_grad(set_to_none=True)
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
