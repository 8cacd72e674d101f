"""Outputs of fake implementations."""

from __future__ import annotations

import torch
from torch import Tensor


def like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A contiguous tensor of this shape, for a fake output."""
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
