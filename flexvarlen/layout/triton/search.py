"""Find the document or segment of each token, for the kernels that need it."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def slots_of(boundaries, tokens, slots, search_steps):
    """The number of slots that end at or before each token: of cu_seqlens, or a table's starts.

    Args:
        boundaries: int32, slots + 1 of them.
        search_steps: `slots.bit_length()`.
    """
    slot = tl.zeros_like(tokens)
    end = slot + slots
    for _ in range(search_steps):
        open_ = slot < end
        middle = (slot + end) // 2
        ended = tl.load(boundaries + 1 + middle, mask=open_, other=0) <= tokens
        slot = tl.where(open_ & ended, middle + 1, slot)
        end = tl.where(open_ & ~ended, middle, end)
    return slot
