"""Each token's position in its document, in Triton: one launch instead of six."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexvarlen.layout.triton.launcher import Launcher
from flexvarlen.layout.triton.search import slots_of

TOKENS = 256


@triton.jit(do_not_specialize=["slots", "search_steps", "total_tokens"])
def _position_ids(cu_seqlens, out, slots, search_steps, total_tokens, TOKENS: tl.constexpr):
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    slot = slots_of(cu_seqlens, tokens, slots, search_steps)
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
