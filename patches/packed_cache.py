"""Caches that a packed forward filled: decoding from them is refused.

A new token would see every document of its row.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import Cache

from flexvarlen.layout import PackedLayout

FILLED_BY = "_flexvarlen_filled_by"


def remember_documents(outputs: Any, layout: PackedLayout, batch: int) -> None:
    """Note on the cache among a forward's outputs which documents, of how many rows, it now holds.

    No sync. Inside a compiled graph nothing is noted.
    """
    if torch.compiler.is_compiling():
        return
    for output in outputs if isinstance(outputs, tuple) else outputs.values():
        if isinstance(output, Cache):
            setattr(output, FILLED_BY, (layout, batch))


def holds_packed_documents(cache: Any) -> bool:
    """Whether a row of the cache holds more than one document (padding is none).

    Reads the device once a cache, if its rows have padding.
    """
    filled_by = getattr(cache, FILLED_BY, False)
    if isinstance(filled_by, bool):
        return filled_by
    layout, batch = filled_by
    starts, ends = layout.cu_seqlens[:-1], layout.cu_seqlens[1:]
    if layout.cu_seqlens_host is not None and layout.padding is None:
        starts, ends = layout.cu_seqlens_host[:-1], layout.cu_seqlens_host[1:]
    documents = starts < ends
    if layout.padding is not None:
        first_token = starts.clamp(max=layout.total_tokens - 1).long()
        documents = documents & ~layout.padding[first_token]
    verdict = bool(int(documents.sum()) > batch)
    setattr(cache, FILLED_BY, verdict)
    return verdict
