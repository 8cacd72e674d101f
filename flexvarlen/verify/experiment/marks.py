"""How the documents of a row can be marked for a forward, in the words of transformers or ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flexvarlen.layout.packed_layout import PackedLayout

THEIRS = "transformers:"
"""Begins the names of variants whose attention is transformers'."""
FORMS = (
    *("packed_layout", "position_ids", "cu_seq_lens", "both", "default_cache", "mask_of_ones"),
    *("cu_seq_lens_alone", "document_ids"),
)


def forms_of(attention: str) -> list[str]:
    """Those of `FORMS` that an attention takes."""
    theirs = attention.startswith(THEIRS)
    return [form for form in FORMS if not (theirs and form == "packed_layout")]


def inputs_of(form: str, layout: PackedLayout, lengths: Sequence[int]) -> dict[str, Any]:
    """Keyword arguments of a forward on `[1, T]` that mark the documents of the row.

    Args:
        form: of `FORMS`. "packed_layout"; or, without a cache, "position_ids", "cu_seq_lens"
            (beside position_ids, as DataCollatorWithFlattening makes them), "both" (these and
            seq_idx, which recurrent layers need), "mask_of_ones" (an attention_mask that hides
            nothing, beside position_ids), "cu_seq_lens_alone" or "document_ids" (a 2D
            attention_mask that numbers the documents from 1); or "default_cache": position_ids, and
            the cache that transformers makes where nobody says use_cache, also in training.
        lengths: tokens of each document.
    """
    if form == "packed_layout":
        return {"packed_layout": layout}
    device = layout.device
    positions = {"position_ids": layout.position_ids()[None]}
    if form == "default_cache":
        return positions
    documents = torch.arange(len(lengths), dtype=torch.int32)
    numbers = documents.repeat_interleave(torch.tensor(lengths))[None].to(device)
    ends = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
    cu_seq_lens: dict[str, Any] = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
    cu_seq_lens |= {"max_length_q": max(lengths), "max_length_k": max(lengths)}
    marks: dict[str, dict[str, Any]] = {
        "position_ids": positions,
        "cu_seq_lens": positions | cu_seq_lens,
        "both": positions | cu_seq_lens | {"seq_idx": numbers},
        "mask_of_ones": positions | {"attention_mask": torch.ones_like(numbers)},
        "cu_seq_lens_alone": cu_seq_lens,
        "document_ids": {"attention_mask": numbers + 1},
    }
    return marks[form] | {"use_cache": False}
