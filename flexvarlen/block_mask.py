"""FlexAttention's BlockMask of a packed row, in closed form from `(lo, hi)`: nothing of size T x T, no host sync.

Both bounds never decrease, so the key blocks that a query block touches are one run, those it keeps whole are a run
inside that one, and the transposed tables (query blocks of a key block) are two binary searches.

Shapes: T = total_tokens, BQ and BK = block sizes, NQ = ceil(T / BQ), NK = ceil(T / BK).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexvarlen.bounds import UNLIMITED, MaskSpec, bounds_of
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

    Equal to `create_block_mask` of the same mask, block for block (beside padding inside a row: a block that only
    padding rows would touch may be listed, and is masked).

    Args:
        layout: the documents; its `max_seqlen_bound` gives the tables' width.
        causal, window: as in `MaskSpec.of`.
        block_size: BlockMask granularity in tokens, or (query, key).
        compact: tables as wide as the most blocks any row can hold, instead of one column for every block of the row.
            Default: compact on a GPU, full width on the CPU, whose compiled kernel needs it. `to_dense()` and `str()`
            of a compact mask need torch 2.14.

    Raises:
        ValueError: a bad window or block size.

    No sync; traces under `fullgraph=True`. Memory O(NQ · width).
    """
    return block_mask_of(layout, MaskSpec.of(causal=causal, window=window), block_size=block_size, compact=compact)


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
        raise ValueError(f"block_size must be at least 1 token, got {block_size}; FlexAttention's default is 128.")
    total = layout.total_tokens
    num_q, num_k = -(-total // block_q), -(-total // block_k)
    lo, hi = bounds_of(layout, mask)
    width_k, width_q = num_k, num_q
    if (layout.device.type != "cpu") if compact is None else compact:
        width_k = min(num_k, _most_blocks(layout.max_seqlen_bound, mask.left, mask.right, block_q, block_k))
        width_q = min(num_q, _most_blocks(layout.max_seqlen_bound, mask.right, mask.left, block_k, block_q))

    # Runs of key blocks of each query block: touched [first, last), kept whole [full_first, full_last).
    rows = torch.arange(num_q, device=lo.device)
    top, bottom = rows * block_q, ((rows + 1) * block_q).clamp(max=total) - 1
    first = lo[top] // block_k
    last = torch.maximum(-(-hi[bottom] // block_k), first)
    full_first = -(-lo[bottom] // block_k)
    full_last = torch.maximum(hi[top] // block_k, full_first)

    # A query block that is not whole (the last of a ragged row) keeps no key block whole, as in create_block_mask.
    whole_q = total // block_q
    kept = torch.where(rows < whole_q, full_last - full_first, 0)
    partial_kv, full_kv = _tables(first, last, full_first, kept, width_k)

    # Transposed: the query blocks whose run holds key block j.
    cols = torch.arange(num_k, device=lo.device, dtype=torch.int32)
    first_q = torch.searchsorted(last, cols, right=True, out_int32=True)
    last_q = torch.searchsorted(first, cols, right=True, out_int32=True)
    full_first_q = torch.searchsorted(full_last, cols, right=True, out_int32=True)
    full_last_q = torch.searchsorted(full_first, cols, right=True, out_int32=True).clamp(max=whole_q)
    kept_q = (full_last_q - full_first_q).clamp(min=0)
    partial_q, full_q = _tables(first_q, torch.maximum(last_q, first_q), full_first_q, kept_q, width_q)

    return BlockMask(
        seq_lengths=(total, total),
        kv_num_blocks=partial_kv[0],
        kv_indices=partial_kv[1],
        full_kv_num_blocks=full_kv[0],
        full_kv_indices=full_kv[1],
        q_num_blocks=partial_q[0],
        q_indices=partial_q[1],
        full_q_num_blocks=full_q[0],
        full_q_indices=full_q[1],
        BLOCK_SIZE=(block_q, block_k),
        mask_mod=_mask_mod(lo, hi, mask),
    )


def _mask_mod(lo: Tensor, hi: Tensor, mask: MaskSpec) -> MaskMod:
    if lo.device.type == "cpu" and torch.compiler.is_compiling():
        # CPU inductor can capture only a buffer that is not computed point by point: rebuild lo, hi as running sums.
        lo, hi = (torch.cat([x[:1], x.diff()]).cumsum(0, dtype=torch.int32) for x in (lo, hi))
    return causal_mask_mod(lo) if mask.causal else interval_mask_mod(lo, hi)


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
    """The most blocks of `other` tokens that one block of `block` tokens touches, in documents of at most `longest`."""
    before = longest - 1 if before == UNLIMITED else min(before, longest - 1)
    after = longest - 1 if after == UNLIMITED else min(after, longest - 1)
    if block % other == 0:  # the block's borders are borders of the other grid
        return block // other + -(-before // other) + -(-after // other)
    return (before + block + after - 1) // other + 2


def _tables(
    first: Tensor, last: Tensor, full_first: Tensor, kept: Tensor, width: int
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Counts `[1, 1, R]` and indices `[1, 1, R, width]` of the partial and the full blocks of R runs.

    The partial blocks are the run `[first, last)` without its middle `[full_first, full_first + kept)`.
    """
    k = torch.arange(width, device=first.device, dtype=torch.int32)
    # A count past the width can only come from a document past the bound, which the layout asserts on.
    partial = (last - first - kept).clamp(max=width)
    kept = kept.clamp(max=width)
    skip = torch.where(k >= (full_first - first)[:, None], kept[:, None], 0)
    partial_indices = torch.where(k < partial[:, None], first[:, None] + k + skip, 0)
    full_indices = torch.where(k < kept[:, None], full_first[:, None] + k, 0)
    as_int = [x.to(torch.int32)[None, None].contiguous() for x in (partial, partial_indices, kept, full_indices)]
    return (as_int[0], as_int[1]), (as_int[2], as_int[3])
