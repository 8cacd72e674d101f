"""The documents of a forward, found in the arguments that a transformers model is called with.

Order: an explicit `packed_layout`; else `cu_seq_lens_q`; else the union of restarts in
`position_ids` and changes of value in a 2D `attention_mask` and in `seq_idx`, so that a mask of
ones changes nothing; else one document a row.

Shapes: B rows of S tokens, packed one after another: T = B·S.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.layout.validate import default_capacity, document_starts
from flexvarlen.patches.batch.checks import (
    changes_of,
    check_cu_seq_lens,
    check_positions,
    check_row_starts,
    check_same_documents,
    layout_of,
    refuse_halves,
    require_layout,
)

EXPLICIT = ("packed_layout", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""The keywords of a forward that give its documents outright."""


BOUNDARIES = (*EXPLICIT, "seq_idx")
"""The keywords that only tell documents: no model needs them for anything else."""


def find_layout(
    batch: int,
    row_tokens: int,
    device: torch.device,
    *,
    packed_layout: PackedLayout | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    position_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    seq_idx: Tensor | None = None,
    capacity: int | None = None,
    max_seqlen_bound: int | None = None,
) -> PackedLayout:
    """The layout of a forward's T = B·S tokens.

    Args:
        batch, row_tokens, device: B, S and where the tokens are.
        packed_layout: the documents of all T tokens.
        cu_seq_lens_q, cu_seq_lens_k: int32 `[num_docs + 1]`, cumulative over all T tokens; equal.
        max_length_q, max_length_k: tokens of the longest document, if the caller gave it; checked
            eagerly.
        position_ids: integer `[B, S]` or `[1, S]`.
        attention_mask: `[B, S]`, 0 at padding; other values may number documents.
        seq_idx: integer `[B, S]` or `[1, S]`, the number of each token's document; beside
            `packed_layout` or `cu_seq_lens_q` it must say the same.
        capacity, max_seqlen_bound: as in `PackedLayout.from_lengths`; default: those of
            `packed_layout`, more slots if a mask beside it makes more documents.

    Raises:
        ValueError: boundaries that break the contract, or contradict one another.

    Eagerly at most one read of the device, one more if `seq_idx` comes beside `cu_seq_lens_q`;
    inside a compiled graph none, and the boundaries are asserted on the device.
    """
    total = batch * row_tokens
    sizes: dict[str, Any] = {"capacity": capacity, "max_seqlen_bound": max_seqlen_bound}
    if attention_mask is not None and attention_mask.shape != (batch, row_tokens):
        raise ValueError(
            f"attention_mask must have shape {(batch, row_tokens)}, as the tokens, got "
            f"{tuple(attention_mask.shape)}; give one value a token."
        )
    if position_ids is not None:
        check_positions(position_ids, batch, row_tokens)
    if packed_layout is None and cu_seq_lens_q is None:
        refuse_halves(cu_seq_lens_k, max_length_q, max_length_k)
    changes = None if seq_idx is None else changes_of(seq_idx, batch, row_tokens, device)
    if packed_layout is not None:
        require_layout(packed_layout)
        if not torch.compiler.is_compiling():  # DDP and FSDP move a batch's tensors alone
            packed_layout = packed_layout.to(device)
        if packed_layout.total_tokens != total or packed_layout.device != device:
            raise ValueError(
                f"packed_layout must cover the batch's {total} tokens on {device}, got "
                f"{packed_layout.total_tokens} on {packed_layout.device}; pass total_tokens= and "
                "device= when you make it."
            )
        explicit = packed_layout
    elif cu_seq_lens_q is not None:
        check_cu_seq_lens(cu_seq_lens_q, cu_seq_lens_k, device)
        explicit = layout_of(cu_seq_lens_q, total, **sizes)
        for longest in (max_length_q, max_length_k):
            # A graph knows no max_seqlen: there `longest`, which would be guarded on, stays unread.
            if (
                explicit.max_seqlen is not None
                and longest is not None
                and longest < explicit.max_seqlen
            ):
                raise ValueError(
                    "max_length_q and max_length_k must be at least the longest document, "
                    f"{explicit.max_seqlen} tokens, got {longest}; pass the largest difference of "
                    "cu_seq_lens_q."
                )
    elif position_ids is None and attention_mask is None and changes is None:
        return PackedLayout.from_rows(batch, row_tokens, device=device, **sizes)
    else:
        starts = document_starts(
            batch,
            row_tokens,
            device,
            position_ids_BT=position_ids,
            attention_mask_BT=attention_mask,
        )
        padding = None if attention_mask is None else (attention_mask == 0).reshape(-1)
        if changes is not None:  # but no run of padding is cut
            starts = starts | (changes if padding is None else changes & ~padding)
        if padding is not None:
            starts = _cut_padding(starts, padding, max_seqlen_bound)
        return PackedLayout.from_starts(starts, padding_T=padding, **sizes)
    if batch > 1:
        check_row_starts(explicit, batch, row_tokens)
    if changes is not None:
        check_same_documents(
            changes, explicit, attention_mask, row_tokens, reads=packed_layout is None
        )
    if attention_mask is None:
        return explicit
    starts = document_starts(
        batch, row_tokens, device, cu_seqlens=explicit.cu_seqlens, attention_mask_BT=attention_mask
    )
    padding = (attention_mask == 0).reshape(-1) | ~explicit.real_tokens()
    bound = explicit.max_seqlen_bound if max_seqlen_bound is None else max_seqlen_bound
    starts = _cut_padding(starts, padding, bound)
    slots = capacity
    if capacity is None and torch.compiler.is_compiling():  # room for the runs of padding
        slots = max(explicit.capacity + -(-total // bound), default_capacity(total))
    layout = PackedLayout.from_starts(
        starts, padding_T=padding, capacity=slots, max_seqlen_bound=bound
    )
    if slots is not None or layout.lengths is None or len(layout.lengths) > explicit.capacity:
        return layout
    sized = PackedLayout.from_lengths(
        layout.lengths, device=device, capacity=explicit.capacity, max_seqlen_bound=bound
    )
    sized.padding, sized.has_padding = layout.padding, layout.has_padding
    return sized


def _cut_padding(starts: Tensor, padding: Tensor, bound: int | None) -> Tensor:
    """Starts at which no run of padding is longer than documents may be: it takes slots too."""
    if bound is None:
        return starts
    return starts | (padding & (torch.arange(len(starts), device=starts.device) % bound == 0))
