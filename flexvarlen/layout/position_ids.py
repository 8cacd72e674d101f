"""Each token's position in its document."""

from __future__ import annotations

import torch
from torch import Tensor

from flexvarlen.layout.boundaries import HAS_TRITON, slots_of


def compute_position_ids(cu_seqlens: Tensor, total_tokens: int) -> Tensor:
    """Positions int64 `[T]`, from 0 in each document; boundaries int32 `[N + 1]`. No sync."""
    if cu_seqlens.is_cuda and HAS_TRITON and type(cu_seqlens) is Tensor:  # not a FakeTensor
        from flexvarlen.layout.triton.position_ids import position_ids

        return position_ids(cu_seqlens.contiguous(), total_tokens)
    tokens = torch.arange(total_tokens, device=cu_seqlens.device)
    return tokens - cu_seqlens[slots_of(cu_seqlens, tokens.to(torch.int32))]


# A custom operator: Inductor would otherwise repeat the search at every use of the positions.
traced_position_ids = torch.library.custom_op(
    "flexvarlen::position_ids", compute_position_ids, mutates_args=()
)


@traced_position_ids.register_fake
def _(cu_seqlens: Tensor, total_tokens: int) -> Tensor:
    return cu_seqlens.new_empty((total_tokens,), dtype=torch.int64)
