"""Chunk boundaries inside documents: a chunked mask is a mask over more, shorter documents."""

from __future__ import annotations

import torch
from torch import Tensor

from flexvarlen.layout.boundaries import slots_of


def chunk_boundaries(cu_seqlens: Tensor, chunk: int, total_tokens: int) -> Tensor:
    """cu_seqlens of the chunks of every document, each counted from its document's start.

    Args:
        cu_seqlens: int32 `[N + 1]`.
        chunk: tokens of a chunk, at least 1.
        total_tokens: T.

    Returns:
        int32 `[N + T // chunk + 1]` on the same device; spare slots are empty, at the end.

    No sync; traces under `fullgraph=True`: the output shape depends only on the input shapes.

    >>> chunk_boundaries(torch.tensor([0, 5, 6], dtype=torch.int32), 2, 6).tolist()
    [0, 2, 4, 5, 6, 6]
    """
    function = _operator if torch.compiler.is_compiling() else _chunk_boundaries
    boundaries: Tensor = function(cu_seqlens, chunk, total_tokens)
    return boundaries


def _chunk_boundaries(cu_seqlens: Tensor, chunk: int, total_tokens: int) -> Tensor:
    ends = cu_seqlens[1:]
    lengths = cu_seqlens.diff()
    chunks = (lengths + chunk - 1).div(chunk, rounding_mode="floor")
    chunks_before = torch.nn.functional.pad(chunks.cumsum(0), (1, 0)).to(torch.int32)
    slots = ends.shape[0] + total_tokens // chunk  # a document has at most L // chunk + 1
    slot = torch.arange(slots + 1, device=cu_seqlens.device, dtype=torch.int32)
    document = slots_of(chunks_before, slot).clamp(max=ends.shape[0] - 1)
    number = torch.minimum(slot - chunks_before[document], chunks[document])  # no overflow behind
    start = cu_seqlens[document] + number * chunk
    return torch.minimum(start, ends[document]).contiguous()


_operator = torch.library.custom_op("flexvarlen::chunk_boundaries", mutates_args=())(
    _chunk_boundaries
)


@_operator.register_fake
def _(cu_seqlens: Tensor, chunk: int, total_tokens: int) -> Tensor:
    return cu_seqlens.new_empty(cu_seqlens.shape[0] + total_tokens // chunk)
