"""Balance documents over ranks: whole if the work is even then, else split so that it is.

Attention work of a document of n tokens is n/2 a token. Documents that have less than the row's
average wait in one queue, those that have more in another. Each rank takes x tokens of the first
queue and the rest of the second. More of the first is less work, so bisection finds the x whose
work is the mean.

    light   [..][...][.....]..             x tokens, the shortest documents first
    heavy   [...............][.......]     C - x tokens, the longest documents first

Of the document in which a rank stops, it takes some of the first tokens and some of the last. The
first attend to few keys and the last to many, so it can take the work that it needs, and what is
left, which the next rank takes first, has about the same work a token as the whole document. If
attention is bidirectional all tokens attend to n keys (counted half), and it takes the first ones.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import accumulate

from flexvarlen.parallel.pieces import Piece, Pieces, attention_work, longest_first

EVEN = 0.05
"""The longest documents go first if then no rank has more work than the mean by this fraction."""

LINEAR_WORK = 8192
"""Work of a token in the linear layers, in pairs of a query and a key.

By FLOPs it is 12K for Qwen3-1.7B (2 x parameters of a layer / (4 x num_heads x head_dim)); kernels
of attention reach fewer FLOP/s than those of linear layers.
"""


def even_pieces(
    lengths: tuple[int, ...], ranks: int, tokens_per_rank: int, *, causal: bool = True
) -> Pieces:
    """Give each rank at most `tokens_per_rank` tokens, and about as much work.

    Whole documents come first, so that what no other rank needs is one run.
    """
    fit = max(lengths, default=0) <= tokens_per_rank
    pieces = longest_first(lengths, ranks, tokens_per_rank) if fit else []
    if not fit or not _are_even(attention_work(pieces, lengths, causal=causal), tokens_per_rank):
        pieces = _cut_documents(lengths, ranks, tokens_per_rank, causal=causal)

    def whole_first(piece: Piece) -> tuple[bool, Piece]:
        return piece.tokens < lengths[piece.document], piece

    return tuple(tuple(sorted(own, key=whole_first)) for own in pieces)


def _are_even(work: list[float], tokens_per_rank: int) -> bool:
    mean = sum(work) / len(work)
    return max(work) - mean <= EVEN * (mean + LINEAR_WORK * tokens_per_rank)


def _cut_documents(
    lengths: tuple[int, ...], ranks: int, tokens_per_rank: int, *, causal: bool
) -> list[list[Piece]]:
    """Fill one rank after another from the two queues, with at most one cut a rank on average."""
    by_length = sorted((n, document) for document, n in enumerate(lengths) if n)
    average = sum(n * n for n in lengths) / sum(lengths)
    split = bisect_left(by_length, (average,))
    light = _Queue(by_length[:split], tokens_per_rank, causal=causal)
    heavy = _Queue(by_length[split:][::-1], tokens_per_rank, causal=causal)
    pieces, cuts = [], 0
    for rank in range(ranks):
        tokens = -(-(light.tokens + heavy.tokens) // (ranks - rank))
        share = (light.work + heavy.work) / (ranks - rank)
        a, b = _stops(light, heavy, tokens, share, most_cuts=rank + 1 - cuts)
        cuts += a.cuts + b.cuts
        before = light.work
        of_light = light.take(a, share - b.work)
        pieces.append(of_light + heavy.take(b, share - (before - light.work)))
    return pieces


def _stops(
    light: _Queue, heavy: _Queue, tokens: int, share: float, most_cuts: int
) -> tuple[_Stop, _Stop]:
    """Where a rank that takes `tokens` tokens and `share` work stops in each queue.

    Either where the work is even, or near it at the end of a document, without a cut in its queue:
    where its work can be closest to the share, and then with the fewest cuts.
    """

    def stops(x: int) -> tuple[_Stop, _Stop]:
        return light.stop(x), heavy.stop(tokens - x)

    def is_enough(x: int) -> bool:
        a, b = stops(x)
        return a.work + b.work <= share

    def order(x: int) -> tuple[bool, float, int]:
        a, b = stops(x)
        misses = max(abs(a.work + b.work - share) - a.slack - b.slack, 0)
        return a.cuts + b.cuts > most_cuts, misses, a.cuts + b.cuts

    fewest, most = max(0, tokens - heavy.tokens), min(tokens, light.tokens)
    x = fewest + bisect_left(range(fewest, most), True, key=is_enough)
    a, b = stops(x)
    near = (x, *a.ends_of_documents, *(tokens - y for y in b.ends_of_documents))
    return stops(min((min(max(x, fewest), most) for x in near), key=order))


@dataclass(frozen=True)
class _Stop:
    """Where a rank stops in a queue: it takes all before a document, and some tokens of it.

    Attributes:
        tokens: that the rank takes, and of these,
        inside: of the document.
        at, low, high: tokens `low` to `high` of this document were in the queue.
        cuts: 1 if no other rank has tokens of the document, and it is not longer than a rank.
        work: of what the rank takes, if the tokens inside have as much each as all that were there.
        slack: how much less work it is if they are the first, and how much more if the last.
    """

    tokens: int
    inside: int
    at: int
    low: int
    high: int
    cuts: int
    work: float
    slack: float

    @property
    def ends_of_documents(self) -> tuple[int, int]:
        """The tokens that a rank takes which stops before the document, or after it."""
        before = self.tokens - self.inside
        return before, before + self.high - self.low


class _Queue:
    """Documents that ranks take in this order.

    Args:
        documents: length and number of each.
        tokens_per_rank: a document of more is cut whatever the plan.
        causal: whether attention is causal.

    Attributes:
        tokens, work: of what is left.
        at, low, high: tokens `low` to `high` of this document are left, and all documents after it.
    """

    def __init__(
        self, documents: list[tuple[int, int]], tokens_per_rank: int, *, causal: bool
    ) -> None:
        self.documents = [*documents, (0, -1)]  # the last stands for the end
        self.tokens_per_rank, self.causal = tokens_per_rank, causal
        self.tokens_until = [0, *accumulate(n for n, _ in documents)]
        self.work_until = [0, *accumulate(n * n / 2 for n, _ in documents)]
        self.tokens, self.work = self.tokens_until[-1], self.work_until[-1]
        self.at, self.low, self.high = 0, 0, self.documents[0][0]

    def stop(self, tokens: int) -> _Stop:
        """Where the first `tokens` of what is left end."""
        end = self.tokens_until[-1] - self.tokens + tokens
        at = bisect_right(self.tokens_until, end) - 1
        if at == self.at:
            before, inside, low, high = 0.0, tokens, self.low, self.high
        else:
            before = self.work_until[at] - (self.work_until[-1] - self.work)
            inside, low, high = end - self.tokens_until[at], 0, self.documents[at][0]
        length = self.documents[at][0]
        cuts = inside > 0 and high - low == length <= self.tokens_per_rank
        work = before + inside * (low + high if self.causal else length) / 2
        slack = inside * (high - low - inside) / 2 if self.causal else 0.0
        return _Stop(tokens, inside, at, low, high, int(cuts), work, slack)

    def take(self, stop: _Stop, work: float) -> list[Piece]:
        """All until a stop, of about this work."""
        pieces = []
        if stop.at > self.at:
            pieces = [Piece(self.documents[self.at][1], self.low, self.high)]
            pieces += [Piece(d, 0, n) for n, d in self.documents[self.at + 1 : stop.at]]
        first, taken = stop.inside, stop.work
        if stop.slack:  # the fewer of the first, the more work, evenly
            more = min(max((work - stop.work) / stop.slack, -1), 1)
            first = round(stop.inside * (1 - more) / 2)
            taken += stop.slack * (1 - 2 * first / stop.inside)
        self.at, self.low, self.high = stop.at, stop.low + first, stop.high - stop.inside + first
        self.tokens, self.work = self.tokens - stop.tokens, self.work - taken
        document = self.documents[stop.at][1]
        ends = Piece(document, stop.low, self.low), Piece(document, self.high, stop.high)
        return pieces + [piece for piece in ends if piece.tokens]
