"""Attention sinks: one logit per head, which adds `exp(sink)` to each softmax denominator.

Shape legend: T = tokens of the query row, H = num_heads, D = head_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LEAST_SINK = -1e30  # not -inf: -inf - (-inf) would be NaN for a query without keys


def finite_sinks(sinks_H: Tensor) -> Tensor:
    """Return the sinks as fp32 `[H, 1]`, clamped to finite values."""
    return sinks_H.float().clamp(min=_LEAST_SINK)[:, None]


def share_without_sink(lse_HT: Tensor, sinks_H: Tensor) -> Tensor:
    """Return the factor `[T, H, 1]` that adds the sinks to the output of a kernel without sinks."""
    return torch.sigmoid(lse_HT - finite_sinks(sinks_H)).T[..., None]
