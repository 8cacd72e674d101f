"""One Triton launch that writes the row bounds and all eight tables of a document BlockMask.

A program handles one block of queries or one block of keys. It finds the document of each of its
tokens by binary search, computes each token's bounds, and lists the run of blocks between the
extremes. `mask/vectors.py` and `mask/tables.py` are its reference in torch.

Names: "own" is the row whose block a program handles, "other" the row whose blocks it lists.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from flexvarlen.layout.triton.launcher import Launcher
from flexvarlen.mask.spec import UNLIMITED, MaskSpec
from flexvarlen.mask.table_shapes import table_shapes
from flexvarlen.mask.triton.vectors import token_bounds

if TYPE_CHECKING:
    from flexvarlen.mask.vectors import MaskInputs

COLUMNS = tl.constexpr(128)
"""Number of indices that a program writes per iteration."""
GAP_COLUMNS = tl.constexpr(32)
"""Number of blocks tested per iteration where a run may have gaps, each against all rows."""
_ALIGNED = 32  # tables in one storage start at multiples of this many int32: 128 bytes


@triton.jit
def _write_lists(
    low,
    high,
    in_row,
    block,
    shard_tokens,
    other_tokens,
    counts,
    indices,
    full_counts,
    full_indices,
    width,
    OWN_BLOCK: tl.constexpr,
    OTHER_BLOCK: tl.constexpr,
    GAPS: tl.constexpr,
):
    """The partial and the full list of one block, from the bounds of its tokens."""
    sees = in_row & (low < high)
    any_sees = tl.max(sees.to(tl.int32), axis=0) > 0
    first = tl.min(tl.where(sees, low, other_tokens), axis=0) // OTHER_BLOCK
    end = tl.cdiv(tl.max(tl.where(sees, high, 0), axis=0), OTHER_BLOCK)
    first = tl.where(any_sees, first, 0)
    end = tl.where(any_sees, end, 0)
    full_first = tl.cdiv(tl.max(tl.where(in_row, low, 0), axis=0), OTHER_BLOCK)
    full_end = tl.min(tl.where(in_row, high, other_tokens), axis=0) // OTHER_BLOCK
    whole = (block + 1) * OWN_BLOCK <= shard_tokens
    kept = tl.where(whole, tl.maximum(full_end - full_first, 0), 0)
    row = block.to(tl.int64) * width

    touched = end - first
    if GAPS:
        # Test each block of the run, and skip those that no token sees.
        partial = kept * 0
        for begin in range(first, end, GAP_COLUMNS):
            other = begin + tl.arange(0, GAP_COLUMNS)
            from_ = other[None, :] * OTHER_BLOCK
            touches = sees[:, None] & (low[:, None] < from_ + OTHER_BLOCK) & (high[:, None] > from_)
            listed = (tl.max(touches.to(tl.int32), axis=0) > 0) & (other < end)
            listed = listed & ((other < full_first) | (other >= full_first + kept))
            place = partial + tl.cumsum(listed.to(tl.int32), axis=0) - 1
            tl.store(indices + row + place, other, mask=listed & (place < width))
            partial += tl.sum(listed.to(tl.int32), axis=0)
    else:
        partial = touched - kept

    # Fails only for invalid boundaries that were written after the checks.
    sound = (first >= 0) & (end <= tl.cdiv(other_tokens, OTHER_BLOCK))
    sound = sound & (partial >= 0) & (partial <= width) & (kept <= width)
    tl.device_assert(sound, "flexvarlen: a document does not fit the layout or max_seqlen_bound")

    for begin in range(0, width, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        in_table = column < width
        if GAPS:
            tl.store(indices + row + column, 0, mask=in_table & (column >= partial))
        else:
            skip = tl.where(column >= full_first - first, kept, 0)
            index = tl.where(column < partial, first + column + skip, 0)
            tl.store(indices + row + column, index, mask=in_table)
        full_index = tl.where(column < kept, full_first + column, 0)
        tl.store(full_indices + row + column, full_index, mask=in_table)
    tl.store(counts + block, partial)
    tl.store(full_counts + block, kept)


@triton.jit
def _serve_block(
    block,
    own_cu,
    other_cu,
    own_padding,
    other_padding,
    prefix,
    lo,
    hi,
    counts,
    indices,
    full_counts,
    full_indices,
    shard_tokens,
    other_tokens,
    slots,
    search_steps,
    left,
    right,
    chunk,
    width,
    OWN_BLOCK: tl.constexpr,
    OTHER_BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    OF_KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    CHUNK: tl.constexpr,
    PREFIX: tl.constexpr,
    SHIFTED: tl.constexpr,
    OWN_PADDING: tl.constexpr,
    OTHER_PADDING: tl.constexpr,
    GAPS: tl.constexpr,
):
    lane = tl.arange(0, LANES)
    tokens = block * OWN_BLOCK + lane
    in_row = (lane < OWN_BLOCK) & (tokens < shard_tokens)
    low, high = token_bounds(
        own_cu, other_cu, own_padding, other_padding, prefix, tokens, shard_tokens, other_tokens,
        slots, search_steps, left, right, chunk, OF_KEYS, CAUSAL, LEFT, RIGHT, CHUNK, PREFIX,
        SHIFTED, OWN_PADDING, OTHER_PADDING,
    )  # fmt: skip
    if not OF_KEYS:
        tl.store(lo + tokens, low, mask=in_row)
        tl.store(hi + tokens, high, mask=in_row)
    _write_lists(
        low, high, in_row, block, shard_tokens, other_tokens, counts, indices, full_counts,
        full_indices, width, OWN_BLOCK, OTHER_BLOCK, GAPS,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "tokens_q", "tokens_k", "slots", "search_steps", "left", "right", "chunk", "width_k",
        "width_q",
    ]
)  # fmt: skip
def _document_tables(
    cu_q,
    cu_k,
    padding_q,
    padding_k,
    prefix,
    lo,
    hi,
    kv_counts,
    kv_indices,
    full_kv_counts,
    full_kv_indices,
    q_counts,
    q_indices,
    full_q_counts,
    full_q_indices,
    tokens_q,
    tokens_k,
    slots,
    search_steps,
    left,
    right,
    chunk,
    width_k,
    width_q,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LANES_Q: tl.constexpr,
    LANES_K: tl.constexpr,
    CAUSAL: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    CHUNK: tl.constexpr,
    PREFIX: tl.constexpr,
    SHIFTED: tl.constexpr,
    CROSS: tl.constexpr,
    PADDING_Q: tl.constexpr,
    PADDING_K: tl.constexpr,
    GAPS: tl.constexpr,
):
    blocks_q = tl.cdiv(tokens_q, BLOCK_Q)
    if tl.program_id(0) < blocks_q:
        _serve_block(
            tl.program_id(0), cu_q, cu_k, padding_q, padding_k, prefix, lo, hi, kv_counts,
            kv_indices, full_kv_counts, full_kv_indices, tokens_q, tokens_k, slots, search_steps,
            left, right, chunk, width_k, BLOCK_Q, BLOCK_K, LANES_Q, False, CAUSAL, LEFT, RIGHT,
            CHUNK, PREFIX, SHIFTED, PADDING_Q, CROSS and PADDING_K, GAPS,
        )  # fmt: skip
    else:
        _serve_block(
            tl.program_id(0) - blocks_q, cu_k, cu_q, padding_k, padding_q, prefix, lo, hi, q_counts,
            q_indices, full_q_counts, full_q_indices, tokens_k, tokens_q, slots, search_steps,
            left, right, chunk, width_q, BLOCK_K, BLOCK_Q, LANES_K, True, CAUSAL, LEFT, RIGHT,
            CHUNK, PREFIX, SHIFTED, PADDING_K, CROSS and PADDING_Q, GAPS,
        )  # fmt: skip


@dataclass(frozen=True)
class TableViews:
    """Where the tables are in one storage: its size, and of each its shape, strides and offset."""

    storage: int
    views: list[tuple[tuple[int, ...], tuple[int, ...], int]]

    def allocate(self, like: Tensor, one_storage: bool) -> list[Tensor]:
        """Tables without values, on the device of `like`; one allocation saves host time."""
        if one_storage:
            storage = like.new_empty(self.storage)
            return [storage.as_strided(*view) for view in self.views]
        return [like.new_empty(shape) for shape, _, _ in self.views]


def table_views(
    total_tokens: tuple[int, int], block_size: tuple[int, int], width: tuple[int, int]
) -> TableViews:
    """The views of tables of these sizes, as in `table_shapes`."""
    views, offset = [], 0
    for shape in table_shapes(total_tokens, block_size, width):
        strides = tuple(accumulate(reversed(shape[1:]), mul, initial=1))[::-1]
        views.append((shape, strides, offset))
        offset += triton.cdiv(math.prod(shape), _ALIGNED) * _ALIGNED
    return TableViews(offset, views)


@dataclass(frozen=True)
class _Launch:
    """The static arguments of a launch: everything except the tensors."""

    programs: int
    views: TableViews
    numbers: tuple[int, ...]
    launcher: Launcher


@lru_cache(maxsize=1024)
def _launch(
    slots: int,
    padded: tuple[bool, bool],
    total_tokens: tuple[int, int],
    spec: tuple[int, ...],
    block_size: tuple[int, int],
    width: tuple[int, int],
) -> _Launch:
    mask = MaskSpec.from_ints(spec)
    lanes_q, lanes_k = (triton.next_power_of_2(block) for block in block_size)
    return _Launch(
        programs=sum(triton.cdiv(t, b) for t, b in zip(total_tokens, block_size, strict=True)),
        views=table_views(total_tokens, block_size, width),
        numbers=(
            *total_tokens,
            slots,
            slots.bit_length(),  # steps of a binary search
            mask.left,
            mask.right,
            mask.chunk,
            *width,
        ),
        launcher=Launcher(
            _document_tables,
            {
                "BLOCK_Q": block_size[0],
                "BLOCK_K": block_size[1],
                "LANES_Q": lanes_q,
                "LANES_K": lanes_k,
                "CAUSAL": mask.causal,
                "LEFT": mask.left != UNLIMITED,
                "RIGHT": mask.right != UNLIMITED,
                "CHUNK": mask.chunk > 0,
                "PREFIX": mask.prefix,
                "SHIFTED": mask.cross and not mask.top_left,
                "CROSS": mask.cross,
                "PADDING_Q": padded[0],
                "PADDING_K": padded[1],
                # Only in these cases can keys that no query sees lie between visible keys.
                "GAPS": mask.cross or (any(padded) and block_size[0] != block_size[1]),
            },
        ),
    )


def build_tables_in_one_launch(
    given: MaskInputs, block_size: Sequence[int], width: Sequence[int], one_storage: bool
) -> list[Tensor]:
    """`flexvarlen.mask.tables.build_tables` on a CUDA device, with the same arguments and result.

    No sync; may be captured in a CUDA graph.
    """
    cu_seqlens = given.cu_seqlens_q
    launch = _launch(
        cu_seqlens.shape[0] - 1,
        (given.padding_q is not None, given.padding_k is not None),
        tuple(given.total_tokens),
        tuple(given.spec),
        tuple(block_size),
        tuple(width),
    )
    tables = launch.views.allocate(cu_seqlens, one_storage)
    if launch.programs > 0:
        launch.launcher(launch.programs, given[:5], tables, launch.numbers)
    return tables
