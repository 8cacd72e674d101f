"""Documents that are cut so that each rank has as many tokens, and about as much attention work.

Ranks are filled one after another, each with its share of the tokens and of the attention work that
are left. A rank takes whole documents, and of one that is cut some of its first and of its last
tokens: the first attend to few keys, the last to many, so tokens and work both come out as wanted.
The middle goes to later ranks in the same way. So each rank cuts at most one document anew.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass

from flexvarlen.parallel.pieces import Piece, Pieces, whole_documents

EVEN = 0.05
"""How much more attention work than the mean a rank may have where that avoids a cut."""

SETTINGS = ((0.025, 1.0), (-0.2, 1.2), (0.025, 0.6), (-0.1, 0.8), (-0.4, 1.2))
"""(slack, mix) of `_Filling`, tried in turn until the work is even: of 30 such, those that together
left the fewest uneven rows of log-normal lengths, on 2 to 64 ranks."""


def even_pieces(lengths: tuple[int, ...], ranks: int, capacity: int) -> Pieces:
    """Each rank at most `capacity` tokens, with as even attention work as is found.

    Whole documents come first, so that what no other rank needs is one run.
    """
    even = (1 + EVEN) * sum(n * n for n in lengths) / 2 / ranks
    whole = whole_documents(lengths, ranks, capacity, even)
    if whole is not None:
        return whole

    def whole_first(piece: Piece) -> tuple[bool, Piece]:
        return piece.tokens < lengths[piece.document], piece

    most, best = float("inf"), Pieces()
    for slack, mix in SETTINGS:
        filling = _Filling(lengths, ranks, capacity, slack, mix)
        filled = [filling.next_rank(left) for left in range(ranks, 0, -1)]
        pieces = tuple(tuple(sorted(own, key=whole_first)) for own in filled)
        heaviest = max(sum(piece.work for piece in own) for own in pieces)
        if heaviest < most:
            most, best = heaviest, pieces
        if most <= even:
            break
    return best


@dataclass
class _Cut:
    """What no rank has yet of a document that is cut: tokens `low` to `high`."""

    document: int
    low: int
    high: int

    @property
    def tokens(self) -> int:
        return self.high - self.low

    @property
    def density(self) -> float:
        """Work per token."""
        return (self.low + self.high) / 2

    def works(self, tokens: int) -> tuple[float, float]:
        """The work of its first `tokens`, and of its last."""
        return tokens * (self.low + tokens / 2), tokens * (self.high - tokens / 2)

    def misses(self, tokens: int, work: float) -> float:
        """How far the work of `tokens` of it is from `work`, at best."""
        least, most = self.works(tokens)
        return max(least - work, work - most, 0)

    def take(self, tokens: int, work: float) -> list[Piece]:
        """Some of its first tokens and some of its last, together of about this work."""
        least, most = self.works(tokens)
        first = round((most - work) / (most - least) * tokens) if most > least else tokens
        first = min(max(first, 0), tokens)
        ends = (self.low, self.low + first), (self.high - tokens + first, self.high)
        self.low, self.high = ends[0][1], ends[1][0]
        return [Piece(self.document, start, stop) for start, stop in ends if start < stop]


class _Filling:
    """Fills ranks, one after another, from the documents that are left.

    Args:
        lengths: of the documents.
        ranks: how many there are.
        capacity: tokens of a rank.
        slack: by how much of a rank's work whole documents may exceed it; below 0, how much they
            leave to a document that is cut.
        mix: the work per token that a rank takes of a cut document, relative to what is left of it.

    Attributes:
        lengths, documents: the whole documents that are left, the shortest first.
        heavy: what is left of a document that is cut, or None.
        light: the same of a second one, with less work per token. Only if all documents are long.
        tokens, work: of all that is left.
        room, share: tokens and work that the rank should still take.
        spare: tokens of its room that may stay empty.
        taken: its pieces.
    """

    def __init__(
        self, lengths: tuple[int, ...], ranks: int, capacity: int, slack: float, mix: float
    ) -> None:
        by_length = sorted((n, document) for document, n in enumerate(lengths) if n)
        self.lengths = [n for n, _ in by_length]
        self.documents = [document for _, document in by_length]
        self.heavy: _Cut | None = None
        self.light: _Cut | None = None
        self.capacity, self.cuts_left = capacity, ranks - 1
        self.slack, self.mix = slack, mix
        self.tokens = sum(self.lengths)
        self.work = sum(n * n for n in self.lengths) / 2

    def next_rank(self, ranks: int) -> list[Piece]:
        """The pieces of a rank, the first of `ranks` that have none yet."""
        self.taken: list[Piece] = []
        self.ranks = ranks
        self.room = -(-self.tokens // ranks)
        self.share = self.work / ranks
        self.spare = self.room - max(0, self.tokens - (ranks - 1) * self.capacity)
        self.tolerance, self.excess = EVEN / 2 * self.share, self.slack * self.share
        self._take_rests()
        if ranks == 1:
            while self.lengths:
                self._take_whole(-1)
        elif self.heavy is None and self.lengths:
            if self._fits(Piece(0, 0, self.lengths[-1])):
                self._take_whole(-1)
                self._take_average()
            else:
                self.heavy = self._cut(-1)
        while self.tokens and self._is_short():
            self._take_of_heavy()
        return self.taken

    def _is_short(self) -> bool:
        return self.room > self.spare or (self.room > 0 and self.share > self.tolerance)

    def _note(self, pieces: list[Piece]) -> None:
        """Pieces that the rank takes."""
        tokens, work = sum(x.tokens for x in pieces), sum(x.work for x in pieces)
        self.taken += pieces
        self.room, self.share = self.room - tokens, self.share - work
        self.tokens, self.work = self.tokens - tokens, self.work - work

    # ---- whole documents ----

    def _take_whole(self, index: int) -> None:
        """The document at an index of `lengths`."""
        self._note([Piece(self.documents.pop(index), 0, self.lengths.pop(index))])

    def _fits(self, piece: Piece) -> bool:
        """Whether the rank can take a piece: the shortest documents then fill it without excess."""
        room = self.room - piece.tokens
        share = self.share + self.excess - piece.work
        least = max(0, room - self.spare)
        for length in self.lengths:
            if least <= 0 or share < 0:
                break
            length = min(length, least)
            least, share = least - length, share - length**2 / 2
        return room >= 0 and share >= 0

    def _take_average(self) -> None:
        """Documents whose work per token, n/2, is what the rank needs on average."""
        while self.lengths and self.room > 0:
            wanted = 2 * self.share / self.room
            index = min(bisect_left(self.lengths, wanted), len(self.lengths) - 1)
            if index and wanted - self.lengths[index - 1] < self.lengths[index] - wanted:
                index -= 1
            if max(wanted, self.lengths[index]) > self.room:
                break
            self._take_whole(index)
        index = bisect_right(self.lengths, self.room) - 1
        if index >= 0:
            length = self.lengths[index]
            fills = length >= self.room - self.spare
            if fills and abs(length**2 / 2 - self.share) <= self.tolerance:
                self._take_whole(index)

    # ---- documents that are cut ----

    def _take_rests(self) -> None:
        """What is left of cut documents, if it fits."""
        for cut in (self.light, self.heavy):
            if cut is not None:
                rest = Piece(cut.document, cut.low, cut.high)
                if self.ranks == 1 or self._fits(rest):
                    self._take_of(cut, cut.tokens, rest.work)

    def _take_of(self, cut: _Cut, tokens: int, work: float) -> None:
        self._note(cut.take(tokens, work))
        if not cut.tokens:
            self.heavy = None if cut is self.heavy else self.heavy
            self.light = None if cut is self.light else self.light

    def _cut(self, index: int) -> _Cut:
        """Cut the document at an index of `lengths`."""
        length = self.lengths.pop(index)
        self.cuts_left -= 1
        return _Cut(self.documents.pop(index), 0, length)

    def _to_cut(self) -> int:
        """The index of the shortest document that has the missing tokens and work."""
        wanted = max(self.share / max(self.room, 1) + self.room / 2, self.room)
        return min(bisect_left(self.lengths, wanted), len(self.lengths) - 1)

    def _take_of_heavy(self) -> None:
        """Of a document that is cut, beside short ones that let its share come out even."""
        if self.heavy is None and self.lengths:
            self.heavy = self._cut(self._to_cut())
        elif self.heavy is None:
            self.heavy, self.light = self.light, None
        heavy = self.heavy
        assert heavy is not None  # tokens are left
        wanted = self.mix * heavy.density
        while self.lengths and self.lengths[0] <= self.room:
            shortest = self.lengths[0]
            if heavy.tokens >= self.room:
                now = heavy.misses(self.room, self.share)
                then = heavy.misses(self.room - shortest, self.share - shortest**2 / 2)
                if self.share >= wanted * self.room or then > now or self.room == shortest:
                    break
            self._take_whole(0)
        self._take_of_light(heavy)
        self._take_of(heavy, min(self.room, heavy.tokens), self.share)

    def _take_of_light(self, heavy: _Cut) -> None:
        """Where the cut document alone is too heavy, and others are too long: some of another."""
        while self.room > 0:
            least, _ = heavy.works(self.room)
            if self.share + self.excess >= least and heavy.tokens >= self.room:
                return
            if self.light is None and self._may_cut_another():
                self.light = self._cut(0)
            light = self.light
            if light is None or light.density >= heavy.density:
                return
            tokens = round(
                (heavy.density * self.room - self.share) / (heavy.density - light.density)
            )
            tokens = min(max(tokens, self.room - heavy.tokens), light.tokens, self.room)
            if tokens <= 0:
                return
            most = self.share - heavy.works(self.room - tokens)[0]
            self._take_of(light, tokens, min(tokens * light.density, most))
            if self.light is not None:
                return

    def _may_cut_another(self) -> bool:
        """Whether later ranks do not need all cuts. Documents longer than a rank are cut anyway."""
        needed = min(self.ranks - 2, len(self.lengths) - 1)
        return bool(self.lengths) and (self.lengths[0] > self.capacity or self.cuts_left > needed)
