"""Compute the eight tables of a BlockMask in closed form, without evaluating token pairs.

The bounds of `vectors.py` never decrease. So the key blocks that a query block touches form one
run among the blocks that any query sees, and its full blocks are a run inside that run. The
bounds of the keys give the transposed tables in the same way.

On CUDA one Triton kernel writes everything (`triton/tables.py`); elsewhere, for masks with runs,
and as its reference, plain torch.

Shapes: Tq, Tk = tokens; BQ, BK = block sizes; NQ = ceil(Tq / BQ), NK = ceil(Tk / BK).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexvarlen.layout.boundaries import HAS_TRITON
from flexvarlen.mask.table_shapes import table_shapes
from flexvarlen.mask.tree_tables import build_tree_tables
from flexvarlen.mask.vectors import SCHEMA, MaskInputs, key_bounds, query_bounds


def build_tables(
    given: MaskInputs, block_size: list[int], width: list[int], one_storage: bool = True
) -> list[Tensor]:
    """Build `Tables`, as a list.

    Args:
        given: the mask.
        block_size: `[BQ, BK]`.
        width: columns of the kv and the q tables; they must be enough for any row, or an
            assertion fails (device-side on a GPU).
        one_storage: whether the Triton kernel's tables may be views of one tensor.

    No sync.
    """
    if given.cu_seqlens_q.device.type == "cuda" and HAS_TRITON and given.runs is None:
        from flexvarlen.mask.triton.tables import build_tables_in_one_launch
        from flexvarlen.mask.triton.tree_tables import build_tree_tables_in_two_launches

        plain = given.tree is None
        build = build_tables_in_one_launch if plain else build_tree_tables_in_two_launches
        return build(given, block_size, width, one_storage)
    return build_tables_in_torch(given, block_size, width)


def build_tables_in_torch(
    given: MaskInputs, block_size: list[int], width: list[int]
) -> list[Tensor]:
    """`build_tables` in plain torch, on any device."""
    lo, hi = query_bounds(given)
    if given.tree is not None:
        return [lo, hi, *build_tree_tables(given, lo, hi, block_size, width)]
    first, last = key_bounds(given)
    block_q, block_k = block_size
    seen = _any_in_block(first < last, block_k)
    seeing = _any_in_block(lo < hi, block_q)
    kv = _list_blocks(lo, hi, block_q, block_k, seen, width[0])
    q = _list_blocks(first, last, block_k, block_q, seeing, width[1])
    return [lo, hi, *kv, *q]


def _any_in_block(flags: Tensor, block: int) -> Tensor:
    """bool `[blocks]`: whether a flag of each block is set."""
    missing = -flags.shape[0] % block
    return torch.nn.functional.pad(flags, (0, missing)).view(-1, block).any(-1)


def _list_blocks(
    lo: Tensor, hi: Tensor, block: int, other_block: int, live: Tensor, width: int
) -> list[Tensor]:
    """For each block of rows, counts and indices of its partial, then its full blocks.

    `live`, bool `[other blocks]`, marks blocks that any row touches. A block of rows touches all
    live blocks between its first and its last one.
    """
    tokens, device = lo.shape[0], lo.device
    rows = torch.arange(-(-tokens // block), device=device)
    top, bottom = rows * block, ((rows + 1) * block).clamp(max=tokens) - 1

    # Rows that see nothing have bounds too. To find what a block touches, replace them by the lo of
    # the next row that sees something, and by the hi of the previous one.
    sees = lo < hi
    next_lo = lo.masked_fill(~sees, torch.iinfo(lo.dtype).max).flip(0).cummin(0).values.flip(0)
    last_hi = hi.masked_fill(~sees, 0).cummax(0).values
    any_sees = _any_in_block(sees, block)
    first = torch.where(any_sees, next_lo[top] // other_block, 0)
    end = torch.where(any_sees, -(-last_hi[bottom] // other_block), 0)

    # Full blocks: all rows of the block see all of them. An incomplete last block has none, as in
    # create_block_mask.
    full_first = -(-lo[bottom] // other_block)
    kept = (hi[top] // other_block - full_first).clamp(min=0)
    kept = torch.where(rows < tokens // block, kept, 0)

    # Indices among the live blocks.
    live_blocks = (~live).to(torch.int8).argsort(stable=True)
    rank = torch.nn.functional.pad(live.cumsum(0), (1, 0))
    touched_rank, touched = rank[first], rank[end] - rank[first]
    full_rank = torch.where(kept > 0, rank[full_first.clamp(max=live.shape[0])], touched_rank)

    k = torch.arange(width, device=device)
    partial = touched - kept
    torch._assert_async(
        (torch.maximum(partial, kept) <= width).all(),
        "flexvarlen: a document does not fit the layout or max_seqlen_bound; make the layout with "
        "a larger bound.",
    )
    skip = torch.where(k >= (full_rank - touched_rank)[:, None], kept[:, None], 0)
    live_blocks = torch.nn.functional.pad(live_blocks, (0, 1))  # something to index if none is live

    def at(ranks: Tensor, counts: Tensor) -> Tensor:
        listed = k < counts[:, None]
        return torch.where(listed, live_blocks[torch.where(listed, ranks, 0)], 0)

    partial_indices = at(touched_rank[:, None] + k + skip, partial)
    full_indices = at(full_rank[:, None] + k, kept)
    return [
        x.to(torch.int32)[None, None].contiguous()
        for x in (partial, partial_indices, kept, full_indices)
    ]


# A custom operator in compiled graphs: Inductor would otherwise fuse the tables into views that
# FlexAttention's templates misread (torch 2.11 on CUDA: silently wrong attention) or reject (torch
# 2.13 on the CPU).
@torch.library.custom_op(
    "flexvarlen::build_tables",
    mutates_args=(),
    schema=f"({SCHEMA}, SymInt[] block_size, SymInt[] width) -> Tensor[]",
)
def build_tables_operator(*given: Any) -> list[Tensor]:
    """`build_tables` of the fields of `MaskInputs` and the two sizes, for compiled graphs.

    The outputs of a custom operator must not share storage.
    """
    *mask, block_size, width = given
    return build_tables(MaskInputs(*mask), block_size, width, one_storage=False)


@build_tables_operator.register_fake
def _(*given: Any) -> list[Tensor]:
    *mask, block_size, width = given
    inputs = MaskInputs(*mask)
    shapes = table_shapes(inputs.total_tokens, block_size, width)
    return [inputs.cu_seqlens_q.new_empty(shape) for shape in shapes]
