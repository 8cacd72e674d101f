"""`pack`: bin packing of documents into rows of a fixed number of tokens."""

from __future__ import annotations

import gc
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from flexvarlen.layout.arguments import to_int_or_none
from flexvarlen.packing.first_fit import first_fit
from flexvarlen.parallel.pieces import Piece

Strategy = Literal["best_fit_decreasing", "first_fit", "in_order"]
Lengths = Sequence[int] | NDArray[np.integer]


def pack(
    lengths: Lengths, capacity: int, *, strategy: Strategy = "best_fit_decreasing"
) -> list[list[int]]:
    """Pack documents into rows of at most `capacity` tokens, without cutting any document.

    Args:
        lengths: number of tokens of each document, from 1 to `capacity`; integers, or an integer
            array `[num_docs]`. Cut longer documents with `split_long` first.
        capacity: number of tokens in a row.
        strategy: "best_fit_decreasing": longest documents first, each into the fullest row that it
            fits into; gives the fewest rows, with long documents in the first rows, so shuffle the
            rows. "first_fit": in the order given, each into the first row that it fits into.
            "in_order": in the order given, starting a new row if one does not fit into the last.

    Returns:
        The rows, as lists of indices into `lengths`. Each index occurs once, in the order in
        which the documents were added.

    Raises:
        ValueError: a length is not an integer from 1 to `capacity`, or the strategy is unknown.

    A new row is opened only if no open row has room. Time is O(n log n), independent of
    `capacity`. Documents of equal length are placed together by "best_fit_decreasing", and one at a
    time by "first_fit".

    Source: best fit decreasing follows Ding et al., Fewer Truncations Improve Language Modeling
    (arXiv 2404.10830).

    >>> pack([5, 3, 4, 4], 8)
    [[0, 1], [2, 3]]
    """
    values = _checked(lengths, capacity)
    capacity = int(capacity)
    strategies: dict[str, Callable[[NDArray[np.int64], int], list[list[int]]]] = {
        "best_fit_decreasing": _best_fit_decreasing,
        "first_fit": first_fit,
        "in_order": _in_order,
    }
    if not isinstance(strategy, str) or strategy not in strategies:
        raise ValueError(
            f"strategy must be one of {', '.join(strategies)}, got {strategy!r}; choose one."
        )
    with _no_collection():
        return strategies[strategy](values, capacity) if values.size else []


def split_long(lengths: Lengths, capacity: int) -> list[Piece]:
    """Cut documents of more than `capacity` tokens into pieces of `capacity` and a remainder.

    Pack the pieces with `pack([stop - start for _, start, stop in pieces], capacity)`. Each is then
    a separate document, which does not attend to the previous piece.

    Args:
        lengths: number of tokens of each document, at least 1.
        capacity: maximum number of tokens in a piece.

    Returns:
        The pieces, each `(document, start, stop)`.

    Raises:
        ValueError: as in `pack`, except that long documents are allowed.

    >>> split_long([3, 9], 8)  # doctest: +ELLIPSIS
    [Piece(document=0, start=0, stop=3), Piece(document=1, start=0, stop=8), ...]
    """
    values = _checked(lengths, capacity, bounded=False)
    with _no_collection():
        found = zip(*(each.tolist() for each in cut_into(values, int(capacity))), strict=True)
        return list(map(Piece._make, found))


def cut_into(
    lengths: NDArray[np.int64], capacity: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """The pieces of `split_long` as arrays: documents, starts and stops."""
    counts = -(-lengths // capacity)
    index = np.repeat(np.arange(lengths.size), counts)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    start = (np.arange(index.size) - first) * capacity
    return index, start, np.minimum(start + capacity, lengths[index])


def efficiency(lengths: Lengths, rows: Sequence[Sequence[int]], capacity: int) -> float:
    """Return the fraction of the rows' tokens that are not padding.

    >>> efficiency([5, 3, 4], pack([5, 3, 4], 8), 8)
    0.75
    """
    values = np.asarray(lengths)
    return float(sum(values[row].sum() for row in map(list, rows))) / max(1, len(rows) * capacity)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Disable garbage collection, which would traverse every list created so far."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _checked(lengths: Lengths, capacity: int, *, bounded: bool = True) -> NDArray[np.int64]:
    most = to_int_or_none(capacity) or 0
    if most < 1:
        raise ValueError(
            f"capacity must be an integer of at least 1, got {capacity!r}; pass the tokens per row."
        )
    try:
        values = np.asarray(lengths)
    except ValueError:  # documents of several lengths
        values = np.asarray(lengths, object)[:, None]
    if values.ndim != 1 or not (values.size == 0 or np.issubdtype(values.dtype, np.integer)):
        raise ValueError(
            f"lengths must be one integer per document, got {values.dtype} of shape "
            f"{list(values.shape)}; pass numbers of tokens: [len(doc) for doc in docs]."
        )
    found = values.astype(np.int64)
    for wrong, contract, advice in (
        (found < 1, "at least 1", "drop empty documents"),
        (found > most, f"at most capacity, {most}", "cut long documents with split_long"),
    )[: 2 if bounded else 1]:
        if wrong.any():
            i = int(wrong.argmax())
            raise ValueError(f"lengths must be {contract}, got {found[i]} at index {i}; {advice}.")
    return found


def _best_fit_decreasing(lengths: NDArray[np.int64], capacity: int) -> list[list[int]]:
    """Place all documents of one length at a time, in groups over rows with equal space.

    The row with the least sufficient space gets `space // length` of them before the next row gets
    any, because it remains the best fit.
    """
    order = np.argsort(-lengths, kind="stable")
    values, counts = np.unique(lengths, return_counts=True)
    row_of = np.empty(lengths.size, np.int64)  # row of each document, indexed as `order`
    rows_with: dict[int, list[NDArray[np.int64]]] = {}
    spaces: list[int] = []  # the keys, sorted
    num_rows = placed = 0

    def leave(space: int, rows: NDArray[np.int64]) -> None:
        if space and rows.size:
            if space not in rows_with:
                rows_with[space] = []
                insort(spaces, space)
            rows_with[space].append(rows)

    for length, count in zip(values[::-1].tolist(), counts[::-1].tolist(), strict=True):
        end = placed + count
        while placed < end:
            tightest = bisect_left(spaces, length)
            space = spaces[tightest] if tightest < len(spaces) else capacity
            each = space // length
            wanted = -(-(end - placed) // each)
            if tightest < len(spaces):
                rows = _taken(rows_with[space], wanted)
                if not rows_with[space]:
                    del rows_with[space], spaces[tightest]
            else:
                rows = np.arange(num_rows, num_rows + wanted)
                num_rows += wanted
            taken = min(end - placed, each * rows.size)
            full, rest = divmod(taken, each)
            row_of[placed : placed + taken] = np.repeat(rows[: full + 1], min(each, taken))[:taken]
            leave(space - each * length, rows[:full])
            if rest:
                leave(space - rest * length, rows[full:])
            placed += taken
    by_row = np.argsort(row_of, kind="stable")
    ends = np.cumsum(np.bincount(row_of, minlength=num_rows)).tolist()
    return _cut(order[by_row].tolist(), ends)


def _taken(chunks: list[NDArray[np.int64]], wanted: int) -> NDArray[np.int64]:
    """Remove up to `wanted` rows from `chunks` and return them."""
    found: list[NDArray[np.int64]] = []
    while chunks and wanted:
        chunk = chunks.pop()
        if chunk.size > wanted:
            chunks.append(chunk[wanted:])
            chunk = chunk[:wanted]
        found.append(chunk)
        wanted -= chunk.size
    return found[0] if len(found) == 1 else np.concatenate(found)


def _in_order(lengths: NDArray[np.int64], capacity: int) -> list[list[int]]:
    ends = np.cumsum(lengths).tolist()
    cuts: list[int] = []
    filled = 0
    while not cuts or cuts[-1] < lengths.size:
        cuts.append(bisect_right(ends, filled + capacity))
        filled = ends[cuts[-1] - 1]
    return _cut(list(range(lengths.size)), cuts)


def _cut(indices: list[int], ends: Sequence[int]) -> list[list[int]]:
    return [indices[begin:end] for begin, end in zip([0, *ends[:-1]], ends, strict=True)]
