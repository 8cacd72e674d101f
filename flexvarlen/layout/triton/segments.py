"""`token_bounds` of `flexvarlen.layout.segments`, in Triton: one launch instead of eight."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from flexvarlen.layout.triton.launcher import Launcher

TOKENS = 256


@triton.jit
def ends_and_positions(table, tokens, slots, search_steps):
    """Of each token, one past the last that may see it, and its position; in slots + 1 columns."""
    # The number of segments that end at or before the token.
    slot = tl.zeros_like(tokens)
    end = slot + slots
    for _ in range(search_steps):
        open_ = slot < end
        middle = (slot + end) // 2
        ended = tl.load(table + 1 + middle, mask=open_, other=0) <= tokens
        slot = tl.where(open_ & ended, middle + 1, slot)
        end = tl.where(open_ & ~ended, middle, end)
    columns = slots + 1
    above = tl.load(table + 2 * columns + slot)
    return tl.load(table + columns + slot), above + tokens - tl.load(table + slot)


@triton.jit(do_not_specialize=["slots", "search_steps", "total_tokens"])
def _write_bounds(table, ends, positions, slots, search_steps, total_tokens, TOKENS: tl.constexpr):
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    end, position = ends_and_positions(table, tokens, slots, search_steps)
    tl.store(ends + tokens, end, mask=tokens < total_tokens)
    tl.store(positions + tokens, position, mask=tokens < total_tokens)


_launcher = Launcher(_write_bounds, {"TOKENS": TOKENS})


def write_token_bounds(table: Tensor, total_tokens: int) -> tuple[Tensor, Tensor]:
    """int32 `[T]` each; see `flexvarlen.layout.segments.token_bounds`."""
    ends, positions = table.new_empty(total_tokens), table.new_empty(total_tokens)
    if total_tokens > 0:
        slots = table.shape[1] - 1
        numbers = (slots, slots.bit_length(), total_tokens)
        _launcher(triton.cdiv(total_tokens, TOKENS), [table], [ends, positions], numbers)
    return ends, positions
