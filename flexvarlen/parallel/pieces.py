"""Pieces of documents: the row as it is, and documents whole, by their lengths alone.

Attention work is counted in pairs of a query and a key, of causal attention.
"""

from __future__ import annotations

from heapq import heappop, heappush, heapreplace
from typing import NamedTuple


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
        return (self.stop**2 - self.start**2) / 2


Pieces = tuple[tuple[Piece, ...], ...]
"""Of each rank, in the order of its tokens."""


def contiguous_pieces(lengths: tuple[int, ...], ranks: int, capacity: int) -> Pieces:
    """Each rank the next `capacity` tokens of the row as it is."""
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


def whole_documents(
    lengths: tuple[int, ...], ranks: int, capacity: int, most_work: float
) -> Pieces | None:
    """The longest first, each to the rank that has the least work and room; None if one has none.

    Args:
        lengths, ranks, capacity: as in `even_pieces`.
        most_work: of a rank.
    """
    longest_first = sorted(((n, document) for document, n in enumerate(lengths) if n), reverse=True)
    if longest_first and (longest_first[0][0] ** 2 / 2 > most_work):
        return None
    pieces: list[list[Piece]] = [[] for _ in range(ranks)]
    by_work = [(0.0, rank, capacity) for rank in range(ranks)]  # a heap
    for length, document in longest_first:
        full = []
        while by_work and by_work[0][2] < length:
            full.append(heappop(by_work))
        if not by_work or by_work[0][0] + length**2 / 2 > most_work:
            return None
        work, rank, room = by_work[0]
        pieces[rank].append(Piece(document, 0, length))
        heapreplace(by_work, (work + length**2 / 2, rank, room - length))
        for each in full:
            heappush(by_work, each)
    return tuple(tuple(sorted(own)) for own in pieces)
