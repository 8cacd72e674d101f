"""Fake outputs of the operators, and which inputs and outputs have gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexvarlen.recurrent.fla_kernels.levels import Boundaries, states_like


def like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A contiguous tensor of this shape, for a fake output."""
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def fake_states(k: Tensor, v: Tensor, boundaries: Boundaries) -> Tensor:
    """A fake result of `run_levels_forward`."""
    return states_like((v.shape[2], k.shape[3], v.shape[3]), v, boundaries)


def fake_state_gradient(state_above: Tensor | None, like: Tensor) -> Tensor:
    """A fake result of `run_levels_backward`."""
    shape = (0,) if state_above is None else state_above.shape
    return like.new_empty(shape, dtype=torch.float32)


def first_without_gradient(inputs: tuple[Any, ...]) -> int:
    """Index of the first output without a gradient: 2 in parts of a tree, whose states have one."""
    return 1 + (Boundaries(*inputs[-len(Boundaries._fields) :]).continued is not None)


def gradients_of(boundaries: Boundaries, dabove: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of an operator's `Boundaries`: only `state_above` has one."""
    found = None if boundaries.state_above is None else dabove
    return tuple(found if name == "state_above" else None for name in Boundaries._fields)
