"""Per-document operations: `pool`, and what `document_logprobs` needs too.

Shapes: T = total_tokens; N = `num_docs`, or `capacity` in a graph that other documents may run in;
D = any feature size.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from flexvarlen.layout.arguments import require_layout, require_tensor
from flexvarlen.layout.document_row import document_boundaries
from flexvarlen.layout.packed_layout import PackedLayout


def pool(
    x: Tensor, layout: PackedLayout, how: Literal["last", "first", "mean", "max"] = "last"
) -> Tensor:
    """Reduce the tokens of each document to one vector.

    The rows of empty documents, of padding runs inside the packed row, and of spare slots are zero;
    `layout.real_documents()` is True at the other rows.

    Args:
        x: floating point `[T, D]`, or `[B, S, D]` with B·S = T (`[1, T, D]` too), on the layout's
            device.
        layout: the documents.
        how: "last" or "first" takes that token of each document. "mean" adds in fp32 if x has
            half precision. "max" is taken for each feature; tokens with equal maxima share the
            gradient equally, as in `torch.amax`.

    Returns:
        `[num_docs, D]` in x's dtype. `[capacity, D]` inside a compiled graph, inside a CUDA graph
        capture, and where only the device knows the number of documents.

    Raises:
        ValueError: x has the wrong shape, dtype or device, or `how` is not one of the four.
        NotImplementedError: trees (call `unfold`), or a shard that splits documents.

    Differentiable (once), with a deterministic forward and backward. No sync; traces under
    `fullgraph=True`.

    >>> from flexvarlen import PackedLayout
    >>> layout = PackedLayout.from_lengths([2, 0, 1])
    >>> pool(torch.tensor([[1.0], [3.0], [5.0]]), layout, "mean").flatten()
    tensor([2., 0., 5.])
    """
    x_TD = flat_tokens(x, layout)
    cu_seqlens = document_boundaries(layout)
    if layout.total_tokens == 0:  # no token to take: every document is empty
        return x_TD.new_zeros(cu_seqlens.shape[0] - 1, x_TD.shape[1])
    if how in ("last", "first"):
        pooled = x_TD[layout.last_tokens() if how == "last" else layout.first_tokens()]
    elif how == "mean":
        sums = sum_documents(x_TD.to(accumulation_dtype(x_TD)), cu_seqlens)
        pooled = (sums / cu_seqlens.diff().clamp(min=1)[:, None]).to(x.dtype)
    elif how == "max":
        slots_T = layout.document_ids().clamp(max=cu_seqlens.shape[0] - 1)
        pooled = _Maxima.apply(x_TD, cu_seqlens, slots_T)  # type: ignore[no-untyped-call]
    else:
        raise ValueError(f"how must be 'last', 'first', 'mean' or 'max', got {how!r}; choose one.")
    return torch.where(layout.real_documents()[:, None], pooled, 0)


class _Maxima(torch.autograd.Function):
    """The maxima `[N, D]` of each document's tokens.

    The backward of `segment_reduce` gives each of several equal maxima all of a negative gradient.
    `slots_T` is the document of each token, N where it has none.
    """

    @staticmethod
    def forward(x_TD: Tensor, cu_seqlens: Tensor, slots_T: Tensor) -> Tensor:
        return torch.segment_reduce(x_TD, "max", offsets=cu_seqlens, unsafe=True)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, cu_seqlens, slots_T, maxima_ND = ctx.saved_tensors
        wide = accumulation_dtype(x_TD)
        highest_TD = x_TD == pad(maxima_ND, (0, 0, 0, 1))[slots_T]
        counts_ND = sum_documents(highest_TD.to(wide), cu_seqlens)
        share_TD = pad(grad_ND.to(wide) / counts_ND, (0, 0, 0, 1))[slots_T]
        return torch.where(highest_TD, share_TD, 0).to(x_TD.dtype), None, None


def flat_tokens(x: Tensor, layout: PackedLayout) -> Tensor:
    """x `[T, D]` or `[B, S, D]` as `[T, D]`.

    Raises:
        ValueError: another shape, dtype or device.
    """
    require_tensor("x", x)
    require_layout("layout", layout)
    tokens = x.flatten(0, 1) if x.ndim == 3 else x
    if tokens.ndim != 2 or tokens.shape[0] != layout.total_tokens or not x.is_floating_point():
        raise ValueError(
            "x must be floating point [T, D], [1, T, D] or [B, S, D] with the layout's "
            f"total_tokens={layout.total_tokens} tokens, got {x.dtype} {tuple(x.shape)}; pass "
            "total_tokens= to the layout if the row ends in padding."
        )
    if x.device != layout.device:
        raise ValueError(
            f"x must be on the layout's device {layout.device}, got {x.device}; call layout.to()."
        )
    return tokens


def sum_documents(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """The sums `[N, ...]` of x `[T, ...]` over each document; 0 where there are no tokens.

    Each sum is taken on its own in a fixed order, so no other document changes its bits.
    """
    return torch.segment_reduce(x, "sum", offsets=cu_seqlens, initial=0, unsafe=True)


def accumulation_dtype(x: Tensor) -> torch.dtype:
    """fp32 for half precision, else the dtype of x."""
    return torch.promote_types(x.dtype, torch.float32)
