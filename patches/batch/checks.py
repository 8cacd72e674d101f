"""Consistency checks of boundaries: ValueError in eager mode, device assertions in graphs.

Shapes: B rows of S tokens, one after another: T = B·S.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexvarlen.layout.arguments import is_integer_tensor
from flexvarlen.layout.boundaries import raise_or_assert
from flexvarlen.layout.packed_layout import PackedLayout


def check_packed_layout(
    packed_layout: object, total_tokens: int, device: torch.device
) -> PackedLayout:
    """Check that the layout covers all tokens, and return it on their device."""
    if not isinstance(packed_layout, PackedLayout):
        raise ValueError(
            f"packed_layout must be a PackedLayout, got {type(packed_layout).__name__}; make it "
            "with PackedLayout.from_lengths(lengths, total_tokens=, device=)."
        )
    if not torch.compiler.is_compiling():  # DDP and FSDP move only the tensors of a batch
        packed_layout = packed_layout.to(device)
    if packed_layout.total_tokens != total_tokens or packed_layout.device != device:
        advice = "move it there with layout.to(device)"
        if packed_layout.total_tokens > total_tokens:
            advice = "make it of the documents of this batch"
        elif packed_layout.total_tokens < total_tokens:
            advice = (
                "make it with total_tokens= if the row ends in padding, and remove it from "
                "generate(), which takes one document per row"
            )
        raise ValueError(
            f"packed_layout must cover the batch's {total_tokens} tokens on {device}, got "
            f"{packed_layout.total_tokens} on {packed_layout.device}; {advice}."
        )
    return packed_layout


def refuse_without_cu_seq_lens_q(
    cu_seq_lens_k: Tensor | None, max_length_q: int | None, max_length_k: int | None
) -> None:
    """Refuse arguments that need `cu_seq_lens_q` if it is missing."""
    alone = {
        "cu_seq_lens_k": cu_seq_lens_k,
        "max_length_q": max_length_q,
        "max_length_k": max_length_k,
    }
    for name, given in alone.items():
        if given is not None:
            raise ValueError(
                f"{name} must be passed together with cu_seq_lens_q, got {name} "
                "without it; pass cu_seq_lens_q (in self-attention equal to cu_seq_lens_k), or "
                f"leave {name} out."
            )


def seq_idx_changes(seq_idx: Tensor, batch: int, row_tokens: int, device: torch.device) -> Tensor:
    """bool `[T]`: True where the numbers of `seq_idx` change inside a row.

    Raises:
        ValueError: it is not one integer per token on the tokens' device.
    """
    if not isinstance(seq_idx, Tensor):
        raise ValueError(
            f"seq_idx must be an integer tensor of shape {(batch, row_tokens)}, got "
            f"{type(seq_idx).__name__}; pass torch.tensor(seq_idx)."
        )
    if (
        seq_idx.ndim != 2
        or seq_idx.shape[0] not in (1, batch)
        or seq_idx.shape[1] != row_tokens
        or seq_idx.device != device
        or not is_integer_tensor(seq_idx)
    ):
        raise ValueError(
            f"seq_idx must be integers of shape {(batch, row_tokens)} on {device}, one for each "
            f"token, got {seq_idx.dtype} of shape {tuple(seq_idx.shape)} on {seq_idx.device}; "
            "number the documents of each row."
        )
    return changes_in_rows(seq_idx.to(torch.int64)).expand(batch, row_tokens).reshape(-1)


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


def check_cu_seq_lens(
    cu_seq_lens_q: Tensor, cu_seq_lens_k: Tensor | None, device: torch.device
) -> None:
    """Check that both are equal, int32, on the tokens' device, and hold a document."""
    for name, given in (("cu_seq_lens_q", cu_seq_lens_q), ("cu_seq_lens_k", cu_seq_lens_k)):
        if given is not None and not isinstance(given, Tensor):
            raise ValueError(
                f"{name} must be an int32 tensor [documents + 1], got {type(given).__name__}; pass "
                f"torch.tensor({name}, dtype=torch.int32)."
            )
    if cu_seq_lens_q.dtype != torch.int32 or cu_seq_lens_q.ndim != 1:
        raise ValueError(
            "cu_seq_lens_q must be an int32 tensor [documents + 1], got "
            f"{cu_seq_lens_q.dtype} of shape {tuple(cu_seq_lens_q.shape)}; flatten it and call "
            ".to(torch.int32) on it."
        )
    if cu_seq_lens_q.device != device:
        raise ValueError(
            f"cu_seq_lens_q must be on the tokens' device {device}, got {cu_seq_lens_q.device}; "
            "move it."
        )
    if cu_seq_lens_q.shape[0] < 2:
        raise ValueError(
            "cu_seq_lens_q must have one entry more than there are documents, got "
            f"{cu_seq_lens_q.shape[0]}; accelerate's dispatch_batches, its default for an "
            "IterableDataset, cuts it to the number of rows: turn it off, in TrainingArguments by "
            'accelerator_config={"dispatch_batches": False}.'
        )
    if cu_seq_lens_k is None or cu_seq_lens_k is cu_seq_lens_q:
        return
    message = (
        "cu_seq_lens_k must equal cu_seq_lens_q in self-attention; pass the same tensor for both."
    )
    if (cu_seq_lens_k.shape, cu_seq_lens_k.dtype) != (cu_seq_lens_q.shape, torch.int32):
        raise ValueError(message)
    raise_or_assert((cu_seq_lens_k == cu_seq_lens_q).all(), message)


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


def check_positions(position_ids: Tensor, batch: int, row_tokens: int) -> None:
    """Check that position_ids have shape `[B, S]` or `[1, S]`."""
    if (
        position_ids.ndim != 2
        or position_ids.shape[0] not in (1, batch)
        or position_ids.shape[1] != row_tokens
    ):
        raise ValueError(
            f"position_ids must have shape {(batch, row_tokens)}, as the tokens, got "
            f"{tuple(position_ids.shape)}; give one position per token, or remove position_ids."
        )


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
