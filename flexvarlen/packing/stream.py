"""`StreamPacker`: an iterable dataset whose items are packed rows of a stream of examples."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from copy import deepcopy
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
from flexvarlen.packing.loader_pass import reads_ahead, rows_skipped_beyond_pass
from flexvarlen.packing.pack import pack
from flexvarlen.packing.stream_position import (
    SEGMENT,
    Mark,
    Position,
    has_state,
    loader_workers,
    share_of,
)

OTHER_SETTING = (
    "{0} must be {1}, as when the state was saved, got {2}; resume with {0}={1}, or restart the "
    "stream."
)


class StreamPacker(IterableDataset[list[Columns]]):
    """Packs a stream of tokenized examples, for a `DataLoader` or `Trainer` with `PackedCollator`.

    Items are rows, as in `PackedDataset`. Documents are collected in a buffer. When it is
    full, they are packed best fit decreasing. The row of the oldest document and the fullest other
    rows, half of all rows, are yielded; the other documents stay in the buffer.

    `state_dict` and `load_state_dict` resume at the next row, and raise an error if the rows before
    it differ. torchdata's `StatefulDataLoader` calls them, with or without workers. Trainer skips
    batches instead, beyond the first pass if `passes` is None.

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
        passes: number of passes over the dataset that an iteration makes; None: no end. Each pass
            raises the epoch of the dataset by one.

    Attributes:
        num_long: number of examples of this pass, since it began or was resumed, that were longer
            than `tokens`, or of more than `max_patches`.
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
        passes: int | None = 1,
    ) -> None:
        if isinstance(dataset, str | bytes | Mapping) or not isinstance(dataset, Iterable):
            raise ValueError(
                f"dataset must be an iterable of tokenized examples, got {type(dataset).__name__}; "
                "pass one split of an IterableDatasetDict."
            )
        self.passes = None if passes is None else require_int_at_least("passes", passes, 1)
        if isinstance(dataset, Iterator) and self.passes != 1:
            raise ValueError(
                f"passes must be 1 for an iterator, which is read once, got {passes}; pass an "
                "object whose __iter__ opens the stream."
            )
        check_options(extra, next_token_labels)
        self.limits = RowLimits.of(tokens, max_patches, long)
        self.buffer = require_int_at_least("buffer", buffer, 1)
        self._settings = {
            "tokens": self.limits.tokens,
            "long": long,
            "buffer": self.buffer,
            "max_patches": max_patches,
            "next_token_labels": next_token_labels,
        }
        self.dataset, self.extra = dataset, tuple(extra)
        self.next_token_labels = next_token_labels
        self.num_long = self.num_dropped = 0
        self._at = Position(0)
        self._resumed: Position | None = None  # where the next iteration begins
        self._source_epoch = 0  # last set on the dataset
        self._is_read = False  # of an iterator
        # Loader workers that persist see the epoch of the main process.
        self._epoch = torch.tensor(-1).share_memory_()  # -1 before set_epoch
        # Tells the main process that workers pack, so it cannot count the rows.
        self._in_workers = torch.zeros((), dtype=torch.bool).share_memory_()

    def __iter__(self) -> Iterator[list[Columns]]:
        """Iterate over the packed rows that follow the loaded state.

        Raises:
            ValueError: see the class; or an iterator was read before, the loaded state is in the
                middle of another epoch than that of `set_epoch`, or the rows before it differ from
                those of the run that saved it.
        """
        # Now, not at the first row: torchdata makes an iterator that it does not use.
        if self._epoch >= 0:  # again, as a worker loads its state after set_epoch
            self._check_epoch(self.epoch)
        at, self._resumed = self._resumed or Position(self.epoch), None
        if at.workers not in (None, workers := loader_workers()):
            raise ValueError(OTHER_SETTING.format("num_workers", at.workers, workers))
        self._at = at
        return self._iterate(at)

    @property
    def epoch(self) -> int:
        """The epoch of the next iteration, unless a state is loaded."""
        return max(int(self._epoch), 0)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, also of the dataset if it has this method; accelerate and Trainer do.

        Raises:
            ValueError: a loaded state is in the middle of another epoch.
        """
        epoch = require_int_at_least("epoch", epoch, 0)
        self._check_epoch(epoch)
        self._epoch.fill_(epoch)
        self._set_epoch_of(self.dataset, epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return where the iteration is, as numbers and the state of the dataset, if it has one.

        May be called between any two rows. Each rank saves its own.

        Raises:
            ValueError: loader workers yield the rows, each in its own copy, or a loader of
                accelerate has read ahead.
        """
        workers = loader_workers()
        if self._in_workers and not workers:
            raise ValueError(
                "num_workers must be 0 to save the state of a StreamPacker, as each worker counts "
                "its own rows; use torchdata's StatefulDataLoader, and save its state."
            )
        if reads_ahead(self):
            raise ValueError(
                "accelerate's loader must be a stateful one, as it reads a batch ahead; pass "
                "DataLoaderConfiguration(use_stateful_dataloader=True), and save its state."
            )
        at = self._at
        return {
            "epoch": at.epoch if at.has_begun else self.epoch,
            "pass": at.passes,
            "rows": at.rows,
            "crc": at.crc,
            "segment": at.marks[0]._asdict(),
            "has_ended": at.has_ended,
            "workers": workers,
            **self._settings,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume in the next iteration; later ones use the epoch of `set_epoch`.

        A `datasets.IterableDataset` continues from its own state. If its rows then differ, as after
        `shuffle(buffer_size=...)`, whose buffer the state omits, or of any other iterable, examples
        are read from the beginning and skipped. In all cases, up to 65,536 examples (or eight
        buffers) are packed again.

        Raises:
            ValueError: the state was saved with other settings. Another number of workers raises
                when the iteration begins.
        """
        for name, now in self._settings.items():
            if (saved := state.get(name)) != now:
                raise ValueError(OTHER_SETTING.format(name, saved, now))
        marks = deque([Mark(**state["segment"])], maxlen=2)
        where = state["epoch"], state["pass"], state["rows"], state["crc"]
        self._at = Position(*where, marks, state["has_ended"], state["workers"])
        self._resumed = self._at if self._at.has_begun else None
        if self._resumed is None:
            self._epoch.fill_(state["epoch"])

    def _check_epoch(self, epoch: int) -> None:
        """Check that a loaded state is of this epoch; forget one of an earlier epoch's end."""
        at = self._resumed
        if at is None or at.epoch == epoch:
            return
        if not at.has_ended or epoch < at.epoch:
            raise ValueError(
                f"epoch must be {at.epoch}, which load_state_dict resumed in the middle, got "
                f"{epoch}; start the loop over epochs there."
            )
        self._resumed = None

    def _set_epoch_of(self, dataset: Any, epoch: int) -> None:
        self._source_epoch = epoch
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(epoch)

    def _iterate(self, at: Position) -> Iterator[list[Columns]]:
        if isinstance(self.dataset, Iterator):
            if self._is_read:
                raise ValueError(
                    "dataset must be an iterable that each pass can read from its beginning, got "
                    f"a {type(self.dataset).__name__} that was read before; pass a list, a "
                    "datasets.IterableDataset, or an object whose __iter__ opens the stream."
                )
            self._is_read = True
        worker = get_worker_info()
        self._in_workers.fill_(worker is not None)
        dataset: Any = self.dataset
        if worker and has_state(dataset):
            dataset = deepcopy(dataset)  # its epoch is that of all processes
        if not at.has_begun:
            at.epoch = self.epoch
        drawn = 0  # rows of all passes of this iteration
        while True:
            if (epoch := at.epoch + at.passes) != self._source_epoch:
                self._set_epoch_of(dataset, epoch)
            at, rows = self._resume(at, dataset) if at.rows else (at, self._rows(at, dataset))
            self._at = at
            yield from rows
            drawn += at.rows
            is_last = self.passes is not None and at.passes + 1 >= self.passes
            if is_last and worker is None and (skipped := rows_skipped_beyond_pass(self, drawn)):
                raise ValueError(
                    f"passes must be None to skip {skipped} rows of a stream of {drawn}, got "
                    f"{self.passes}; resume runs of several passes with the passes=None that they "
                    "were begun with."
                )
            if is_last or not at.rows:  # a worker's share may be empty
                at.has_ended = True
                return
            at = Position(at.epoch, at.passes + 1)

    def _resume(self, at: Position, dataset: Any) -> tuple[Position, Iterator[list[Columns]]]:
        """A position equal to `at`, and the rows of the pass that follow."""
        mark = at.marks[0]
        for state in [None] if mark.source is None else [mark.source, None]:
            source = dataset
            if state is not None:
                source = deepcopy(dataset)  # else later passes would begin with the state
                source.load_state_dict(state)
            begun = deque([mark], maxlen=2)
            found = Position(at.epoch, at.passes, mark.rows, mark.crc, begun, workers=at.workers)
            rows = self._rows(found, source, mark.read if state is None else 0)
            try:
                deque(islice(rows, at.rows - mark.rows), maxlen=0)
            except LookupError:  # `datasets`, of a worker's share of shuffled files
                if state is None:
                    raise
            if (found.rows, found.crc) == (at.rows, at.crc):
                return found, rows
        raise ValueError(
            f"dataset must be the stream that the state was saved for, but its first {at.rows} "
            f"rows are not those that were yielded; load the state of this stream."
        )

    def _rows(self, at: Position, source: Any, skipped: int = 0) -> Iterator[list[Columns]]:
        """The rows after the mark of `at`, which counts them; examples are skipped unseen."""
        self.num_long = self.num_dropped = 0
        waiting: list[Columns] = []  # the oldest first
        read, any_kept, worker = at.marks[0].read, at.rows > 0, get_worker_info()
        segment = max(SEGMENT, 4 * self.buffer)
        share = share_of(source, worker)
        keeps_state = share is source and has_state(source)
        for example in islice(share, skipped, None):
            pieces = self._pieces(example, read)
            read, any_kept = read + 1, any_kept or bool(pieces)
            if read == self.buffer and not any_kept:
                break
            for piece in pieces:
                waiting.append(piece)
                if len(waiting) >= self.buffer:
                    rows, waiting = self._packed(waiting)
                    yield from map(at.count, rows)
            if read % segment == 0:
                yield from self._flush(waiting, at)
                waiting = []
                state = source.state_dict() if keeps_state else None
                at.marks.append(Mark(read, at.rows, at.crc, state))
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
        yield from self._flush(waiting, at)

    def _flush(self, waiting: list[Columns], at: Position) -> Iterator[list[Columns]]:
        """The rows of all documents that wait."""
        while waiting:
            rows, waiting = self._packed(waiting)
            yield from map(at.count, rows)

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
