"""Build FlexAttention's BlockMask of a packed row in closed form, without a host sync.

Shapes: Tq, Tk = tokens; NQ = ceil(Tq / BQ), NK = ceil(Tk / BK) of the block sizes BQ and BK.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.mask.arguments import Prefix
from flexvarlen.mask.document_mask import DocumentMask
from flexvarlen.mask.spec import Align
from flexvarlen.mask.table_shapes import DEFAULT_BLOCK_SIZE, block_pair
from flexvarlen.mask.vectors import TreeBounds, tree_bounds

_TILE = 128  # FlexAttention's templates skip bounds checks for multiples of this

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def document_block_mask(
    layout: PackedLayout,
    *,
    causal: bool = True,
    window: int | tuple[int, int] | None = None,
    chunk: int | None = None,
    prefix: Prefix | None = None,
    layout_k: PackedLayout | None = None,
    align: Align = "bottom_right",
    block_size: int | tuple[int, int] = DEFAULT_BLOCK_SIZE,
) -> BlockMask:
    """Build a BlockMask `[1, 1, Tq, Tk]` in which a query sees only keys of its own document.

    It equals `create_block_mask` of the same mask, block by block (over trees a listed block may
    also be empty). The arguments are combined by
    intersection: for example a window inside a causal document, or a prefix cut to a window.

    Args:
        layout: the documents; its `max_seqlen_bound` and `capacity` give the tables' width.
        causal, window, chunk, prefix, layout_k, align: as in `DocumentMask.of`.
        block_size: BlockMask granularity in tokens, or (query, key). Kernels need multiples of
            their own tile: 128, or (256, 128), suits all.

    Returns:
        A BlockMask. On a GPU its tables are compact, as wide as the most blocks that any row can
        hold (with `layout_k`, any number of documents up to `capacity` may lie in one block: a
        capacity of 128 can mean full width). `to_dense()`, `str()` and slices of such a mask need
        torch 2.14; `DocumentMask.of(...)` has `to_dense`, `sparsity` and a picture on any. On the
        CPU, whose compiled kernel needs it, there is one column for every block.

    Raises:
        ValueError: an invalid window, chunk, prefix or block size, layouts that do not match each
            other, or, on a GPU, a row that FlexAttention's kernels would read past: a multiple of
            128 tokens that is not a multiple of a larger `block_size`.

    No sync; traces under `fullgraph=True`; may be captured in a CUDA graph. Memory O(NQ · width).

    >>> document_block_mask(PackedLayout.from_lengths([128, 128])).sparsity()
    50.0
    """
    mask = DocumentMask.of(
        layout,
        causal=causal,
        window=window,
        chunk=chunk,
        prefix=prefix,
        layout_k=layout_k,
        align=align,
    )
    return block_mask_of(mask, block_size=block_size)


def block_mask_of(
    mask: DocumentMask,
    *,
    block_size: int | tuple[int, int] = DEFAULT_BLOCK_SIZE,
    compact: bool | None = None,
) -> BlockMask:
    """Build the BlockMask of a `DocumentMask`; `compact` overrides the device's default."""
    pair = block_pair(block_size)
    on_gpu = mask.layout.device.type != "cpu"
    tokens = (mask.layout.total_tokens, mask.layout_k.total_tokens)
    if on_gpu:
        _check_ends(tokens, pair)
    tables = mask.tables(pair, compact=on_gpu if compact is None else compact)
    lo, hi = tables.lo, tables.hi
    if mask.spec.tree:
        bounds = tree_bounds(mask.inputs)
        mask_mod = part_mask_mod(lo, hi, bounds) if mask.spec.cross else tree_mask_mod(lo, bounds)
    else:
        mask_mod = causal_mask_mod(lo) if mask.spec.ends_at_query else interval_mask_mod(lo, hi)
    return BlockMask(
        tokens,
        *tables[2:],  # all but the bounds, in BlockMask's own order
        BLOCK_SIZE=pair,
        mask_mod=mask_mod,
    )


def _check_ends(tokens: tuple[int, int], block_size: tuple[int, int]) -> None:
    """Raise ValueError if torch's kernels would read past the end of the row.

    They check bounds only if the row's length is not a multiple of 128, and run over whole
    blocks of the mask, so gradients of K and V are wrong, with `create_block_mask` too (torch
    2.11; the templates of 2.13 are the same). The forward reads there too, though masked out: the
    memory may hold NaN.
    """
    if all(_TILE % block == 0 for block in block_size) or any(t % _TILE for t in tokens):
        return
    for name, total, block in zip(("query", "key"), tokens, block_size, strict=True):
        if total % block:
            raise ValueError(
                f"the {name} row's length must be a multiple of block_size={block} tokens, or not "
                f"a multiple of {_TILE}, got {total}: FlexAttention's kernels would read past its "
                f"end; pad the row to {-(-total // block) * block} tokens, or pass "
                f"block_size={_TILE}."
            )


def causal_mask_mod(lo: Tensor) -> MaskMod:
    """`lo[q] <= kv <= q`: as many loop iterations as plain causal attention, and no `hi`."""

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (kv >= lo[q]) & (kv <= q)

    return mask_mod


def tree_mask_mod(lo: Tensor, bounds: TreeBounds) -> MaskMod:
    """`lo[q] <= kv <= q < end[kv]` and, under a window or chunks, `first[q] <= position[kv]`."""
    end, position, first, _ = bounds

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        seen = (kv >= lo[q]) & (kv <= q) & (q < end[kv])
        return seen if first is None else seen & (position[kv] >= first[q])

    return mask_mod


def part_mask_mod(lo: Tensor, hi: Tensor, bounds: TreeBounds) -> MaskMod:
    """`tree_mask_mod` of queries that are the last tokens: `hi[q]` is one past that of the query.

    Their number above is in no constant, so that one compilation serves all parts.
    """
    end, position, first, _ = bounds

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        seen = (kv >= lo[q]) & (kv < hi[q]) & (hi[q] <= end[kv])
        return seen if first is None else seen & (position[kv] >= first[q])

    return mask_mod


def interval_mask_mod(lo: Tensor, hi: Tensor) -> MaskMod:
    """`lo[q] <= kv < hi[q]`."""

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (kv >= lo[q]) & (kv < hi[q])

    return mask_mod
