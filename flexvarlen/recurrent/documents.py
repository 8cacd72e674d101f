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
        offsets: int64 `[T]`, the index of each token in its document.
        seq_idx: int32 `[1, T]`, the slot of each token.
        padding: bool `[T]`, True at padding; None where the host knows that there is none.
        cu_seqlens: int32 `[N + 3]`: those of the layout, then T twice. Slot i holds the tokens from
            `cu_seqlens[i]` to `cu_seqlens[i + 1]`: the documents, unused slots, the padding after
            the last document, and at the end a slot that is always empty.
        chunk_indices: int32 `[T // 64 + N + 1, 2]`: the slot of each chunk of 64 tokens, and its
            number in the document. Chunks past the last one belong to the empty slot.

    No sync; traces.
    """

    def __init__(self, layout: PackedLayout, *, for_any_row: bool = False) -> None:
        """Compute what layers share.

        Args:
            for_any_row: whether a graph that runs for other documents too reads it, even if it is
                not made inside of one (layers that are compiled one by one).
        """
        self.layout, self.for_any_row = layout, for_any_row
        self.offsets = layout.position_ids()
        self.seq_idx = layout.document_ids()[None]
        for_any_row = for_any_row or torch.compiler.is_compiling()
        known_full = not for_any_row and layout.has_padding is False
        self.padding = None if known_full else ~layout.real_tokens()
        self.cu_seqlens = pad(layout.cu_seqlens, (0, 2), value=layout.total_tokens)
        chunks = (self.cu_seqlens.diff() + CHUNK - 1) // CHUNK
        ends, slots = chunks.cumsum(0), chunks.shape[0]
        index = torch.arange(layout.total_tokens // CHUNK + slots - 1, device=ends.device)
        slot = torch.searchsorted(ends, index, right=True).clamp(max=slots - 1)
        self.chunk_indices = torch.stack([slot, index - (ends - chunks)[slot]], dim=1).int()

    def to(
        self, device: torch.device | str | int | None, *, non_blocking: bool = False
    ) -> RecurrentDocuments:
        """The same on another device, for accelerate, which calls this before layers."""
        if device is None or torch.device(device) == self.layout.device:
            return self
        moved = self.layout.to(torch.device(device), non_blocking=non_blocking)
        if moved is self.layout:
            return self
        return RecurrentDocuments(moved, for_any_row=self.for_any_row)

    def zero_padding(self, x: Tensor) -> Tensor:
        """x `[1, T, ...]` with zeros at padding, in the output and in the gradient."""
        if self.padding is None:
            return x
        return x.masked_fill(self.padding.view(1, -1, *[1] * (x.ndim - 2)), 0)
