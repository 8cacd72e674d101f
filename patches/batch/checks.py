"""Consistency checks of boundaries: ValueError in eager mode, device assertions in graphs.

Shapes: B rows of S tokens, one after another: T = B·S.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexvarlen.layout.boundaries import raise_or_assert
from flexvarlen.layout.packed_layout import PackedLayout


def changes_in_rows(numbers_BS: Tensor) -> Tensor:
    """bool `[B, S]`: True where a number differs from the one before it in its row."""
    return torch.nn.functional.pad(numbers_BS[:, 1:] != numbers_BS[:, :-1], (1, 0))


def inside_rows(real_BS: Tensor) -> Tensor:
    """bool `[B·S]`: True at real tokens behind another one of their row."""
    return (real_BS & torch.nn.functional.pad(real_BS[:, :-1], (1, 0))).reshape(-1)


def numbers_documents(attention_mask: Tensor) -> Tensor:
    """bool 0-dim: whether a mask holds other values than 0 and 1."""
    return ((attention_mask != 0) & (attention_mask != 1)).any()


def same_documents(
    changes: Tensor, layout: PackedLayout, attention_mask: Tensor | None, shape: tuple[int, int]
) -> Tensor:
    """bool 0-dim: whether numbers change where documents of the layout begin, and nowhere else.

    Padding and changes from one row to the next are ignored.
    """
    flags = torch.zeros(layout.total_tokens + 1, dtype=torch.bool, device=layout.device)
    begins = flags.index_fill(0, layout.cu_seqlens.long(), True)[:-1]
    real = layout.real_tokens().view(shape)
    if attention_mask is not None:
        real = real & (attention_mask != 0)
    return ((changes == begins) | ~inside_rows(real)).all()


def check_same_documents(
    changes: Tensor,
    layout: PackedLayout,
    attention_mask: Tensor | None,
    shape: tuple[int, int],
    *,
    reads: bool,
) -> None:
    """Raise unless `seq_idx` describes the documents of the layout; see `same_documents`.

    If the device must not be read, it asserts this instead.
    """
    same = same_documents(changes, layout, attention_mask, shape)
    message = (
        "seq_idx must change where the documents of packed_layout or cu_seq_lens_q begin, and "
        "nowhere else; remove one of them."
    )
    if same.is_cuda and not reads:
        torch._assert_async(same, f"flexvarlen: {message}")
    else:
        raise_or_assert(same, message)


def layout_from_cu_seq_lens(
    cu_seq_lens_q: Tensor, total_tokens: int, capacity: int | None, max_seqlen_bound: int | None
) -> PackedLayout:
    """Build the layout; error messages use the caller's name, `cu_seq_lens_q`."""
    try:
        return PackedLayout.from_cu_seqlens(
            cu_seq_lens_q,
            total_tokens=total_tokens,
            capacity=capacity,
            max_seqlen_bound=max_seqlen_bound,
        )
    except ValueError as refusal:
        sentence = str(refusal).replace("cu_seqlens", "cu_seq_lens_q")
        raise ValueError(sentence) from refusal


def check_row_starts(layout: PackedLayout, batch: int, row_tokens: int) -> None:
    """Check that a document or padding begins at each row's start."""
    boundaries = layout.cu_seqlens if layout.cu_seqlens_host is None else layout.cu_seqlens_host
    rows = torch.arange(1, batch, device=boundaries.device, dtype=torch.int32) * row_tokens
    inside_padding = rows >= boundaries[-1]
    raise_or_assert(
        (torch.isin(rows, boundaries) | inside_padding).all(),
        f"a document must not cross the boundary of two rows of {row_tokens} tokens; put a "
        "boundary at each row's start.",
    )
