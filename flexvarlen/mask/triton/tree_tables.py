"""The row bounds and the tables of a mask over trees, in two Triton launches.

The first takes the extremes of each block of queries and of keys, the second lists the blocks that
they allow. `mask/tree_tables.py` is their reference in torch, and says what the extremes are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from flexvarlen.layout.triton.launcher import Launcher
from flexvarlen.layout.triton.segments import ends_and_positions
from flexvarlen.mask.spec import UNLIMITED, MaskSpec
from flexvarlen.mask.triton.tables import TableViews, table_views
from flexvarlen.mask.triton.vectors import token_bounds

if TYPE_CHECKING:
    from flexvarlen.mask.vectors import MaskInputs

COLUMNS = tl.constexpr(128)
"""Number of blocks that a program tests per iteration."""
MOST = tl.constexpr(2**31 - 1)
"""Minimum over no tokens; the maximum is -1."""
EXTREMES = 7


@triton.jit
def _store_extremes(out, column, columns, x, among):
    """The least and the largest value among the flagged tokens, in two rows of a column."""
    tl.store(out + column, tl.min(tl.where(among, x, MOST), axis=0))
    tl.store(out + columns + column, tl.max(tl.where(among, x, -1), axis=0))


@triton.jit
def _of_queries(
    block,
    cu_seqlens,
    tree,
    lo,
    hi,
    queries,
    count,
    total_tokens,
    keys_before,
    documents,
    document_steps,
    segments,
    segment_steps,
    left,
    chunk,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    LEFT: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The row bounds and the extremes of one block of queries; the row's first tokens are keys."""
    lane = tl.arange(0, LANES)
    row = block * BLOCK + lane
    tokens = keys_before + row
    in_row = (lane < BLOCK) & (tokens < total_tokens)
    # Causal documents, without what the arguments behind `True` are for.
    low, high = token_bounds(
        cu_seqlens, cu_seqlens, cu_seqlens, cu_seqlens, cu_seqlens, tokens, total_tokens,
        total_tokens, documents, document_steps, left, left, chunk, False, True, False, False,
        False, False, False, False, False,
    )  # fmt: skip
    tl.store(lo + row, low, mask=in_row)
    tl.store(hi + row, high, mask=in_row)
    _, position = ends_and_positions(tree, tokens, segments, segment_steps)
    first = tl.zeros_like(position)
    if LEFT:
        first = tl.maximum(first, position - left)
    if CHUNK:
        first = tl.maximum(first, position - position % chunk)
    sees = in_row & (low < high)
    _store_extremes(queries, block, count, tokens, sees)
    _store_extremes(queries + 2 * count, block, count, low, sees)
    _store_extremes(queries + 4 * count, block, count, first, sees)
    blind = tl.max((in_row & (low >= high)).to(tl.int32), axis=0) > 0
    whole = (keys_before + (block + 1) * BLOCK <= total_tokens) & (blind == 0)
    tl.store(queries + 6 * count + block, whole.to(tl.int32))


@triton.jit
def _of_keys(
    block,
    tree,
    keys,
    count,
    total_tokens,
    segments,
    segment_steps,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
):
    """The extremes of one block of keys."""
    lane = tl.arange(0, LANES)
    tokens = block * BLOCK + lane
    in_row = (lane < BLOCK) & (tokens < total_tokens)
    end, position = ends_and_positions(tree, tokens, segments, segment_steps)
    _store_extremes(keys, block, count, tokens, in_row)
    _store_extremes(keys + 2 * count, block, count, end, in_row)
    _store_extremes(keys + 4 * count, block, count, position, in_row)
    whole = (block + 1) * BLOCK <= total_tokens
    tl.store(keys + 6 * count + block, whole.to(tl.int32))


@triton.jit(
    do_not_specialize=[
        "total_tokens", "keys_before", "documents", "document_steps", "segments", "segment_steps",
        "left", "chunk",
    ]
)  # fmt: skip
def _tree_extremes(
    cu_seqlens,
    tree,
    lo,
    hi,
    queries,
    keys,
    total_tokens,
    keys_before,
    documents,
    document_steps,
    segments,
    segment_steps,
    left,
    chunk,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LANES_Q: tl.constexpr,
    LANES_K: tl.constexpr,
    LEFT: tl.constexpr,
    CHUNK: tl.constexpr,
):
    count_q = tl.cdiv(total_tokens - keys_before, BLOCK_Q)
    if tl.program_id(0) < count_q:
        _of_queries(
            tl.program_id(0), cu_seqlens, tree, lo, hi, queries, count_q, total_tokens, keys_before,
            documents, document_steps, segments, segment_steps, left, chunk, BLOCK_Q, LANES_Q, LEFT,
            CHUNK,
        )  # fmt: skip
    else:
        _of_keys(
            tl.program_id(0) - count_q, tree, keys, tl.cdiv(total_tokens, BLOCK_K), total_tokens,
            segments, segment_steps, BLOCK_K, LANES_K,
        )  # fmt: skip


@triton.jit
def _visible(queries, keys, q, k, count_q, count_k, in_table):
    """`visible_blocks` of blocks q and k, one of them a vector of blocks."""
    q_first = tl.load(queries + q, mask=in_table, other=0)
    q_last = tl.load(queries + count_q + q, mask=in_table, other=-1)
    lo_least = tl.load(queries + 2 * count_q + q, mask=in_table, other=0)
    lo_most = tl.load(queries + 3 * count_q + q, mask=in_table, other=0)
    first_least = tl.load(queries + 4 * count_q + q, mask=in_table, other=0)
    first_most = tl.load(queries + 5 * count_q + q, mask=in_table, other=0)
    whole = tl.load(queries + 6 * count_q + q, mask=in_table, other=0)
    k_first = tl.load(keys + k, mask=in_table, other=0)
    k_last = tl.load(keys + count_k + k, mask=in_table, other=0)
    end_least = tl.load(keys + 2 * count_k + k, mask=in_table, other=0)
    end_most = tl.load(keys + 3 * count_k + k, mask=in_table, other=0)
    position_least = tl.load(keys + 4 * count_k + k, mask=in_table, other=0)
    position_most = tl.load(keys + 5 * count_k + k, mask=in_table, other=0)
    complete = tl.load(keys + 6 * count_k + k, mask=in_table, other=0)
    touched = (k_first <= q_last) & (end_most > q_first)
    touched = touched & (k_last >= lo_least) & (position_most >= first_least) & in_table
    full = (k_last <= q_first) & (end_least > q_last)
    full = full & (k_first >= lo_most) & (position_least >= first_most)
    full = full & (whole > 0) & (complete > 0) & in_table
    return touched & (full == 0), full


@triton.jit
def _list_blocks(
    block,
    queries,
    keys,
    counts,
    indices,
    full_counts,
    full_indices,
    count_q,
    count_k,
    keys_before,
    width,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OF_KEYS: tl.constexpr,
):
    """The partial and the full list of one block."""
    if OF_KEYS:  # queries from the block's first key to the end of its subtrees
        begin = tl.maximum(tl.load(keys + block) - keys_before, 0) // BLOCK_Q
        last = tl.maximum(tl.load(keys + 3 * count_k + block) - keys_before, 0)
        end = tl.minimum(tl.cdiv(last, BLOCK_Q), count_q)
    else:  # keys from the first tree to the block's last query
        last = tl.load(queries + count_q + block)
        begin = tl.load(queries + 2 * count_q + block) // BLOCK_K
        end = tl.where(last < 0, 0, tl.minimum(last // BLOCK_K + 1, count_k))
    row = block.to(tl.int64) * width
    partial = begin * 0
    full = begin * 0
    for start in range(begin, end, COLUMNS):
        other = start + tl.arange(0, COLUMNS)
        in_table = other < end
        own = tl.zeros_like(other) + block
        if OF_KEYS:
            is_partial, is_full = _visible(queries, keys, other, own, count_q, count_k, in_table)
        else:
            is_partial, is_full = _visible(queries, keys, own, other, count_q, count_k, in_table)
        place = partial + tl.cumsum(is_partial.to(tl.int32), axis=0) - 1
        tl.store(indices + row + place, other, mask=is_partial & (place < width))
        partial += tl.sum(is_partial.to(tl.int32), axis=0)
        place = full + tl.cumsum(is_full.to(tl.int32), axis=0) - 1
        tl.store(full_indices + row + place, other, mask=is_full & (place < width))
        full += tl.sum(is_full.to(tl.int32), axis=0)
    tl.device_assert(
        (partial <= width) & (full <= width),
        "flexvarlen: a tree does not fit the layout or max_seqlen_bound",
    )
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        tl.store(indices + row + column, 0, mask=(column < width) & (column >= partial))
        tl.store(full_indices + row + column, 0, mask=(column < width) & (column >= full))
    tl.store(counts + block, partial)
    tl.store(full_counts + block, full)


@triton.jit(do_not_specialize=["count_q", "count_k", "keys_before", "width_k", "width_q"])
def _tree_lists(
    queries,
    keys,
    kv_counts,
    kv_indices,
    full_kv_counts,
    full_kv_indices,
    q_counts,
    q_indices,
    full_q_counts,
    full_q_indices,
    count_q,
    count_k,
    keys_before,
    width_k,
    width_q,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    if tl.program_id(0) < count_q:
        _list_blocks(
            tl.program_id(0), queries, keys, kv_counts, kv_indices, full_kv_counts,
            full_kv_indices, count_q, count_k, keys_before, width_k, BLOCK_Q, BLOCK_K, False,
        )  # fmt: skip
    else:
        _list_blocks(
            tl.program_id(0) - count_q, queries, keys, q_counts, q_indices, full_q_counts,
            full_q_indices, count_q, count_k, keys_before, width_q, BLOCK_Q, BLOCK_K, True,
        )  # fmt: skip


@dataclass(frozen=True)
class _Launches:
    """The static arguments of both launches: everything except the tensors."""

    views: TableViews
    blocks: tuple[int, int]
    numbers: tuple[int, ...]
    take_extremes: Launcher
    list_blocks: Launcher


@lru_cache(maxsize=1024)
def _launches(
    documents: int,
    segments: int,
    total_tokens: tuple[int, int],
    spec: tuple[int, ...],
    block_size: tuple[int, int],
    width: tuple[int, int],
) -> _Launches:
    mask = MaskSpec.from_ints(spec)
    blocks = {"BLOCK_Q": block_size[0], "BLOCK_K": block_size[1]}
    lanes_q, lanes_k = (triton.next_power_of_2(block) for block in block_size)
    limits = {"LEFT": mask.left != UNLIMITED, "CHUNK": mask.chunk > 0}
    count_q, count_k = (-(-t // b) for t, b in zip(total_tokens, block_size, strict=True))
    return _Launches(
        views=table_views(total_tokens, block_size, width),
        blocks=(count_q, count_k),
        numbers=(
            total_tokens[1],
            total_tokens[1] - total_tokens[0],
            documents,
            documents.bit_length(),  # steps of a binary search
            segments,
            segments.bit_length(),
            mask.left,
            mask.chunk,
        ),
        take_extremes=Launcher(
            _tree_extremes, {**blocks, "LANES_Q": lanes_q, "LANES_K": lanes_k, **limits}
        ),
        list_blocks=Launcher(_tree_lists, blocks),
    )


def build_tree_tables_in_two_launches(
    given: MaskInputs, block_size: Sequence[int], width: Sequence[int], one_storage: bool
) -> list[Tensor]:
    """`flexvarlen.mask.tables.build_tables` of trees on a CUDA device. No sync.

    May be captured in a CUDA graph.
    """
    cu_seqlens, tree = given.cu_seqlens_k, given.tree
    assert tree is not None
    launches = _launches(
        cu_seqlens.shape[0] - 1,
        tree.shape[1] - 1,
        tuple(given.total_tokens),
        tuple(given.spec),
        tuple(block_size),
        tuple(width),
    )
    tables = launches.views.allocate(cu_seqlens, one_storage)
    count_q, count_k = launches.blocks
    if count_q > 0:
        queries = cu_seqlens.new_empty(EXTREMES, count_q)
        keys = cu_seqlens.new_empty(EXTREMES, count_k)
        outputs = [*tables[:2], queries, keys]
        programs = count_q + count_k
        launches.take_extremes(programs, [cu_seqlens, tree], outputs, launches.numbers)
        numbers = (count_q, count_k, given.total_tokens[1] - given.total_tokens[0], *width)
        launches.list_blocks(programs, [queries, keys], tables[2:], numbers)
    return tables
