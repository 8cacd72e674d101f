"""FlexAttention's BlockMask of a packed row, in closed form from `(lo, hi)`, without a host sync.

Both bounds never decrease, so the key blocks that a query block touches are one run, those it keeps
whole are a run inside that one, and the transposed tables (query blocks of a key block) are two
binary searches.

Shapes: T = total_tokens, BQ and BK = block sizes, NQ = ceil(T / BQ), NK = ceil(T / BK).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexvarlen.bounds import UNLIMITED, MaskSpec, interval_bounds
from flexvarlen.layout import PackedLayout

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def document_block_mask(
    layout: PackedLayout,
    *,
    causal: bool = True,
    window: int | tuple[int, int] | None = None,
    block_size: int | tuple[int, int] = 128,
    compact: bool | None = None,
) -> BlockMask:
    """The BlockMask `[1, 1, T, T]` under which each row sees only keys of its own document.

    Equal to `create_block_mask` of the same mask, block for block (beside padding inside a row: a
    block that only padding rows would touch may be listed, and is masked).

    Args:
        layout: the documents; its `max_seqlen_bound` gives the tables' width.
        causal, window: as in `MaskSpec.of`.
        block_size: BlockMask granularity in tokens, or (query, key).
        compact: tables as wide as the most blocks any row can hold, instead of one column for every
            block of the row. Default: compact on a GPU, full width on the CPU, whose compiled
            kernel needs it. `to_dense()` and `str()` of a compact mask need torch 2.14.

    Raises:
        ValueError: a bad window or block size.

    No sync; traces under `fullgraph=True`. Memory O(NQ · width).
    """
    return block_mask_of(
        layout, MaskSpec.of(causal=causal, window=window), block_size=block_size, compact=compact
    )


def block_mask_of(
    layout: PackedLayout,
    mask: MaskSpec,
    *,
    block_size: int | tuple[int, int] = 128,
    compact: bool | None = None,
) -> BlockMask:
    """`document_block_mask` of a `MaskSpec`."""
    block_q, block_k = (block_size, block_size) if isinstance(block_size, int) else block_size
    if min(block_q, block_k) < 1:
        raise ValueError(
            f"block_size must be at least 1 token, got {block_size}; FlexAttention's default is "
            "128."
        )
    total = layout.total_tokens
    num_q, num_k = -(-total // block_q), -(-total // block_k)
    width_k, width_q = num_k, num_q
    if (layout.device.type != "cpu") if compact is None else compact:
        longest = layout.max_seqlen_bound
        width_k = min(num_k, _most_blocks(longest, mask.left, mask.right, block_q, block_k))
        width_q = min(num_q, _most_blocks(longest, mask.right, mask.left, block_k, block_q))
    build = document_tables if torch.compiler.is_compiling() else _build_tables
    lo, hi, *tables = build(
        layout.cu_seqlens,
        layout.padding,
        total,
        mask.left,
        mask.right,
        [block_q, block_k],
        [width_k, width_q],
    )
    (
        kv_num,
        kv_indices,
        full_kv_num,
        full_kv_indices,
        q_num,
        q_indices,
        full_q_num,
        full_q_indices,
    ) = tables
    return BlockMask(
        seq_lengths=(total, total),
        kv_num_blocks=kv_num,
        kv_indices=kv_indices,
        full_kv_num_blocks=full_kv_num,
        full_kv_indices=full_kv_indices,
        q_num_blocks=q_num,
        q_indices=q_indices,
        full_q_num_blocks=full_q_num,
        full_q_indices=full_q_indices,
        BLOCK_SIZE=(block_q, block_k),
        mask_mod=causal_mask_mod(lo) if mask.causal else interval_mask_mod(lo, hi),
    )


def causal_mask_mod(lo: Tensor) -> MaskMod:
    """`lo[q] <= kv <= q`: compiles to a loop as long as plain causal's, and needs no `hi`."""

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (kv >= lo[q]) & (kv <= q)

    return mask_mod


def interval_mask_mod(lo: Tensor, hi: Tensor) -> MaskMod:
    """`lo[q] <= kv < hi[q]`."""

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (kv >= lo[q]) & (kv < hi[q])

    return mask_mod


def _most_blocks(longest: int, before: int, after: int, block: int, other: int) -> int:
    """The most blocks of `other` tokens that one of `block` touches; documents up to `longest`."""
    before = longest - 1 if before == UNLIMITED else min(before, longest - 1)
    after = longest - 1 if after == UNLIMITED else min(after, longest - 1)
    if block % other == 0:  # the block's borders are borders of the other grid
        return block // other + -(-before // other) + -(-after // other)
    return (before + block + after - 1) // other + 2


def _build_tables(
    cu_seqlens: Tensor,
    padding: Tensor | None,
    total_tokens: int,
    left: int,
    right: int,
    block_size: list[int],
    width: list[int],
) -> list[Tensor]:
    """`lo`, `hi`, and the eight tables in BlockMask's order.

    Counts and indices of kv, full kv, q, full q.
    """
    block_q, block_k = block_size
    num_q, num_k = -(-total_tokens // block_q), -(-total_tokens // block_k)
    lo, hi = interval_bounds(cu_seqlens, padding, total_tokens, left, right)

    # Runs of key blocks of each query block: touched [first, last), kept whole [full_first,
    # full_last).
    rows = torch.arange(num_q, device=lo.device)
    top, bottom = rows * block_q, ((rows + 1) * block_q).clamp(max=total_tokens) - 1
    first = lo[top] // block_k
    last = torch.maximum(-(-hi[bottom] // block_k), first)
    full_first = -(-lo[bottom] // block_k)
    full_last = torch.maximum(hi[top] // block_k, full_first)
    # A query block that is not whole (the last of a ragged row) keeps no key block whole, as in
    # create_block_mask.
    whole_q = total_tokens // block_q
    kept = torch.where(rows < whole_q, full_last - full_first, 0)

    # Transposed: the query blocks whose run holds key block j.
    cols = torch.arange(num_k, device=lo.device, dtype=torch.int32)
    first_q = torch.searchsorted(last, cols, right=True, out_int32=True)
    last_q = torch.searchsorted(first, cols, right=True, out_int32=True)
    full_first_q = torch.searchsorted(full_last, cols, right=True, out_int32=True)
    full_last_q = torch.searchsorted(full_first, cols, right=True, out_int32=True).clamp(
        max=whole_q
    )
    kept_q = (full_last_q - full_first_q).clamp(min=0)

    kv = _list_blocks(first, last, full_first, kept, width[0])
    q = _list_blocks(first_q, torch.maximum(last_q, first_q), full_first_q, kept_q, width[1])
    return [lo, hi, *kv, *q]


def _list_blocks(
    first: Tensor, last: Tensor, full_first: Tensor, kept: Tensor, width: int
) -> list[Tensor]:
    """Partial, then full blocks of R runs: counts `[1, 1, R]`, indices `[1, 1, R, width]`.

    The partial blocks are the run `[first, last)` without its middle `[full_first, full_first +
    kept)`.
    """
    k = torch.arange(width, device=first.device, dtype=torch.int32)
    # A count past the width can only come from a document past the bound, which the layout asserts
    # on.
    partial = (last - first - kept).clamp(max=width)
    kept = kept.clamp(max=width)
    skip = torch.where(k >= (full_first - first)[:, None], kept[:, None], 0)
    partial_indices = torch.where(k < partial[:, None], first[:, None] + k + skip, 0)
    full_indices = torch.where(k < kept[:, None], full_first[:, None] + k, 0)
    return [
        x.to(torch.int32)[None, None].contiguous()
        for x in (partial, partial_indices, kept, full_indices)
    ]


# Inside a compiled graph one operator: traced through, inductor fuses the tables into views that
# FlexAttention's templates misread (torch 2.11 on CUDA: silently wrong attention) or reject (torch
# 2.13 on the CPU).
document_tables = torch.library.custom_op(
    "flexvarlen::document_tables", _build_tables, mutates_args=()
)


@document_tables.register_fake
def _(
    cu_seqlens: Tensor,
    padding: Tensor | None,
    total_tokens: int,
    left: int,
    right: int,
    block_size: list[int],
    width: list[int],
) -> list[Tensor]:
    def table(*shape: int) -> Tensor:
        return cu_seqlens.new_empty(shape)

    tables = [table(total_tokens), table(total_tokens)]
    for block, columns in zip(block_size, width, strict=True):
        blocks = -(-total_tokens // block)
        for _partial_then_full in range(2):
            tables += [table(1, 1, blocks), table(1, 1, blocks, columns)]
    return tables
