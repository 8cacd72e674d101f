"""Outputs of fake implementations."""

from __future__ import annotations

import torch
from torch import Tensor

from flexvarlen.recurrent.fla_kernels.levels import Boundaries


def like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A contiguous tensor of this shape, for a fake output."""
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def received_state(k: Tensor, v: Tensor, boundaries: Boundaries) -> Tensor:
    """A fake result of `run_levels_forward`."""
    shape = (0,) if boundaries.links is None else (v.shape[2], k.shape[3], v.shape[3])
    return v.new_empty(shape, dtype=torch.float32)
