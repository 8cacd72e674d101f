"""One training step: forward and backward of batches, the loss's gradient, layers checkpointed.

Shapes: B rows of S positions, S = T for a packed row of T tokens; V = vocabulary.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear
from transformers import PreTrainedModel

from flexvarlen.reference.model import IGNORE_INDEX

# Tokens whose logits exist at once: in fp32, with their gradient, 5 GiB at a vocabulary of 152k.
LOSS_ROWS = 4096


@dataclass(frozen=True)
class Batch:
    """One forward of a step.

    Attributes:
        inputs: keyword arguments of the base model.
        real: bool `[B, S]`, the positions that are not padding; None: all.
        labels: int64 `[B, S]`, the next token, `IGNORE_INDEX` where there is none; None without a
            loss.
    """

    inputs: Mapping[str, Any]
    real: Tensor | None = None
    labels: Tensor | None = None

    def tokens_of(self, outputs: Tensor) -> Tensor:
        """`[B, S, hidden]` -> `[tokens, hidden]`, row by row without the padding."""
        outputs = outputs.detach()
        return outputs.flatten(0, 1) if self.real is None else outputs[self.real]


GradientOf = Callable[[Tensor, Batch], Tensor]
"""Outputs `[B, S, hidden]` of a batch -> where the backward starts."""


def forward_backward(
    module: nn.Module,
    call: Callable[..., Any],
    batches: Sequence[Batch],
    gradient_of: GradientOf,
    *,
    keep: bool = False,
) -> list[Tensor]:
    """Drop the gradients; then forward and backward of each batch, gradients summed.

    Args:
        module: whose parameters' gradients these are.
        call: the base model, or the base model compiled.
        batches: of one step.
        gradient_of: the loss's gradient.
        keep: whether to return the outputs.

    Returns:
        Tokens' outputs `[tokens, hidden]`, batch by batch; none unless kept.
    """
    module.zero_grad(set_to_none=True)
    kept = []
    for batch in batches:
        outputs: Tensor = call(**batch.inputs).last_hidden_state
        outputs.backward(gradient_of(outputs, batch))
        if keep:
            kept.append(batch.tokens_of(outputs))
        del outputs
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


def next_token_gradient(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    counted: int,
    counts: Tensor | None = None,
    loss_of: Callable[..., Tensor] = next_token_loss,
) -> Tensor:
    """The gradient of the language model's loss, a chunk of logits at a time; fills `head.grad`.

    Chunks, as in fused linear cross-entropy kernels, because the logits of a long row would not
    fit: they are 40 GB in bf16 at 128K tokens.

    Args:
        hidden, labels, counts: as in `next_token_loss`, of any shape; counts of None are ones.
        head: a parameter gets a gradient, another tensor does not.
        counted: as in `next_token_loss`.
        loss_of: `next_token_loss`, or the same compiled.

    Returns:
        Of the shape and dtype of `hidden`.
    """
    found = []
    counts = torch.ones_like(labels) if counts is None else counts
    rows = hidden.detach().flatten(0, -2).split(LOSS_ROWS)
    others = (x.flatten().split(LOSS_ROWS) for x in (labels, counts))
    for chunk, wanted, weights in zip(rows, *others, strict=True):
        chunk.requires_grad_()
        loss_of(chunk, head, wanted, weights, counted).backward()  # type: ignore[no-untyped-call]
        assert chunk.grad is not None
        found.append(chunk.grad)
    return torch.cat(found).view_as(hidden)


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
