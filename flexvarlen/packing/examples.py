"""Read tokenized examples: their lengths, which tokens are trained on, and their pieces."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from flexvarlen.layout.arguments import require_int_at_least
from flexvarlen.layout.labels import IGNORE_INDEX, why_not_labels
from flexvarlen.packing.columns import (
    BOUNDARIES,
    LOSS_MASKS,
    check_row,
    is_list_of_documents,
    rows_of,
)
from flexvarlen.packing.images import IMAGES, PIXELS, num_patches
from flexvarlen.packing.pack import cut_into

Columns = dict[str, NDArray[Any]]
Long = Literal["split", "truncate", "drop"]

_LABELLING = ("labels", "attention_mask", *LOSS_MASKS)  # columns that say what is trained on
_BLOCK = 2_000  # examples read at a time: their labels are in memory together
_REPORT_S = 5.0  # between two lines of progress


def require_sequence(dataset: Any) -> None:
    """Raise ValueError unless `dataset` is a sequence of at least one example."""
    wrong = isinstance(dataset, str | bytes | Mapping)
    if wrong or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise ValueError(
            f"dataset must be a sequence of tokenized examples, got {type(dataset).__name__}; pass "
            "one split of a DatasetDict, or a stream to StreamPacker."
        )
    if len(dataset) == 0:
        raise ValueError("dataset must contain at least one example; it is empty.")


def check_options(extra: Any, next_token_labels: Any) -> None:
    """Raise ValueError for an option with an undocumented value."""
    if not isinstance(next_token_labels, bool | None):
        raise ValueError(
            f"next_token_labels must be True, False or None, got {next_token_labels!r}; choose one."
        )
    if isinstance(extra, str) or not isinstance(extra, Collection):
        raise ValueError(f"extra must be names of columns, got {extra!r:.80}; pass a list of them.")


def read_example(dataset: Any, index: int, extra: Collection[str]) -> Columns:
    """The columns of the example at an index."""
    return columns_of(dataset[index], f"dataset[{index}]", extra)


def columns_of(example: Any, described: str, extra: Collection[str]) -> Columns:
    """The columns of an example.

    Raises:
        ValueError: it is not a tokenized document; the message begins with `described`.
    """
    try:
        if is_list_of_documents(example):
            raise ValueError(
                f"an example must be one document, got a list of {len(example)}; flatten the "
                "lists: [d for c in chats for d in fv.tokenize_chat(c, tokenizer)]."
            )
        rows = list(rows_of(example, extra))
        if len(rows) != 1:
            raise ValueError(
                f"input_ids must be one document, got {len(rows)} rows; pass the rows one by one."
            )
        for name in ("seq_lengths", *BOUNDARIES):
            if name in rows[0]:
                raise ValueError(
                    f"columns must describe one document, got {name}, which describes a packed "
                    "row; pass tokenized examples that are not packed yet."
                )
        check_row(rows[0], extra)
    except ValueError as error:
        raise ValueError(f"{described} must be a tokenized document: {error}") from error
    return rows[0]


def blocks(
    dataset: Any, extra: Collection[str]
) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.int64], Columns]]:
    """Yield blocks of examples: index of the first, lengths, patches and concatenated columns.

    The columns are those that say what is trained on, and input_ids if there are labels; or none.
    """
    first = dataset[0]
    names: list[str] = []
    if isinstance(first, Mapping):
        read_example(dataset, 0, extra)
        names = [name for name in (*_LABELLING, *PIXELS) if name in first]
    total, reported = len(dataset), time.monotonic()
    for begin in range(0, total, _BLOCK):
        end = min(begin + _BLOCK, total)
        block = _of_arrow(dataset, begin, end, names)
        if block is None:
            block = joined(read_example(dataset, i, extra) for i in range(begin, end))
        yield begin, *block
        if time.monotonic() - reported > _REPORT_S:
            reported = time.monotonic()
            print(f"PackedDataset: read {end:,} of {total:,} examples", file=sys.stderr)


def _of_arrow(
    dataset: Any, begin: int, end: int, names: list[str]
) -> tuple[NDArray[np.int64], NDArray[np.int64], Columns] | None:
    """As above, of a `datasets.Dataset`; None if its examples are not Arrow lists."""
    if not hasattr(dataset, "with_format") or dataset.format["type"] == "custom":
        return None
    table = dataset.with_format("arrow", columns=["input_ids", *names])[begin:end]
    lengths: Columns = {}
    for name in table.column_names:
        if name in PIXELS and _depth(table.column(name).type) == 5:
            return None  # images of tiles
        lists = table.column(name).chunks
        flat = (name in PIXELS or not hasattr(x.values, "offsets") for x in lists)
        if not all(hasattr(x, "offsets") for x in lists) or not all(flat):
            return None  # lists of one size, or of lists
        lengths[name] = np.concatenate([np.diff(each.offsets.to_numpy()) for each in lists])
    patches = np.zeros(end - begin, np.int64)
    patches += sum(lengths.pop(name) for name in PIXELS if name in names)
    if any((each != lengths["input_ids"]).any() for each in lengths.values()):
        return None  # reading one by one finds the example and names it
    columns = {
        name: np.concatenate([x.flatten().to_numpy(zero_copy_only=False) for x in column.chunks])
        for name, column in ((name, table.column(name)) for name in lengths)
        if len(lengths) > 1
    }
    if "labels" in columns and why_not_labels("labels", columns["labels"]) is not None:
        return None
    return lengths["input_ids"].astype(np.int64), patches, columns


def _depth(kind: Any) -> int:
    """How many lists of lists an Arrow type holds."""
    return 1 + _depth(kind.value_type) if hasattr(kind, "value_type") else 0


def joined(
    examples: Iterable[Columns],
) -> tuple[NDArray[np.int64], NDArray[np.int64], Columns]:
    """Lengths, patches and columns of examples, of which no image is kept.

    A column that an example lacks masks nothing there.
    """
    rows: list[Columns] = []
    patches: list[int] = []
    for row in examples:
        patches.append(num_patches(row))
        rows.append({name: row[name] for name in ("input_ids", *_LABELLING) if name in row})
    names = [name for name in _LABELLING if any(name in row for row in rows)]
    columns: Columns = {}
    for name in ("input_ids", *names) if names else ():
        default = np.copy if name == "labels" else np.ones_like
        columns[name] = np.concatenate(
            [row[name] if name in row else default(row["input_ids"]) for row in rows]
        )
    lengths = np.array([row["input_ids"].size for row in rows], np.int64)
    return lengths, np.array(patches, np.int64), columns


@dataclass(frozen=True)
class Pieces:
    """Pieces of examples.

    Attributes:
        examples, starts, stops: the example of each, and its tokens there.
        costs: the tokens of a row that each takes, or its patches scaled to tokens if that is more.
        num_long: number of examples larger than a row.
    """

    examples: NDArray[np.int64]
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    costs: NDArray[np.int64]
    num_long: int


@dataclass(frozen=True)
class RowLimits:
    """What a row may hold, and what happens to an example that is larger.

    Attributes:
        tokens: the most tokens.
        patches: the most patches of images; None: any number.
        long: what happens to an example of more.
    """

    tokens: int
    patches: int | None
    long: Long

    @classmethod
    def of(cls, tokens: Any, patches: Any, long: Any) -> RowLimits:
        """The limits that a caller names, checked."""
        if long not in get_args(Long):
            raise ValueError(f"long must be split, truncate or drop, got {long!r}; choose one.")
        if patches is not None:
            patches = require_int_at_least("max_patches", patches, 1)
        return cls(require_int_at_least("tokens", tokens, 1), patches, long)

    def costs(self, lengths: NDArray[np.int64], patches: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens of a row that each takes, or its patches scaled to tokens if that is more.

        A row whose documents cost at most `tokens` has neither too many tokens nor patches.
        """
        if self.patches is None:
            return lengths
        return np.maximum(lengths, -(-patches * self.tokens // self.patches))

    def cut(
        self,
        lengths: NDArray[np.int64],
        patches: NDArray[np.int64],
        called: str,
        begin: int,
    ) -> Pieces:
        """The pieces of examples.

        Raises:
            ValueError: an example with images would be cut. Examples are `called` "dataset[{}]" or
                similar, from number `begin` on.
        """
        costs = self.costs(lengths, patches)
        long = costs > self.tokens
        if self.long != "drop" and (cut := long & (patches > 0)).any():
            index = int(cut.argmax())
            raise ValueError(
                f"{called.format(begin + index)} must fit into a row, as it has images and cannot "
                f"be cut, got {lengths[index]} tokens and {patches[index]} patches; raise tokens="
                f"{self.tokens} or max_patches={self.patches}, or pass long='drop'."
            )
        if self.long == "split":
            examples, starts, stops = cut_into(lengths, self.tokens)
        else:
            most = self.tokens if self.long == "drop" else costs.max(initial=0)
            examples = np.flatnonzero((lengths > 0) & (costs <= most))
            starts = np.zeros_like(examples)
            stops = np.minimum(lengths[examples], self.tokens)
        costs = np.where(patches[examples] > 0, costs[examples], stops - starts)
        return Pieces(examples, starts, stops, costs, int(long.sum()))


def piece_of(columns: Columns, start: int, stop: int, next_token_labels: bool) -> Columns:
    """Tokens `start:stop` of an example, as a document with all images of the example."""
    document = {
        name: values if name in IMAGES else values[start:stop] for name, values in columns.items()
    }
    if start and next_token_labels and "labels" in document:
        # The token that predicts the first one is in another document.
        kept = document.get("attention_mask", document["input_ids"] >= 0) != 0
        document["labels"] = document["labels"].copy()
        document["labels"][kept.argmax()] = IGNORE_INDEX
    return document


def labelled_spans(
    columns: Columns, lengths: NDArray[np.int64], pieces: Pieces
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The first token of each piece, without padding, and its last one with a label.

    A next-token label at a piece's first token is ignored.
    """
    begins = (np.cumsum(lengths) - lengths)[pieces.examples]
    starts, stops = begins + pieces.starts, begins + pieces.stops
    if not columns:
        return starts, stops - 1
    kept = labelled = np.ones(columns["input_ids"].size, bool)
    if "attention_mask" in columns:
        kept = columns["attention_mask"] != 0
    for name in LOSS_MASKS:
        if name in columns:
            labelled = labelled & (columns[name] != 0)
    if "labels" in columns:
        labelled = labelled & (columns["labels"] != IGNORE_INDEX)
    if (kept & labelled).all():
        return starts, stops - 1
    at = np.arange(kept.size)
    first = np.minimum.accumulate(np.where(kept, at, at.size)[::-1])[::-1]
    last = np.maximum.accumulate(np.where(kept & labelled, at, -1))
    return first[starts], last[stops - 1]
