"""A model's training step, what it may end in, and how often it is timed.

Shared by `packings_run.py` and the suite, so that what is checked is what is timed. Shapes: B
rows of S positions, S = T for a packed row of T tokens; V = vocabulary.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from flexvarlen.drift.op.failures import status_of
from flexvarlen.equivalence.batch import IGNORE_INDEX
from flexvarlen.equivalence.variants import Unsupported
from flexvarlen.rows import Status

# Rows whose logits exist at once: in fp32, with their gradient, 5 GiB at a vocabulary of 152k.
LOSS_ROWS = 4096


@dataclass(frozen=True)
class Batch:
    """One forward of a step.

    Attributes:
        inputs: keyword arguments of the base model.
        real: bool `[B, S]`, the positions that are no pads; None: all.
        labels: int64 `[B, S]`, the next token, `IGNORE_INDEX` where there is none; None without a
            loss.
    """

    inputs: Mapping[str, Any]
    real: Tensor | None = None
    labels: Tensor | None = None

    def tokens_of(self, outputs: Tensor) -> Tensor:
        """`[B, S, hidden]` -> `[tokens, hidden]`, row by row without the pads."""
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
    """Gradients dropped; then forward and backward of each batch, gradients summed.

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


def next_token_gradient(hidden: Tensor, head: Tensor, labels: Tensor, counted: int) -> Tensor:
    """The gradient of the language model's loss, a chunk of logits at a time; fills `head.grad`.

    The loss is transformers' own: cross-entropy of the next token in fp32 or wider, summed, over
    `counted`. Its gradient is taken chunk by chunk, as fused linear cross-entropy kernels do it, so
    that a long row's logits need not fit: T·V of them are 40 GB in bf16 at 128K tokens.

    Args:
        hidden: `[..., hidden]`, what the head gets.
        head: `[V, hidden]`; a parameter gets a gradient, another tensor does not.
        labels: int64 `[...]`, `IGNORE_INDEX` where nothing is predicted.
        counted: the labels that count, of the whole step.

    Returns:
        Of the shape and dtype of `hidden`.
    """
    found = []
    rows = hidden.detach().flatten(0, -2).split(LOSS_ROWS)
    for chunk, wanted in zip(rows, labels.flatten().split(LOSS_ROWS), strict=True):
        chunk.requires_grad_()
        logits = linear(chunk, head)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        loss = cross_entropy(logits, wanted, ignore_index=IGNORE_INDEX, reduction="sum") / counted
        loss.backward()  # type: ignore[no-untyped-call]
        assert chunk.grad is not None
        found.append(chunk.grad)
    return torch.cat(found).view_as(hidden)


def outcome_of(error: Exception) -> tuple[Status, str]:
    """The status and the reason of a row, by what a variant raised."""
    return ("unsupported", str(error)) if isinstance(error, Unsupported) else status_of(error)


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Wall seconds of a call and of its work on the device."""
    synchronize(device)
    begin = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - begin


def repeats_for(took: Mapping[str, float], budget_s: float, most: int) -> dict[str, int]:
    """How often each variant is timed: within the budget, 3 at least.

    >>> repeats_for({"a": 0.1, "b": 2.0}, 3.0, 20)
    {'a': 20, 'b': 3}
    """
    return {
        name: max(min(3, most), min(most, int(budget_s / max(s, 1e-9)))) for name, s in took.items()
    }


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free(device: torch.device, *modules: nn.Module) -> None:
    """Drop gradients; on CUDA give back what the allocator holds free, and what cycles hold."""
    for module in modules:
        module.zero_grad(set_to_none=True)
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
