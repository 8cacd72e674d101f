"""Fake outputs of the operators."""

from __future__ import annotations

import torch
from torch import Tensor

from flexvarlen.recurrent.fla_kernels.levels import Boundaries, states_like


def like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A contiguous tensor of this shape, for a fake output."""
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def fake_states(k: Tensor, v: Tensor, boundaries: Boundaries) -> Tensor:
    """A fake result of `run_levels_forward`."""
    return states_like((v.shape[2], k.shape[3], v.shape[3]), v, boundaries)
