"""The tables of a BlockMask over trees, from the extremes of each block.

Along a row of trees the keys that a query sees are no run. A block is listed unless the extremes of
its tokens rule out every pair; it may turn out empty, and the mask_mod then hides it.

Shapes: T = tokens; BQ, BK = block sizes; NQ = ceil(T / BQ), NK = ceil(T / BK).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flexvarlen.mask.vectors import MaskInputs, tree_bounds


def build_tree_tables(
    given: MaskInputs, lo: Tensor, hi: Tensor, block_size: Sequence[int], width: Sequence[int]
) -> list[Tensor]:
    """The eight tables, as `mask.tables.build_tables` gives them. No sync; memory O(NQ · NK).

    Args:
        given: the mask, with a tree.
        lo, hi: of `query_bounds`.
    """
    block_q, block_k = block_size
    end, position, first = tree_bounds(given)
    tokens = torch.arange(len(lo), device=lo.device, dtype=torch.int32)
    sees = lo < hi
    nothing = int(torch.iinfo(torch.int32).max)

    # Of the queries that see anything in a block of queries, and of all its queries.
    q_first, q_last = _least(tokens, block_q, sees), _most(tokens, block_q, sees)
    lo_least, lo_most = _least(lo, block_q, sees), _most(lo, block_q)
    first_least, first_most = _least(first, block_q, sees), _most(first, block_q)
    whole = _least(sees.int(), block_q) > 0
    # Of the keys of a block of keys.
    k_first, k_last = _least(tokens, block_k), _most(tokens, block_k)
    end_least, end_most = _least(end, block_k), _most(end, block_k)
    position_least, position_most = _least(position, block_k), _most(position, block_k)

    def rows(x: Tensor) -> Tensor:
        return x[:, None]

    touched = (k_first <= rows(q_last)) & (end_most > rows(q_first))
    touched &= (k_last >= rows(lo_least)) & (position_most >= rows(first_least))
    touched &= rows(q_first < nothing)
    full = (k_last <= rows(q_first)) & (end_least > rows(q_last))
    full &= (k_first >= rows(lo_most)) & (position_least >= rows(first_most))
    # As in create_block_mask, an incomplete last block of queries or keys is never full.
    complete_q, complete_k = (
        torch.arange(len(x), device=lo.device) < len(lo) // block
        for x, block in ((q_first, block_q), (k_first, block_k))
    )
    full &= rows(whole & complete_q) & complete_k
    partial = touched & ~full
    listed = [_list(x, width[0]) for x in (partial, full)]
    listed += [_list(x.T, width[1]) for x in (partial, full)]
    return [x for pair in listed for x in pair]


def _in_blocks(x: Tensor, block: int, fill: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, -len(x) % block), value=fill).view(-1, block)


def _least(x: Tensor, block: int, among: Tensor | None = None) -> Tensor:
    """The least value in each block, among the flagged tokens; int32's largest of none."""
    most = int(torch.iinfo(torch.int32).max)
    if among is not None:
        x = x.masked_fill(~among, most)
    return _in_blocks(x, block, most).amin(1)


def _most(x: Tensor, block: int, among: Tensor | None = None) -> Tensor:
    """The largest value in each block, among the flagged tokens; -1 of none."""
    if among is not None:
        x = x.masked_fill(~among, -1)
    return _in_blocks(x, block, -1).amax(1)


def _list(listed: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Counts `[1, 1, rows]` and indices `[1, 1, rows, width]`, ascending, padded with zeros."""
    counts = listed.sum(1, dtype=torch.int32)
    torch._assert_async(
        (counts <= width).all(),
        "flexvarlen: a tree does not fit the layout or max_seqlen_bound; make the layout with a "
        "larger bound.",
    )
    order = listed.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :width]
    order = torch.nn.functional.pad(order, (0, width - order.shape[1]))
    column = torch.arange(width, device=listed.device)
    indices = torch.where(column < counts[:, None], order, 0).to(torch.int32)
    return counts[None, None].contiguous(), indices[None, None].contiguous()
