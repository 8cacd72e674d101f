"""`Piece`, and the two simple plans: the row cut as it is, and the longest documents first.

Attention work is counted in pairs of a query and a key.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush, heapreplace
from typing import NamedTuple


class Piece(NamedTuple):
    """Tokens `start:stop` of the document with index `document`."""

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
"""The pieces of each rank, in the order of its tokens."""


def attention_work(
    pieces: Sequence[Sequence[Piece]], lengths: tuple[int, ...], *, causal: bool
) -> list[float]:
    """The attention work of each rank, in pairs of a query and a key.

    Pairs of bidirectional attention count half, so that a whole document has the same work.
    """

    def work_of(piece: Piece) -> float:
        return piece.work if causal else piece.tokens * lengths[piece.document] / 2

    return [sum(map(work_of, own)) for own in pieces]


def contiguous_pieces(lengths: tuple[int, ...], ranks: int, tokens_per_rank: int) -> Pieces:
    """Each rank the next `tokens_per_rank` tokens of the row as it is."""
    pieces: list[list[Piece]] = [[] for _ in range(ranks)]
    _fill(pieces, tokens_per_rank, enumerate(lengths))
    return tuple(map(tuple, pieces))


def longest_first(lengths: tuple[int, ...], ranks: int, tokens_per_rank: int) -> list[list[Piece]]:
    """The longest first, each whole to the rank with the least work among those that have room.

    Those that fit nowhere, fewer than P of the shortest, are cut to fill what is left of the ranks.
    """
    documents = sorted(((n, document) for document, n in enumerate(lengths) if n), reverse=True)
    pieces: list[list[Piece]] = [[] for _ in range(ranks)]
    by_work = [(0.0, tokens_per_rank, rank) for rank in range(ranks)]  # a heap
    by_room: list[tuple[int, float, int]] = []  # a heap of the others: too full for this length
    rest = []
    for length, document in documents:
        while by_room and -by_room[0][0] >= length:
            room, work, rank = heappop(by_room)
            heappush(by_work, (work, -room, rank))
        while by_work and by_work[0][1] < length:
            work, room, rank = heappop(by_work)
            heappush(by_room, (-room, work, rank))
        if by_work:
            work, room, rank = by_work[0]
            heapreplace(by_work, (work + length**2 / 2, room - length, rank))
            pieces[rank].append(Piece(document, 0, length))
        else:
            rest.append((document, length))
    _fill(pieces, tokens_per_rank, rest)
    return pieces


def _fill(
    pieces: list[list[Piece]], tokens_per_rank: int, documents: Iterable[tuple[int, int]]
) -> None:
    """Lay documents (number, length) one after another into what is left of the ranks."""
    ranks = ((own, tokens_per_rank - sum(piece.tokens for piece in own)) for own in pieces)
    own, room = next(ranks)
    for document, length in documents:
        start = 0
        while start < length:
            while not room:
                own, room = next(ranks)
            stop = min(length, start + room)
            own.append(Piece(document, start, stop))
            start, room = stop, room - (stop - start)
