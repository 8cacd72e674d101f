"""`StreamPacker`: an iterable dataset whose items are packed rows of a stream of examples."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from flexvarlen.layout.arguments import require_int_at_least
from flexvarlen.packing.columns import differ
from flexvarlen.packing.examples import (
    Columns,
    Long,
    RowLimits,
    check_options,
    columns_of,
    joined,
    labelled_spans,
    piece_of,
)
from flexvarlen.packing.images import num_patches
from flexvarlen.packing.pack import pack


class StreamPacker(IterableDataset[list[Columns]]):
    """Packs a stream of tokenized examples, for a `DataLoader` or `Trainer` with `PackedCollator`.

    Items are rows, as in `PackedDataset`. Documents are collected in a buffer. When it is
    full, they are packed best fit decreasing. The row of the oldest document and the fullest other
    rows, half of all rows, are yielded; the other documents stay in the buffer.

    Trainer resumes by skipping batches of the first pass. If it resumes after that pass, it starts
    the second from the beginning and trains on other rows than an uninterrupted run, as with any
    stream; `state_dict` and `load_state_dict` continue at the same row.

    Each worker of a loader packs a share of the stream. A torch or `datasets` IterableDataset
    assigns the shares itself; of any other iterable, each of n workers takes every n-th example.

    Args:
        dataset: the examples, as in `PackedDataset`, in a `datasets.IterableDataset` or any other
            iterable. An iterator can be packed once; a second pass raises an error.
        tokens: number of tokens in a row, at least 1.
        long: what happens to longer examples, as in `PackedDataset`.
        buffer: maximum number of buffered documents; a larger buffer fills the rows better.
        extra: names of additional columns, as in `PackedDataset`.
        next_token_labels: whether given labels are next-token labels; None: True for an example
            unless one of its labels differs from its token.
        max_patches: as in `PackedDataset`.

    Attributes:
        num_long: number of examples of this pass that were longer than `tokens`, or of more than
            `max_patches`.
        num_dropped: number of its examples, or pieces of them, that give no loss, as in
            `PackedDataset`. Loader workers count both in their own copies.

    Raises:
        ValueError: an argument is invalid; or, while rows are drawn, an example is not a tokenized
            document (the message has its number), or no example gives a loss among as many as the
            buffer holds or, without loader workers, in the whole stream.

    >>> stream = StreamPacker([[1, 2, 3, 4, 5], [6, 7, 8], list(range(10, 19))], 8, buffer=4)
    >>> [[document["input_ids"].tolist() for document in row] for row in stream]
    [[[1, 2, 3, 4, 5], [6, 7, 8]], [[10, 11, 12, 13, 14, 15, 16, 17]]]
    >>> stream.num_long, stream.num_dropped
    (1, 1)
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        tokens: int,
        *,
        long: Long = "split",
        buffer: int = 8192,
        extra: Collection[str] = (),
        next_token_labels: bool | None = None,
        max_patches: int | None = None,
    ) -> None:
        if isinstance(dataset, str | bytes | Mapping) or not isinstance(dataset, Iterable):
            raise ValueError(
                f"dataset must be an iterable of tokenized examples, got {type(dataset).__name__}; "
                "pass one split of an IterableDatasetDict."
            )
        check_options(extra, next_token_labels)
        self.limits = RowLimits.of(tokens, max_patches, long)
        self.buffer = require_int_at_least("buffer", buffer, 1)
        self._settings = {
            "tokens": self.limits.tokens,
            "long": long,
            "buffer": self.buffer,
            "max_patches": max_patches,
        }
        self.dataset, self.extra = dataset, tuple(extra)
        self.next_token_labels = next_token_labels
        self.num_long = self.num_dropped = 0
        self._taken = self._begin = 0  # rows yielded, and rows to skip in the next pass
        self._is_read = False  # of an iterator
        # Loader workers that persist see the epoch of the main process.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()
        # Tells the main process that workers pack, so it cannot count the rows.
        self._in_workers = torch.zeros((), dtype=torch.bool).share_memory_()

    def __iter__(self) -> Iterator[list[Columns]]:
        """Yield the packed rows that follow the loaded state.

        Raises:
            ValueError: see the class; or an iterator was read before, or the stream has fewer rows
                than the loaded state.
        """
        if isinstance(self.dataset, Iterator):
            if self._is_read:
                raise ValueError(
                    "dataset must be an iterable that each pass can read from its beginning, got "
                    f"a {type(self.dataset).__name__} that was read before; pass a list, a "
                    "datasets.IterableDataset, or an object whose __iter__ opens the stream."
                )
            self._is_read = True
        self._in_workers.fill_(get_worker_info() is not None)
        begin, self._begin = self._begin, 0
        rows = self._rows()
        self._taken = sum(1 for _ in islice(rows, begin))
        if self._taken < begin:
            raise ValueError(
                f"dataset must be the stream that the state was saved for, at least {begin} rows "
                f"long, got {self._taken}; load the state of this stream."
            )
        for row in rows:
            self._taken += 1
            yield row

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, also of the dataset if it has this method; accelerate and Trainer do.

        Raises:
            ValueError: a loaded state is in the middle of another epoch.
        """
        epoch = require_int_at_least("epoch", epoch, 0)
        if self._begin and epoch != int(self._epoch):
            raise ValueError(
                f"epoch must be {int(self._epoch)}, which load_state_dict resumed in the middle, "
                f"got {epoch}; start the loop over epochs there."
            )
        self._epoch.fill_(epoch)
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch and the number of its rows that were yielded.

        May be called between any two rows.

        Raises:
            ValueError: loader workers yield the rows, each in its own copy.
        """
        if self._in_workers and get_worker_info() is None:
            raise ValueError(
                "num_workers must be 0 to save the state of a StreamPacker, as each worker counts "
                "its own rows; set it to 0, or let Trainer skip batches."
            )
        return {"epoch": int(self._epoch), "rows": self._taken, **self._settings}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume: the next pass reads the stream from its beginning and skips the rows yielded.

        Raises:
            ValueError: the state was saved with other settings.
        """
        for name, expected in self._settings.items():
            if (given := state.get(name)) != expected:
                raise ValueError(
                    f"the state's {name} must be {expected}, got {given}; make the packer "
                    f"with that {name}, or restart the stream."
                )
        self._begin = 0
        self.set_epoch(state["epoch"])
        self._taken = self._begin = state["rows"]

    def _rows(self) -> Iterator[list[Columns]]:
        self.num_long = self.num_dropped = 0
        waiting: list[Columns] = []  # the oldest first
        read, any_kept, worker = 0, False, get_worker_info()
        for example in self._share():
            pieces = self._pieces(example, read)
            read, any_kept = read + 1, any_kept or bool(pieces)
            if read == self.buffer and not any_kept:
                break
            for piece in pieces:
                waiting.append(piece)
                if len(waiting) >= self.buffer:
                    rows, waiting = self._packed(waiting)
                    yield from rows
        if not read and worker is None:
            raise ValueError(
                "dataset must contain at least one example; pass a stream that is not empty "
                "and was not read before."
            )
        if not any_kept and (worker is None or read == self.buffer):
            raise ValueError(
                "dataset must contain documents with labels that are not -100, but the first "
                f"{read} examples have none; check their labels and masks, and "
                f"tokens={self.limits.tokens}, long={self.limits.long!r}."
            )
        while waiting:
            rows, waiting = self._packed(waiting)
            yield from rows

    def _share(self) -> Iterable[Any]:
        worker = get_worker_info()
        if worker is None or isinstance(self.dataset, IterableDataset):
            return self.dataset
        return islice(self.dataset, worker.id, None, worker.num_workers)

    def _pieces(self, example: Any, number: int) -> list[Columns]:
        """The pieces of an example that give a loss."""
        columns = columns_of(example, f"example {number} of dataset", self.extra)
        lengths, patches, labelling = joined([columns])
        pieces = self.limits.cut(lengths, patches, "example {} of dataset", number)
        self.num_long += pieces.num_long
        if not lengths[0]:
            self.num_dropped += 1
            return []
        next_token = self.next_token_labels
        if "labels" not in columns:  # the collator makes next-token labels
            next_token = True
        elif next_token is None:
            next_token = not differ(columns["labels"], columns["input_ids"])
        first, last = labelled_spans(labelling, lengths, pieces)
        kept = last > first if next_token else last >= first
        self.num_dropped += int((~kept).sum())
        spans = zip(pieces.starts[kept].tolist(), pieces.stops[kept].tolist(), strict=True)
        return [piece_of(columns, start, stop, next_token) for start, stop in spans]

    def _packed(self, waiting: list[Columns]) -> tuple[list[list[Columns]], list[Columns]]:
        """Half of the buffer's rows, the oldest document's first, and the remaining documents."""
        lengths = np.array([document["input_ids"].size for document in waiting])
        patches = np.array([num_patches(document) for document in waiting])
        costs = self.limits.costs(lengths, patches)
        rows = pack(costs, self.limits.tokens)
        rows.sort(key=lambda row: (0 not in row, -int(costs[row].sum())))
        rows = rows[: (len(rows) + 1) // 2]
        gone = {index for row in rows for index in row}
        left = [each for i, each in enumerate(waiting) if i not in gone]
        return [[waiting[index] for index in row] for row in rows], left
