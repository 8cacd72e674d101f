"""`plan_row` decides which tokens of a packed row lie on which rank; a function of lengths alone.

Ranks are filled one after another, each to its share of the tokens and of the attention work that
are left. A rank takes whole documents; one document at most is then cut to fill both exactly: the
rank takes a window of it, and what is left before and behind goes to later ranks. So P ranks cut at
most P - 1 documents, and the work is as even as the row allows.

Shapes: P = ranks, T = tokens of the row, C = T/P tokens of a rank.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

EVEN = 0.05
"""How far a rank's attention work may be from the mean where that avoids a cut."""


class Piece(NamedTuple):
    """Tokens `start` to `stop` of a document."""

    document: int
    start: int
    stop: int

    @property
    def tokens(self) -> int:
        return self.stop - self.start

    @property
    def work(self) -> float:
        """Pairs of a query and a key, of causal attention."""
        return (self.stop**2 - self.start**2) / 2


class Need(NamedTuple):
    """Keys that a rank gets from another: tokens `start` to `stop` of a document."""

    rank: int
    document: int
    start: int
    stop: int


@dataclass(frozen=True)
class RowPlan:
    """Which tokens of a row lie on which rank.

    Attributes:
        lengths: tokens of each document.
        tokens_per_rank: C, padding included.
        pieces: of each rank, in the order of the row; padding follows the last.
    """

    lengths: tuple[int, ...]
    tokens_per_rank: int
    pieces: tuple[tuple[Piece, ...], ...]

    @property
    def ranks(self) -> int:
        return len(self.pieces)

    @property
    def cut_documents(self) -> tuple[int, ...]:
        """Documents that lie on more than one rank."""
        lengths = self.lengths
        cut = {p.document for own in self.pieces for p in own if p.tokens < lengths[p.document]}
        return tuple(sorted(cut))

    def padding(self, rank: int) -> int:
        """Tokens of padding on a rank."""
        return self.tokens_per_rank - sum(piece.tokens for piece in self.pieces[rank])

    def work(self) -> list[float]:
        """Attention work of each rank: its pairs of a query and a key, of causal attention."""
        return [sum(piece.work for piece in own) for own in self.pieces]

    def order(self, first_tokens: Sequence[int] | None = None) -> NDArray[np.int64]:
        """int64 `[T]`: the token of the row in each slot of rank 0, then of rank 1, and so on.

        Args:
            first_tokens: the index in the row of each document's first token; default: the
                documents follow one another.
        """
        total = self.ranks * self.tokens_per_rank
        starts = np.cumsum([0, *self.lengths])[:-1] if first_tokens is None else first_tokens
        is_padding = np.ones(total, bool)
        filled, slots = [], np.zeros(total, bool)
        for rank, own in enumerate(self.pieces):
            slot = rank * self.tokens_per_rank
            for document, start, stop in own:
                tokens = np.arange(starts[document] + start, starts[document] + stop)
                filled.append(tokens)
                is_padding[tokens] = False
            slots[slot : slot + self.tokens_per_rank - self.padding(rank)] = True
        order = np.empty(total, np.int64)
        order[slots] = np.concatenate([np.zeros(0, np.int64), *filled])
        order[~slots] = is_padding.nonzero()[0]
        return order

    def keys(self, rank: int, *, causal: bool = True) -> tuple[Piece, ...]:
        """The keys of each of a rank's pieces: its document up to its end, or all of it."""
        return tuple(
            Piece(document, 0, stop if causal else self.lengths[document])
            for document, _, stop in self.pieces[rank]
        )

    def needs(self, rank: int, *, causal: bool = True) -> tuple[Need, ...]:
        """What a rank needs of others, by rank, then in the order of the row."""
        end = {keys.document: keys.stop for keys in self.keys(rank, causal=causal)}  # the last wins
        cut = set(self.cut_documents)
        return tuple(
            Need(other, document, start, min(stop, end[document]))
            for other, own in enumerate(self.pieces)
            for document, start, stop in own
            if other != rank and document in cut and start < end.get(document, 0)
        )


def plan_row(
    lengths: Sequence[int], ranks: int, *, total_tokens: int, contiguous: bool = False
) -> RowPlan:
    """Plan which tokens of a row lie on which of P ranks.

    Each rank gets exactly T/P tokens; at most P - 1 documents are cut; each rank has about the same
    attention work; padding comes last on each.

    Args:
        lengths: tokens of each document.
        ranks: P.
        total_tokens: T, padding included; a multiple of P.
        contiguous: whether to cut the row as it is, for models whose state passes from token to
            token.

    Raises:
        ValueError: T is not a multiple of P, or less than the documents have.

    >>> plan_row([5, 3], 2, total_tokens=8).pieces
    ((Piece(document=0, start=0, stop=4),), (Piece(document=0, start=4, stop=5), \
Piece(document=1, start=0, stop=3)))
    """
    if ranks < 1 or total_tokens % ranks:
        raise ValueError(
            f"total_tokens must be a multiple of the {ranks} ranks, got {total_tokens}; pad "
            "the row."
        )
    if sum(lengths) > total_tokens:
        raise ValueError(
            f"total_tokens must be at least those of all documents, {sum(lengths)}, got "
            f"{total_tokens}; raise total_tokens."
        )
    lengths, capacity = tuple(lengths), total_tokens // ranks
    cut = _contiguous_pieces if contiguous else _even_pieces
    return RowPlan(lengths, capacity, cut(lengths, ranks, capacity))


def _contiguous_pieces(
    lengths: tuple[int, ...], ranks: int, capacity: int
) -> tuple[tuple[Piece, ...], ...]:
    pieces: list[list[Piece]] = [[] for _ in range(ranks)]
    begin = 0
    for document, length in enumerate(lengths):
        start = 0
        while start < length:
            rank, offset = divmod(begin + start, capacity)
            stop = min(length, start + capacity - offset)
            pieces[rank].append(Piece(document, start, stop))
            start = stop
        begin += length
    return tuple(map(tuple, pieces))


def _even_pieces(
    lengths: tuple[int, ...], ranks: int, capacity: int
) -> tuple[tuple[Piece, ...], ...]:
    filling = _Filling(lengths, capacity)
    pieces = [filling.next_rank(left) for left in range(ranks, 0, -1)]
    return tuple(tuple(sorted(own)) for own in pieces)


@dataclass
class _Cut:
    """What no rank has yet of a document: tokens 0 to `head` and `tail` to `length`."""

    document: int
    head: int
    tail: int
    length: int

    def pieces(self) -> list[Piece]:
        ends = (0, self.head), (self.tail, self.length)
        return [Piece(self.document, start, stop) for start, stop in ends if start < stop]

    @property
    def tokens(self) -> int:
        return self.head + self.length - self.tail

    def works(self, tokens: int) -> tuple[float, float]:
        """The least and the most work of so many tokens on both sides of the gap."""
        if self.head == self.length:  # a whole document: the gap may be anywhere
            return tokens**2 / 2, tokens * (self.length - tokens / 2)
        most, least = max(0, tokens - self.length + self.tail), min(tokens, self.head)
        return self._work(tokens, least), self._work(tokens, most)

    def _work(self, tokens: int, before: int) -> float:
        after = tokens - before
        return before * (self.head - before / 2) + after * (self.tail + after / 2)

    def take(self, tokens: int, work: float) -> list[Piece]:
        """So many tokens on both sides of the gap, of about this work."""
        if self.head == self.length:  # a whole document: the gap may be anywhere
            start = min(max(round(work / max(tokens, 1) - tokens / 2), 0), self.length - tokens)
            self.head = self.tail = start
        slope = self.tail - self.head + tokens  # so much less work has a token of the head
        before = round((self._work(tokens, 0) - work) / slope) if slope else 0
        before = min(max(before, tokens - self.length + self.tail, 0), tokens, self.head)
        after = tokens - before
        taken = [(self.head - before, self.head), (self.tail, self.tail + after)]
        self.head, self.tail = self.head - before, self.tail + after
        return [Piece(self.document, start, stop) for start, stop in taken if start < stop]


class _Filling:
    """Ranks that are filled one after another from the documents that are left.

    Attributes:
        lengths: of the whole documents that are left, ascending.
        documents: their indices.
        cut: what is left of a document that is cut, or None.
        tokens, work: of all that is left.
        room: tokens that the rank should still take.
        spare: tokens of its room that may stay empty.
        share: work that it should still take.
        tolerance: of its work.
        pieces: that it has.
    """

    def __init__(self, lengths: tuple[int, ...], capacity: int) -> None:
        by_length = sorted((n, document) for document, n in enumerate(lengths) if n)
        self.lengths = [n for n, _ in by_length]
        self.documents = [document for _, document in by_length]
        self.cut: _Cut | None = None
        self.capacity = capacity
        self.tokens = sum(self.lengths)
        self.work = sum(n * n for n in self.lengths) / 2

    def next_rank(self, ranks: int) -> list[Piece]:
        """The pieces of the first of so many ranks that have none."""
        self.pieces: list[Piece] = []
        self.room = -(-self.tokens // ranks)
        self.share = self.work / ranks
        self.spare = self.room - max(0, self.tokens - (ranks - 1) * self.capacity)
        self.tolerance = EVEN / 2 * self.share
        if self.cut is not None and (ranks == 1 or self._fits(self.cut.pieces())):
            self._note(self.cut.pieces())
            self.cut = None
        if ranks == 1:
            while self.lengths:
                self._take(-1)
            return self.pieces
        if self.cut is None and self.lengths and not self._fits([Piece(0, 0, self.lengths[-1])]):
            self._open(-1)
        if self.cut is None:
            if self.lengths:
                self._take(-1)
            self._take_like_what_is_left()
        else:
            self._take_of_cut()
        while self.lengths and (
            self.room > self.spare or self.share > self.tolerance > 0 < self.room
        ):
            self._open(self._to_cut())
            self._take_of_cut()
        return self.pieces

    def _fits(self, pieces: list[Piece]) -> bool:
        tokens, work = sum(x.tokens for x in pieces), sum(x.work for x in pieces)
        return tokens <= self.room and work <= self.share + self.tolerance

    def _note(self, pieces: list[Piece]) -> None:
        tokens, work = sum(x.tokens for x in pieces), sum(x.work for x in pieces)
        self.pieces += pieces
        self.room, self.share = self.room - tokens, self.share - work
        self.tokens, self.work = self.tokens - tokens, self.work - work

    def _take(self, index: int) -> None:
        """The whole document at an index of `lengths`."""
        self._note([Piece(self.documents.pop(index), 0, self.lengths.pop(index))])

    def _open(self, index: int) -> None:
        length = self.lengths.pop(index)
        self.cut = _Cut(self.documents.pop(index), length, length, length)

    def _take_like_what_is_left(self) -> None:
        """Whole documents whose work per token, n/2, is what the rank needs on average."""
        while (
            self.lengths and self.room > 0 and (wanted := 2 * self.share / self.room) <= self.room
        ):
            index = min(bisect_left(self.lengths, wanted), len(self.lengths) - 1)
            if index and wanted - self.lengths[index - 1] < self.lengths[index] - wanted:
                index -= 1
            if self.lengths[index] > self.room:
                break
            self._take(index)
        index = bisect_right(self.lengths, self.room) - 1
        if index >= 0:
            length = self.lengths[index]
            if (
                length >= self.room - self.spare
                and abs(length**2 / 2 - self.share) <= self.tolerance
            ):
                self._take(index)

    def _to_cut(self) -> int:
        """The shortest document of which the rank can take the tokens and work that it needs."""
        wanted = max(self.share / max(self.room, 1) + self.room / 2, self.room)
        return min(bisect_left(self.lengths, wanted), len(self.lengths) - 1)

    def _take_of_cut(self) -> None:
        """Of the cut document, with whole documents until that comes out even."""
        assert self.cut is not None
        while self.lengths and self.room > 0:
            if self.cut.tokens < self.room:
                heavier = False
            else:
                least, most = self.cut.works(self.room)
                if least - self.tolerance <= self.share <= most + self.tolerance:
                    break
                heavier = self.share > most
            index = bisect_right(self.lengths, self.room) - 1 if heavier else 0
            if index < 0 or self.lengths[index] > self.room:
                break
            self._take(index)
        self._note(self.cut.take(min(self.room, self.cut.tokens), self.share))
        if not self.cut.tokens:
            self.cut = None
