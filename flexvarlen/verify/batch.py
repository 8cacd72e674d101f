"""`PackedBatch`: the documents that a comparison runs on, in one row without padding.

Shapes: T tokens; N documents.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from flexvarlen.layout.packed_layout import PackedLayout

IGNORE_INDEX = -100  # the label that transformers' losses leave out


@dataclass(frozen=True)
class PackedBatch:
    """Documents of real tokens, one after another.

    Attributes:
        input_ids: int64 `[1, T]`.
        lengths: tokens of each document, each at least 1; their sum is T.
        source: where the tokens come from, for the report.
    """

    input_ids: Tensor
    lengths: tuple[int, ...]
    source: str = "the caller's batch"

    def __post_init__(self) -> None:
        tokens = self.input_ids.numel()
        if self.input_ids.ndim != 2 or self.input_ids.shape[0] != 1 or tokens == 0:
            raise ValueError(
                f"input_ids must have shape [1, T], got {tuple(self.input_ids.shape)}; pack the "
                "documents into one row."
            )
        if not self.lengths or min(self.lengths) < 1 or sum(self.lengths) != tokens:
            raise ValueError(
                f"lengths must be at least 1 and add up to the row's {tokens} tokens, got "
                f"{self.lengths}; give one length per document."
            )

    @classmethod
    def of(cls, batch: PackedBatch | Mapping[str, Any]) -> PackedBatch:
        """A batch from a forward's keyword arguments, its boundaries found as `patch_model` does.

        Rows are put one after another; padding is dropped, and so are labels: a comparison makes
        its own. Reads the device.

        Raises:
            ValueError: no input_ids, or boundaries that break the contract.
        """
        if isinstance(batch, PackedBatch):
            return batch
        from flexvarlen.patches.isolation.documents import (  # imports transformers
            layout_of,
            real_documents,
        )

        layout = layout_of(batch)
        ids_T = batch["input_ids"].reshape(-1)
        pieces = [ids_T[start:end] for start, end in real_documents(layout)]
        if not pieces:
            raise ValueError("batch must hold at least one document, got padding only.")
        return cls(torch.cat(pieces)[None], tuple(len(piece) for piece in pieces))

    @property
    def total_tokens(self) -> int:
        """T."""
        return self.input_ids.shape[1]

    def spans(self) -> list[tuple[int, int]]:
        """First token, and the one past the last, of each document."""
        ends = [0]
        for length in self.lengths:
            ends.append(ends[-1] + length)
        return list(pairwise(ends))

    def to(self, device: torch.device | str) -> PackedBatch:
        """The same batch with its tokens on `device`."""
        return PackedBatch(self.input_ids.to(device), self.lengths, self.source)

    def labels(self, documents: Sequence[int] | None = None) -> Tensor:
        """int64 `[1, T]`: the tokens, with -100 at the first token of each document, which has no
        predecessor to predict it.

        Args:
            documents: those that count; the labels of all others are -100. Default: all.
        """
        labels = self.input_ids.clone()
        counted = set(range(len(self.lengths)) if documents is None else documents)
        for document, (start, end) in enumerate(self.spans()):
            labels[0, start : start + 1 if document in counted else end] = IGNORE_INDEX
        return labels

    def inputs(self) -> dict[str, Tensor]:
        """What a user hands to transformers: tokens, and positions that restart."""
        layout = PackedLayout.from_lengths(self.lengths, device=self.input_ids.device)
        return {"input_ids": self.input_ids, "position_ids": layout.position_ids()[None]}


def recut(batch: PackedBatch, seed: int, *, capacity: int, longest: int) -> PackedBatch:
    """The same tokens cut into other documents: at most `capacity`, none above `longest` tokens.

    The lengths are shuffled; then some neighbours are joined and some documents are cut in two.
    """
    rng = random.Random(seed)
    lengths = list(batch.lengths)
    rng.shuffle(lengths)
    joined: list[int] = []
    for length in lengths:
        if joined and joined[-1] + length <= longest and rng.random() < 0.3:
            joined[-1] += length
        else:
            joined.append(length)
    cut: list[int] = []
    room = capacity - len(joined)
    for length in joined:
        if room > 0 and length > 1 and rng.random() < 0.5:
            room -= 1
            first = rng.randrange(1, length)
            cut += [first, length - first]
        else:
            cut.append(length)
    return PackedBatch(batch.input_ids, tuple(cut), batch.source)
