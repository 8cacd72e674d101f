"""What a training step should give: each document in a forward of its own, not packed, not patched.

Exact in fp64; the low-precision baseline in fp32 with transformers' eager attention, under autocast
where the step ran under it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.oracle import assert_as_accurate, assert_gradients_as_accurate
from tests.tiny_models import texts_alone


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
    model: nn.Module, documents: Sequence[Sequence[int]], *, first: int = 0, **how: Any
) -> Step:
    """Loss and gradients of the documents one by one.

    Args:
        model: not patched.
        first: the position of each document's first token.
        how: as in `tiny_models.texts_alone`.
    """
    weights = snapshot(model)
    found = texts_alone(model, [(torch.tensor(ids), first) for ids in documents], **how)
    return Step(weights, found.loss, found.gradients)


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
