"""`token_bounds` of `flexvarlen.layout.segments`, in Triton: one launch instead of eight."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from flexvarlen.layout.triton.launcher import Launcher
from flexvarlen.layout.triton.search import slots_of

TOKENS = 256


@triton.jit
def ends_and_positions(table, tokens, slots, search_steps):
    """For each token, one past the last that may see it, and its position; slots + 1 columns."""
    slot = slots_of(table, tokens, slots, search_steps)
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
