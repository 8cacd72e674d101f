"""What a training step should give: each document in a forward of its own, not packed, not patched.

Exact in fp64; the low-precision baseline in fp32 with transformers' eager attention, under autocast
where the step ran under it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.oracle import assert_as_accurate, assert_gradients_as_accurate


@dataclass(frozen=True)
class Step:
    """What one optimizer step saw and made.

    Attributes:
        weights: of all parameters and buffers, before it.
        gradients: by name of parameter, of those that have one.
    """

    weights: dict[str, Tensor]
    loss: Tensor
    gradients: dict[str, Tensor]


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    """A copy of all weights."""
    return {name: x.detach().clone() for name, x in model.state_dict().items()}


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """A copy of the gradients that there are."""
    named = model.named_parameters()
    return {name: p.grad.detach().clone() for name, p in named if p.grad is not None}


def by_document(
    model: nn.Module,
    documents: Sequence[Sequence[int]],
    *,
    first: int = 0,
    labels: Sequence[Sequence[int]] | None = None,
    num_labels: int | None = None,
    smoothing: float = 0.0,
    autocast: bool = False,
) -> Step:
    """Loss and gradients of the documents one by one.

    Args:
        model: not patched.
        first: the position of each document's first token.
        labels: of each document, -100 is ignored; default: its tokens.
        num_labels: what the sum is divided by; default: all labels that are foreseen.
        smoothing: of the labels.
        autocast: forwards run under bf16 autocast.
    """
    labels = documents if labels is None else labels
    weights, losses, seen = snapshot(model), [], 0
    for ids, own in zip(documents, labels, strict=True):
        ids, own = torch.tensor(ids), torch.tensor(own)
        positions = torch.arange(first, first + len(ids))[None]
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            logits = model(input_ids=ids[None], position_ids=positions, use_cache=False).logits[0]
        wide = logits if logits.dtype == torch.float64 else logits.float()
        losses.append(cross_entropy(wide[:-1], own[1:], reduction="sum", label_smoothing=smoothing))
        seen += int((own[1:] != -100).sum())
    loss = torch.stack(losses).sum() / (seen if num_labels is None else num_labels)
    loss.backward()
    gradients = gradients_of(model)
    model.zero_grad()
    return Step(weights, loss.detach(), gradients)


def check_step(step: Step, plain: nn.Module, documents: Sequence[Sequence[int]], **how) -> None:
    """Loss and every gradient of a packed step are those of its documents one by one.

    Args:
        plain: an unpatched model of the same kind, whose weights will be those of the step.
        how: as in `by_document`.
    """
    plain.load_state_dict(step.weights)
    plain.eval()
    baseline = by_document(plain, documents, **how)
    exact = by_document(copy.deepcopy(plain).double(), documents, **{**how, "autocast": False})
    assert_as_accurate(step.loss.float(), exact.loss, baseline.loss.float(), 2, "loss")
    assert_gradients_as_accurate(step.gradients, exact.gradients, baseline.gradients)
