"""Each token's position in its document, in Triton: one launch instead of six."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexvarlen.layout.triton.launcher import Launcher

TOKENS = 256


@triton.jit(do_not_specialize=["slots", "search_steps", "total_tokens"])
def _position_ids(cu_seqlens, out, slots, search_steps, total_tokens, TOKENS: tl.constexpr):
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    # The number of documents that end at or before the token.
    slot = tl.zeros_like(tokens)
    end = slot + slots
    for _ in range(search_steps):
        open_ = slot < end
        middle = (slot + end) // 2
        ended = tl.load(cu_seqlens + 1 + middle, mask=open_, other=0) <= tokens
        slot = tl.where(open_ & ended, middle + 1, slot)
        end = tl.where(open_ & ~ended, middle, end)
    position = tokens - tl.load(cu_seqlens + slot)
    tl.store(out + tokens, position.to(tl.int64), mask=tokens < total_tokens)


_launcher = Launcher(_position_ids, {"TOKENS": TOKENS})


def position_ids(cu_seqlens: Tensor, total_tokens: int) -> Tensor:
    """int64 `[T]` positions from int32 `[N + 1]`; padding counts from the last boundary."""
    out = torch.empty(total_tokens, dtype=torch.int64, device=cu_seqlens.device)
    if total_tokens > 0:
        slots = cu_seqlens.shape[0] - 1
        numbers = (slots, slots.bit_length(), total_tokens)
        _launcher(triton.cdiv(total_tokens, TOKENS), [cu_seqlens], [out], numbers)
    return out
