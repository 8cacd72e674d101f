"""Keys and values of cut documents, exchanged between the ranks of a row.

Each rank holds runs of documents (pieces). The queries of a piece need the keys of its document
before the piece, too: the ranks that hold these send them, and get their gradients back. A document
that lies whole on a rank needs nothing, and where none of the row is cut nothing is sent.

All tables are integers on the host, as pieces are runs of tokens; `gather_keys.py` reads them.

Shapes: P = ranks, C = tokens of a rank, R = tokens received, Tk = rows of keys, Hkv = num_kv_heads,
D = head_dim. A slot is an index into the C own tokens followed by the R received ones.

Imports: torch. Never transformers.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexvarlen.layout.boundaries import round_up_to_power_of_two
from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.parallel.pieces import Pieces


@dataclass(frozen=True)
class KeyExchange:
    """What one rank sends, receives and attends to, of a row in which a document is cut.

    Attributes:
        layout_k: the keys of each of the rank's pieces, on the device of the tokens: those of its
            document up to the piece's end, or if attention is bidirectional all of them, or those
            that a window reaches.
        runs: int64 `[N, 3]` on the host, (slot, row, tokens): where the rows of keys come from.
        sends: int64 `[M, 3]` on the host, (slot, destination, tokens), by destination.
        received: int64 `[P]` on the host, the tokens received from each rank.
    """

    layout_k: PackedLayout
    runs: Tensor
    sends: Tensor
    received: Tensor

    @classmethod
    def of(
        cls,
        pieces: Pieces,
        tokens_per_rank: int,
        rank: int,
        *,
        capacity: int,
        causal: bool = True,
        reach: int | None = None,
    ) -> KeyExchange | None:
        """The exchange of one rank; None, on every rank, if no document of the row is cut.

        Args:
            pieces: of all ranks.
            tokens_per_rank: C.
            rank: whose exchange.
            capacity: slots of the layout of the rank's own pieces.
            causal: whether queries see no later keys.
            reach: how many tokens a window that is not causal reaches on each side; None: all.

        The shapes of its tensors are the same on all ranks, and rounded up, so that a compiled
        model meets few of them.
        """
        documents = _by_document(pieces)
        if all(len(places) == 1 for places in documents.values()):
            return None
        keys = [
            [_keys_of(piece, documents, causal=causal, reach=reach) for piece in own]
            for own in pieces
        ]
        needed = [_needed(of_rank, other) for other, of_rank in enumerate(keys)]
        lengths = [[sum(place.tokens for place in each) for each in own] for own in keys]
        rows = [sum(each) for each in lengths]
        if reach is not None:  # the rank's own padding follows, as queries
            rows = [n + _padding(own, tokens_per_rank) for n, own in zip(rows, pieces, strict=True)]
        layout_k = PackedLayout.from_lengths(
            lengths[rank],
            total_tokens=_in_quarters(max(rows), tokens_per_rank),
            capacity=capacity,
            max_seqlen_bound=round_up_to_power_of_two(max(n for own in lengths for n in own)),
        )
        senders = [place.rank for places in needed for place in places]
        sends = [
            (place.slot, other, place.tokens)
            for other, places in enumerate(needed)
            for place in places
            if place.rank == rank
        ]
        received = [0] * len(pieces)
        for place in needed[rank]:
            received[place.rank] += place.tokens
        return cls(
            layout_k,
            runs=_table(
                _runs(keys[rank], needed[rank], rank, tokens_per_rank),
                at_least=1 + max(sum(map(len, own)) for own in keys),
            ),
            sends=_table(sends, at_least=max(Counter(senders).values(), default=1)),
            received=_on_host(received),
        )

    def moved(self, move: Callable[[Tensor], Tensor]) -> KeyExchange:
        """The same with `move` of the tensors of `layout_k`; the tables stay on the host."""
        return replace(self, layout_k=self.layout_k.moved(move))


# ---- the tables ----


class _HeldPiece(NamedTuple):
    """A piece of a document, the rank that holds it, and its first token there."""

    document: int
    start: int
    stop: int
    rank: int
    slot: int

    @property
    def tokens(self) -> int:
        return self.stop - self.start


def _by_document(pieces: Pieces) -> dict[int, list[_HeldPiece]]:
    """The pieces of each document, in its order."""
    found: dict[int, list[_HeldPiece]] = defaultdict(list)
    for rank, own in enumerate(pieces):
        slot = 0
        for document, start, stop in own:
            found[document].append(_HeldPiece(document, start, stop, rank, slot))
            slot += stop - start
    for places in found.values():
        places.sort()
    return found


def _keys_of(
    piece: tuple[int, int, int],
    documents: dict[int, list[_HeldPiece]],
    *,
    causal: bool,
    reach: int | None,
) -> list[_HeldPiece]:
    """What a piece attends to of the pieces of its document; see `KeyExchange.of`."""
    document, start, stop = piece
    if causal or reach is None:
        return [place for place in documents[document] if place.stop <= stop or not causal]
    return [
        place._replace(
            start=max(place.start, start - reach),
            stop=min(place.stop, stop + reach),
            slot=place.slot + max(0, start - reach - place.start),
        )
        for place in documents[document]
        if place.start < stop + reach and start - reach < place.stop
    ]


def _padding(own: Sequence[tuple[int, int, int]], tokens_per_rank: int) -> int:
    return tokens_per_rank - sum(stop - start for _, start, stop in own)


def _needed(keys: list[list[_HeldPiece]], rank: int) -> list[_HeldPiece]:
    """What a rank receives, once each, by the rank that sends it."""
    others = {place for places in keys for place in places if place.rank != rank}
    return sorted(others, key=lambda place: (place.rank, place.slot))


def _runs(
    keys: list[list[_HeldPiece]], needed: list[_HeldPiece], rank: int, tokens: int
) -> list[tuple[int, int, int]]:
    """(slot, row, tokens) of the rows of keys; neighbours, as whole documents are, are one run."""
    arrivals, arrived = {}, tokens
    for place in needed:
        arrivals[place] = arrived
        arrived += place.tokens
    found = [(0, 0, 0)]
    for place in (place for places in keys for place in places):
        slot = place.slot if place.rank == rank else arrivals[place]
        start, row, length = found[-1]
        if start + length == slot != tokens:  # and not the first of those received
            found[-1] = start, row, length + place.tokens
        else:
            found.append((slot, row + length, place.tokens))
    return found


def _in_quarters(rows: int, tokens: int) -> int:
    """Rows rounded up to quarters of a rank's tokens."""
    quarter = -(-tokens // 4)
    return -(-rows // quarter) * quarter


def _table(rows: Sequence[tuple[int, int, int]], *, at_least: int) -> Tensor:
    """int64 `[N, 3]`, N a power of two; runs without tokens at the end."""
    size = round_up_to_power_of_two(max(len(rows), at_least))
    return _on_host([*rows, *[(0, 0, 0)] * (size - len(rows))])


def _on_host(values: Sequence[Any]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device="cpu")
