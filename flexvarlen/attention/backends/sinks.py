"""Attention sinks: one logit per head, adding `exp(sink)` to each query's softmax denominator.

Shape legend: T = tokens of the query row, H = num_heads, D = head_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LEAST_SINK = -1e30  # instead of -inf: -inf - (-inf) would be NaN where a query sees no key


def finite_sinks(sinks_H: Tensor) -> Tensor:
    """fp32 `[H, 1]`, finite."""
    return sinks_H.float().clamp(min=_LEAST_SINK)[:, None]


def share_without_sink(lse_HT: Tensor, sinks_H: Tensor) -> Tensor:
    """`[T, H, 1]`: the factor by which a sink shrinks each output of a kernel without sinks."""
    return torch.sigmoid(lse_HT - finite_sinks(sinks_H)).T[..., None]
