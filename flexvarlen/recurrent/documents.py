"""`RecurrentDocuments`: the documents of a packed row, as convolutions and scans need them.

Shapes: T = total_tokens; N = `capacity` of the layout.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from flexvarlen.layout.packed_layout import PackedLayout

CHUNK = 64
"""Tokens of a chunk of fla's kernels."""


class RecurrentDocuments:
    """What all recurrent layers of one forward share.

    Padding after the last document is a document of its own here, as kernels leave tokens outside
    of all documents unwritten.

    Attributes:
        layout: the documents.
        offsets: int64 `[T]`, the number of tokens of its own document before each token.
        seq_idx: int32 `[1, T]`, the slot of each token.
        padding: bool `[T]`, True at padding; None where the host knows that there is none.
        cu_seqlens: int32 `[N + 3]`: those of the layout, then T twice. The last slot is empty.
        chunk_indices: int32 `[T // 64 + N + 1, 2]`: the slot of each chunk of 64 tokens, and its
            number in the document. Chunks past the last one belong to the empty slot.

    No sync; traces.
    """

    def __init__(self, layout: PackedLayout) -> None:
        self.layout = layout
        self.offsets = layout.position_ids()
        self.seq_idx = layout.document_ids()[None]
        known_full = not torch.compiler.is_compiling() and layout.has_padding is False
        self.padding = None if known_full else ~layout.real_tokens()
        self.cu_seqlens = pad(layout.cu_seqlens, (0, 2), value=layout.total_tokens)
        self.chunk_indices = _chunk_indices(self.cu_seqlens, layout.total_tokens)

    def to(
        self, device: torch.device | str | int | None, *, non_blocking: bool = False
    ) -> RecurrentDocuments:
        """The same on another device, for accelerate, which calls this before layers."""
        if device is None or torch.device(device) == self.layout.device:
            return self
        moved = self.layout.to(torch.device(device), non_blocking=non_blocking)
        return self if moved is self.layout else RecurrentDocuments(moved)

    def without_padding(self, x: Tensor) -> Tensor:
        """`[1, T, ...]` with exact zeros at padding, in the gradient too."""
        if self.padding is None:
            return x
        return x.masked_fill(self.padding.view(1, -1, *[1] * (x.ndim - 2)), 0)


def _chunk_indices(cu_seqlens: Tensor, total_tokens: int) -> Tensor:
    chunks = (cu_seqlens.diff() + CHUNK - 1) // CHUNK
    ends, slots = chunks.cumsum(0), chunks.shape[0]
    index = torch.arange(total_tokens // CHUNK + slots - 1, device=ends.device)
    slot = torch.searchsorted(ends, index, right=True).clamp(max=slots - 1)
    return torch.stack([slot, index - (ends - chunks)[slot]], dim=1).int()
