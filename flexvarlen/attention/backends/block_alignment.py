"""Align documents to block boundaries to make FlexAttention batch invariant.

FlexAttention's kernels process a row in blocks of 128 tokens, so the order of summation for a
document depends on where in a block it begins. In the aligned row, each document
begins at a block boundary, and the rest of its last block is padding.

Shape legend: T = tokens of the row, A = tokens of the aligned row, H = num_heads, D = head_dim,
N = document slots.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexvarlen.layout.boundaries import slots_of
from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.mask.block_mask import block_mask_of
from flexvarlen.mask.document_mask import DocumentMask
from flexvarlen.mask.table_shapes import DEFAULT_BLOCK_SIZE


class AlignedRow(NamedTuple):
    """A row whose documents begin at block boundaries.

    Attributes:
        mask: mask of the aligned row.
        block_mask: the same mask, for FlexAttention.
        source_A: token of the row at each aligned position, int64 `[A]`; T if there is none.
        target_T: aligned position of each token of the row, int64 `[T]`; A for padding after the
            last document, which is dropped.
    """

    mask: DocumentMask
    block_mask: BlockMask
    source_A: Tensor
    target_T: Tensor

    def enter(self, x_THD: Tensor) -> Tensor:
        """Map `[T, H, D]` to `[A, H, D]`. Differentiable."""
        moved: Tensor = _Move.apply(x_THD, self.source_A, self.target_T)  # type: ignore[no-untyped-call]
        return moved

    def leave(self, x_AHD: Tensor) -> Tensor:
        """Map `[A, H, D]` to `[T, H, D]`. Differentiable."""
        moved: Tensor = _Move.apply(x_AHD, self.target_T, self.source_A)  # type: ignore[no-untyped-call]
        return moved


def align(mask: DocumentMask) -> AlignedRow:
    """Align the row of a self-attention mask without a prefix. No sync; traces.

    A is `ceil(T / 128) + N` blocks, whatever the documents are.
    """
    layout = mask.layout
    call = _operator if torch.compiler.is_compiling() else _align
    cu_seqlens, source_A, target_T, padding_A = call(
        layout.cu_seqlens, layout.padding, layout.total_tokens, DEFAULT_BLOCK_SIZE
    )
    aligned = PackedLayout(
        cu_seqlens,
        cu_seqlens_host=None,
        total_tokens=source_A.shape[0],
        max_seqlen_bound=max(layout.max_seqlen_bound, DEFAULT_BLOCK_SIZE),
        num_docs=None,
        max_seqlen=None,
        padding=padding_A,
    )
    aligned_mask = DocumentMask(aligned, mask.spec)
    return AlignedRow(aligned_mask, block_mask_of(aligned_mask), source_A, target_T)


def _align(
    cu_seqlens: Tensor, padding_T: Tensor | None, total_tokens: int, block: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return cu_seqlens `[2N + 1]` of the documents and gaps, and source, target and padding."""
    slots = cu_seqlens.shape[0] - 1
    aligned_tokens = (-(-total_tokens // block) + slots) * block
    lengths = cu_seqlens.diff()
    blocks = (lengths + block - 1).div(block, rounding_mode="floor")
    starts = torch.nn.functional.pad(blocks.cumsum(0) * block, (1, 0)).to(torch.int32)
    tokens = torch.arange(total_tokens, device=cu_seqlens.device)
    document = slots_of(cu_seqlens, tokens.to(torch.int32))
    own = document.clamp(max=slots - 1)
    target_T = torch.where(document < slots, starts[own] + tokens - cu_seqlens[own], aligned_tokens)
    source = torch.full((aligned_tokens + 1,), total_tokens, device=cu_seqlens.device)
    source = source.scatter(0, target_T, tokens)[:-1]
    padding_A = source == total_tokens
    if padding_T is not None:
        padding_A = padding_A | padding_T[source.clamp(max=total_tokens - 1)]
    ends = starts[:-1] + lengths
    cu_aligned = torch.cat([torch.stack([starts[:-1], ends], 1).flatten(), starts[-1:]])
    return cu_aligned.contiguous(), source.contiguous(), target_T.contiguous(), padding_A


_operator = torch.library.custom_op("flexvarlen::align", mutates_args=())(_align)


@_operator.register_fake
def _(
    cu_seqlens: Tensor, padding_T: Tensor | None, total_tokens: int, block: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    slots = cu_seqlens.shape[0] - 1
    aligned_tokens = (-(-total_tokens // block) + slots) * block
    return (
        cu_seqlens.new_empty(2 * slots + 1),
        cu_seqlens.new_empty(aligned_tokens, dtype=torch.int64),
        cu_seqlens.new_empty(total_tokens, dtype=torch.int64),
        cu_seqlens.new_empty(aligned_tokens, dtype=torch.bool),
    )


class _Move(torch.autograd.Function):
    """Gather rows, with zeros where the index is past the end; the backward uses `inverse`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return _rows(x, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return _rows(grad, inverse), None, None


def _rows(x: Tensor, index: Tensor) -> Tensor:
    there = (index < x.shape[0])[:, None, None]
    return torch.where(there, x.index_select(0, index.clamp(max=x.shape[0] - 1)), 0)
