"""A case's documents as batches: one packed row, padded batches, one document at a time.

All hold the same tokens and labels, in the documents' order or in that of `by_length`, so that
their outputs and gradients can be held against the same oracle. Shapes: T tokens of all documents;
B rows of S positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from flexvarlen.bench.suites.model.step import Batch
from flexvarlen.reference.model import IGNORE_INDEX


@dataclass(frozen=True)
class Collection:
    """Documents, one after another.

    Attributes:
        ids: int64 `[1, T]`.
        lengths: tokens of each; their sum is T.
    """

    ids: Tensor
    lengths: tuple[int, ...]

    @property
    def labels(self) -> Tensor:
        """int64 `[1, T]`: each token's next one; `IGNORE_INDEX` at a document's last."""
        labels = self.ids.roll(-1, dims=1)
        ends = torch.tensor(self.lengths).cumsum(0) - 1
        labels[:, ends.to(labels.device)] = IGNORE_INDEX
        return labels

    @property
    def counted(self) -> int:
        """Labels that count, at least 1."""
        return max(1, sum(self.lengths) - len(self.lengths))

    def documents(self) -> list[tuple[Tensor, Tensor]]:
        """Ids and labels `[L]` of each."""
        sizes = list(self.lengths)
        return list(zip(self.ids[0].split(sizes), self.labels[0].split(sizes), strict=True))

    # --- as batches ------------------------------------------------------------------------------

    def packed(self, boundaries: Mapping[str, Any]) -> list[Batch]:
        """One row of T; `boundaries`: the keyword arguments that mark the documents."""
        return [Batch({"input_ids": self.ids, **boundaries}, None, self.labels)]

    def by_length(self) -> list[int]:
        """Indices of the documents, the longest first.

        The fewest pads that `train_sampling_strategy="group_by_length"` of transformers' `Trainer`
        can reach: it sorts at most 50 batches at a time (`transformers.trainer_pt_utils`).
        """
        return sorted(range(len(self.lengths)), key=lambda index: -self.lengths[index])

    def in_order(self, outputs: Tensor, order: Sequence[int]) -> Tensor:
        """Outputs `[T, …]`, of documents in this order, as those of the documents as they come."""
        pieces = outputs.split([self.lengths[index] for index in order])
        at = sorted(range(len(order)), key=order.__getitem__)
        return torch.cat([pieces[index] for index in at])

    def padded(self, positions: int, order: Sequence[int] | None = None) -> list[Batch]:
        """Right-padded batches, at most `positions` each, pads too.

        Such a batch fits wherever the packed row fits: with the same memory a user would batch this
        way, and sum the gradients.

        Args:
            positions: of a batch; a document that is longer has one of its own.
            order: indices of the documents; None: as they come.
        """
        own = self.documents()
        documents = [own[index] for index in (range(len(own)) if order is None else order)]
        found = []
        for group in padded_groups([len(ids) for ids, _ in documents], positions):
            ids, labels = zip(*(documents[index] for index in group), strict=True)
            lengths = torch.tensor([len(each) for each in ids])
            real = torch.arange(int(lengths.max()))[None] < lengths[:, None]
            real = real.to(self.ids.device)
            inputs = {
                "input_ids": pad_sequence(list(ids), batch_first=True),
                "attention_mask": real.long(),
                "use_cache": False,
            }
            padded = pad_sequence(list(labels), batch_first=True, padding_value=IGNORE_INDEX)
            found.append(Batch(inputs, real, padded))
        return found

    def serial(self) -> list[Batch]:
        """Each document alone."""
        return [
            Batch({"input_ids": ids[None], "use_cache": False}, None, labels[None])
            for ids, labels in self.documents()
        ]


def padded_groups(lengths: Sequence[int], positions: int) -> Iterator[list[int]]:
    """Documents of each padded batch: as many in a row as fit, pads included, at least one.

    >>> list(padded_groups([3, 1, 4, 1, 1], 8))
    [[0, 1], [2, 3], [4]]
    """
    group: list[int] = []
    for index, length in enumerate(lengths):
        longest = max((lengths[i] for i in group), default=0)
        if group and (len(group) + 1) * max(longest, length) > positions:
            yield group
            group = []
        group.append(index)
    if group:
        yield group


def positions_of(batches: Sequence[Batch]) -> int:
    """Positions computed, pads included."""
    return sum(batch.inputs["input_ids"].numel() for batch in batches)


def shapes_of(batches: Sequence[Batch]) -> int:
    """How many different shapes the forwards get."""
    return len({tuple(batch.inputs["input_ids"].shape) for batch in batches})
