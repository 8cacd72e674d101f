"""Compute the tables of a BlockMask over trees from the extremes of each block.

In a row of trees the keys that a query sees are not contiguous. A block is listed unless the
minimum and maximum of its tokens rule out every pair; it may turn out empty, and the mask_mod then
hides it.

Shapes: Tq, Tk = tokens; BQ, BK = block sizes; NQ = ceil(Tq / BQ), NK = ceil(Tk / BK).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flexvarlen.mask.vectors import MaskInputs, TreeBounds, tree_bounds


def build_tree_tables(
    given: MaskInputs, lo: Tensor, hi: Tensor, block_size: Sequence[int], width: Sequence[int]
) -> list[Tensor]:
    """The eight tables behind `lo` and `hi` in `mask.tables.build_tables`, in plain torch. No sync.

    Args:
        given: the mask, with a tree.
        lo, hi: of `query_bounds`.
        block_size, width: as in `build_tables`.
    """
    block_q, block_k = block_size
    bounds = tree_bounds(given)
    first = torch.zeros_like(lo) if bounds.first is None else bounds.first
    queries = query_extremes(lo, hi, first, block_q, bounds.keys_before)
    keys = key_extremes(bounds, block_k)
    touched, full = visible_blocks(queries[:, :, None], keys[:, None, :])
    partial = touched & ~full
    listed = [_list(x, width[0]) for x in (partial, full)]
    listed += [_list(x.T, width[1]) for x in (partial, full)]
    return [x for pair in listed for x in pair]


def query_extremes(
    lo: Tensor, hi: Tensor, first: Tensor, block: int, keys_before: int = 0
) -> Tensor:
    """Extremes of each block's queries that see any key, for `visible_blocks`: int32 `[7, NQ]`.

    First and last query (among the keys, of which `keys_before` come first), smallest and largest
    lo, smallest and largest first position, and whether the block is complete and each of its
    queries sees a key. An incomplete last block has no full
    blocks, as in create_block_mask.
    """
    tokens = torch.arange(keys_before, keys_before + len(lo), device=lo.device, dtype=torch.int32)
    sees = lo < hi
    rows = [extreme(x, block, sees) for x in (tokens, lo, first) for extreme in (_least, _most)]
    whole = _least(sees.to(torch.int32), block) * _is_complete(lo, block)
    return torch.stack([*rows, whole])


def key_extremes(bounds: TreeBounds, block: int) -> Tensor:
    """Extremes of each block's keys, for `visible_blocks`: int32 `[7, NK]`.

    First and last key, smallest and largest end, smallest and largest position, and whether the
    block is complete.
    """
    tokens = torch.arange(len(bounds.end), device=bounds.end.device, dtype=torch.int32)
    rows = [
        extreme(x, block)
        for x in (tokens, bounds.end, bounds.position)
        for extreme in (_least, _most)
    ]
    return torch.stack([*rows, _is_complete(tokens, block)])


def visible_blocks(queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Which pairs of blocks may hold a visible pair, and in which all pairs are visible; bool.

    Args:
        queries, keys: of `query_extremes` and `key_extremes`, broadcast against each other.
    """
    q_first, q_last, lo_least, lo_most, first_least, first_most, whole = queries
    k_first, k_last, end_least, end_most, position_least, position_most, complete = keys
    # In a block whose queries see nothing, the last query is -1.
    touched = (k_first <= q_last) & (end_most > q_first)
    touched &= (k_last >= lo_least) & (position_most >= first_least)
    full = (k_last <= q_first) & (end_least > q_last)
    full &= (k_first >= lo_most) & (position_least >= first_most)
    return touched, full & (whole > 0) & (complete > 0)


def _is_complete(x: Tensor, block: int) -> Tensor:
    """int32 `[blocks]`: 1 where the row does not end inside the block."""
    blocks = torch.arange(-(-len(x) // block), device=x.device)
    return (blocks < len(x) // block).to(torch.int32)


def _in_blocks(x: Tensor, block: int, fill: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, -len(x) % block), value=fill).view(-1, block)


def _least(x: Tensor, block: int, among: Tensor | None = None) -> Tensor:
    """The smallest value of each block's flagged tokens; int32's largest if there are none."""
    most = int(torch.iinfo(torch.int32).max)
    if among is not None:
        x = x.masked_fill(~among, most)
    return _in_blocks(x, block, most).amin(1)


def _most(x: Tensor, block: int, among: Tensor | None = None) -> Tensor:
    """The largest value of each block's flagged tokens; -1 if there are none."""
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
