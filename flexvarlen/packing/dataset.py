"""`PackedDataset`: a map-style dataset whose items are packed rows of tokenized examples."""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from flexvarlen.layout.arguments import require_int_at_least
from flexvarlen.packing.columns import differ
from flexvarlen.packing.examples import (
    Columns,
    Long,
    RowLimits,
    blocks,
    check_options,
    labelled_spans,
    piece_of,
    read_example,
    require_sequence,
)
from flexvarlen.packing.pack import Strategy, pack
from flexvarlen.packing.row_cost import RowCost, cost_or_squares
from flexvarlen.packing.sampler import WINDOW, balanced_steps


class PackedDataset(Dataset[list[Columns]]):
    """Packs tokenized examples into rows, for a `DataLoader` or `Trainer` with `PackedCollator`.

    An item is a row: a list of documents of at most `tokens` tokens together, each a mapping of
    columns to arrays, as `PackedCollator` takes them. It puts all rows of a batch into one, so
    do not set its `total_tokens`, or set it to the batch size times `tokens`. Trainer removes no
    columns from such items.

    Lengths are read once, when the dataset is made, with a line of progress every few seconds: for
    a `datasets.Dataset` from the offsets of its Arrow lists, without their values; for any other
    sequence by reading each example. Columns that say which tokens are trained on (labels, masks)
    are read at the same time. Items read their examples again. Padding within an example takes room
    in its row, so tokenize without padding.

    Args:
        dataset: the examples: a `datasets.Dataset`, a list, or any other sequence. Each is a
            mapping with `input_ids` and optionally `labels`, `attention_mask`, `completion_mask`,
            `assistant_masks`, `position_ids`, `seq_idx`, columns of images from a
            processor; or token ids alone.
        tokens: number of tokens in a row, at least 1.
        long: what happens to an example of more than `tokens` tokens: "split": it is cut into
            pieces, each a document; "truncate": its first `tokens` are kept; "drop": it is removed.
            All columns are cut alike; one with images must be whole, or dropped.
        strategy: as in `pack`.
        seed: random seed, combined with the epoch; at least 0. None: in each epoch, rows and
            documents have the order that `pack` gives; for "in_order", the order of the dataset.
        extra: names of additional columns with one value per token, as in `PackedCollator`.
        next_token_labels: whether given labels are next-token labels; None: True unless a label of
            the dataset differs from its token. If True, a piece's first token has no label.
        rows_per_step: number of rows that all ranks together take at a time: ranks times batch
            size. Rows then come in a new order in each epoch, in which all rows of a step cost
            about the same, so that no rank waits for another. The loader must not shuffle them: in
            Trainer, set `train_sampling_strategy="sequential"`. None: rows keep their order.
        cost: with `rows_per_step`, what a row costs the model, as in `BalancedSampler`.
        max_patches: the most patches of images and videos in a row, for Qwen's models; for others
            the most images, or tiles where images are cut into tiles. None: any number.

    Attributes:
        num_long: number of examples longer than `tokens`, or of more than `max_patches`.
        num_dropped: number of examples, or pieces of them, dropped because they give no loss: they
            are empty, have all labels masked, or have one token that nothing predicts.
        row_lengths: the lengths of each row's documents, in the order of this epoch.

    Raises:
        ValueError: an argument is invalid, an example is not a tokenized document (the message has
            its index), or nothing is left to pack.

    `set_epoch` shuffles documents: those of equal length swap rows. Each row keeps the lengths of
    its documents, so the number of rows stays as Trainer planned, each document comes once per
    epoch, and without `rows_per_step` `row_lengths` stay valid. A document whose length is unique
    keeps its row. Without `rows_per_step`, rows have a random order that is the same in each epoch;
    shuffle them in the loader, as Trainer does.

    >>> rows = PackedDataset([[1, 2, 3, 4, 5], [6, 7, 8], list(range(10, 19))], 8, seed=None)
    >>> [[document["input_ids"].tolist() for document in row] for row in rows]
    [[[10, 11, 12, 13, 14, 15, 16, 17]], [[1, 2, 3, 4, 5], [6, 7, 8]]]
    >>> rows.num_long, rows.num_dropped
    (1, 1)
    """

    def __init__(
        self,
        dataset: Any,
        tokens: int,
        *,
        long: Long = "split",
        strategy: Strategy = "best_fit_decreasing",
        seed: int | None = 0,
        extra: Collection[str] = (),
        next_token_labels: bool | None = None,
        rows_per_step: int | None = None,
        cost: RowCost | None = None,
        max_patches: int | None = None,
    ) -> None:
        self.limits = RowLimits.of(tokens, max_patches, long)
        self.seed = None if seed is None else require_int_at_least("seed", seed, 0)
        if rows_per_step is not None:
            rows_per_step = require_int_at_least("rows_per_step", rows_per_step, 1)
            if seed is None:
                raise ValueError(
                    f"rows_per_step must be None if seed is, got {rows_per_step}; pass a seed, by "
                    "which rows are shuffled."
                )
        self.rows_per_step, self.cost = rows_per_step, cost_or_squares(cost)
        pack([], self.limits.tokens, strategy=strategy)  # validates the strategy
        check_options(extra, next_token_labels)
        require_sequence(dataset)
        self.dataset, self.extra = dataset, tuple(extra)
        self.next_token_labels = next_token_labels
        self.num_long = self.num_dropped = 0
        self._examples, self._starts, self._stops, self._costs = self._pieces()
        self._plan, self._ends = self._planned(strategy)
        # An epoch, the pieces of its rows, and the order of the rows.
        self._drawn: tuple[int, NDArray[np.int64], NDArray[np.int64]] | None = None
        # Loader workers that persist see the epoch of the main process.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    def __len__(self) -> int:
        """Return the number of rows, the same in each epoch."""
        return self._ends.size - 1

    def __getitem__(self, index: int) -> list[Columns]:
        """Return the documents of a row.

        Raises:
            IndexError: there is no such row.
            ValueError: an example is not a tokenized document.
        """
        pieces, rows = self._shuffled()
        row = rows[range(len(self))[index]]
        pieces = pieces[self._ends[row] : self._ends[row + 1]]
        return [self._document(piece) for piece in pieces.tolist()]

    def set_epoch(self, epoch: int) -> None:
        """Shuffle the documents, and with `rows_per_step` the rows. Trainer calls this.

        accelerate's loaders call it too, unless there are several ranks and the sampler has an
        epoch.
        """
        self._epoch.fill_(require_int_at_least("epoch", epoch, 0))

    @property
    def tokens(self) -> int:
        """Number of tokens in a row."""
        return self.limits.tokens

    @property
    def row_lengths(self) -> list[list[int]]:
        """The lengths of the documents of each row."""
        lengths = (self._stops - self._starts)[self._plan].tolist()
        rows = [lengths[begin:end] for begin, end in pairwise(self._ends.tolist())]
        return [rows[row] for row in self._shuffled()[1]]

    def _planned(self, strategy: Strategy) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The pieces of all rows, one row after the other, and the boundaries of the rows."""
        rows = pack(self._costs, self.limits.tokens, strategy=strategy)
        if self.seed is not None:
            np.random.default_rng(self.seed).shuffle(rows)
        ends = np.cumsum([0, *map(len, rows)])
        flat = (piece for row in rows for piece in row)
        return np.fromiter(flat, np.int64, self._starts.size), ends

    def _shuffled(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The pieces of all rows in this epoch, and the order in which the rows are items."""
        epoch = int(self._epoch)
        if self._drawn is None or self._drawn[0] != epoch:
            self._drawn = epoch, self._swapped(epoch), self._ordered(epoch)
        return self._drawn[1:]

    def _swapped(self, epoch: int) -> NDArray[np.int64]:
        """The plan with pieces swapped that have equal lengths and equal costs."""
        if self.seed is None:
            return self._plan
        equal = self._stops - self._starts, self._costs
        keys = np.random.default_rng([self.seed, epoch]).random(self._costs.size)
        swapped = np.empty(self._costs.size, np.int64)
        swapped[np.lexsort(equal)] = np.lexsort((keys, *equal))
        return swapped[self._plan]

    def _ordered(self, epoch: int) -> NDArray[np.int64]:
        """Row indices, step by step. Rows that do not fill a step come last."""
        if self.seed is None or self.rows_per_step is None:
            return np.arange(len(self))
        generator = np.random.default_rng([self.seed, epoch, 1])
        order = generator.permutation(len(self))
        whole = order.size - order.size % self.rows_per_step
        lengths = (self._stops - self._starts)[self._plan].astype(np.int64)
        costs = np.add.reduceat(self.cost.of_documents(lengths), self._ends[:-1])
        steps = balanced_steps(costs, order[:whole], self.rows_per_step, WINDOW, generator)
        return np.append(np.array(steps, np.int64).ravel(), order[whole:])

    def _document(self, piece: int) -> Columns:
        start, stop = int(self._starts[piece]), int(self._stops[piece])
        row = read_example(self.dataset, int(self._examples[piece]), self.extra)
        return piece_of(row, start, stop, bool(self.next_token_labels))

    def _pieces(self) -> tuple[NDArray[Any], ...]:
        """Examples, starts, stops and costs of the pieces that give a loss."""
        found, given, differs = [], False, False
        for begin, lengths, patches, columns in blocks(self.dataset, self.extra):
            cut = self.limits.cut(lengths, patches, "dataset[{}]", begin)
            self.num_long += cut.num_long
            self.num_dropped += int((lengths == 0).sum())
            labels = columns.get("labels")
            given |= labels is not None
            differs |= labels is not None and differ(labels, columns["input_ids"])
            first, last = labelled_spans(columns, lengths, cut)
            spans = (x.astype(np.int32) for x in (cut.starts, cut.stops, cut.costs))
            found.append((cut.examples + begin, *spans, last > first, last >= first))
        if self.next_token_labels is None or not given:  # the collator makes next-token labels
            self.next_token_labels = not (given and differs)
        *pieces, later, any_at_all = map(np.concatenate, zip(*found, strict=True))
        kept = later if self.next_token_labels else any_at_all
        self.num_dropped += int((~kept).sum())
        if not kept.any():
            raise ValueError(
                f"dataset must contain a document with labels that are not -100, got "
                f"{len(self.dataset)} examples without; check their labels and masks, and tokens="
                f"{self.limits.tokens}, long={self.limits.long!r}."
            )
        return tuple(piece[kept] for piece in pieces)
