"""The block lists of a mask over trees, in one Triton launch.

`mask/tree_tables.py` is its reference in torch, and says what the extremes are. A program lists the
blocks of one block of queries, or of one block of keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import triton
import triton.language as tl
from torch import Tensor

from flexvarlen.layout.triton.launcher import Launcher

COLUMNS = tl.constexpr(128)
"""Number of blocks that a program tests per iteration."""


@triton.jit
def _listed(queries, keys, q, k, count_q, count_k, in_table):
    """`listed_blocks` of blocks q and k, one of them a vector of blocks."""
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


@triton.jit(do_not_specialize=["count_q", "count_k", "width"])
def _tree_lists(
    queries,
    keys,
    counts,
    indices,
    full_counts,
    full_indices,
    count_q,
    count_k,
    width,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OF_KEYS: tl.constexpr,
):
    block = tl.program_id(0)
    if OF_KEYS:  # queries from the block's first key to the end of its subtrees
        begin = tl.load(keys + block) // BLOCK_Q
        end = tl.minimum(tl.cdiv(tl.load(keys + 3 * count_k + block), BLOCK_Q), count_q)
    else:  # keys from the first tree to the block's last query
        begin = tl.load(queries + 2 * count_q + block) // BLOCK_K
        end = tl.minimum(tl.load(queries + count_q + block) // BLOCK_K + 1, count_k)
        end = tl.where(tl.load(queries + count_q + block) < 0, 0, end)
    row = block.to(tl.int64) * width
    partial = begin * 0
    full = begin * 0
    for start in range(begin, end, COLUMNS):
        other = start + tl.arange(0, COLUMNS)
        in_table = other < end
        own = tl.zeros_like(other) + block
        if OF_KEYS:
            is_partial, is_full = _listed(queries, keys, other, own, count_q, count_k, in_table)
        else:
            is_partial, is_full = _listed(queries, keys, own, other, count_q, count_k, in_table)
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
    tl.store(counts + block, partial)
    tl.store(full_counts + block, full)


def list_blocks(
    queries: Tensor, keys: Tensor, block_size: Sequence[int], width: Sequence[int]
) -> list[Tensor]:
    """The eight tables of `build_tree_tables`. No sync.

    Args:
        queries, keys: of `query_extremes` and `key_extremes`, contiguous.
    """
    count_q, count_k = queries.shape[1], keys.shape[1]
    tables: list[Tensor] = []
    for of_keys, (rows, columns) in enumerate(zip((count_q, count_k), width, strict=True)):
        made = [queries.new_zeros(1, 1, rows, *each) for each in ((), (columns,)) * 2]
        if rows:
            launcher = _launcher(*block_size, bool(of_keys))
            launcher(rows, (queries, keys), made, (count_q, count_k, columns))
        tables += made
    return tables


@lru_cache
def _launcher(block_q: int, block_k: int, of_keys: bool) -> Launcher:
    return Launcher(_tree_lists, {"BLOCK_Q": block_q, "BLOCK_K": block_k, "OF_KEYS": of_keys})
