"""Keys and values of cut documents, exchanged between the ranks of a row.

Each rank holds runs of documents (pieces). The queries of a piece need the keys of its document
before the piece, too, or if attention is bidirectional all of them, or those that a window reaches:
the ranks that hold these send them, and get their gradients back. A document that lies whole on a
rank needs nothing, and where none of the row is cut nothing is sent.

With `layout_k` a document's last query is aligned with its last key, so keys after it cannot be
given. So where a window reaches later keys, each query is put at the index of its own key: a piece
with the tokens that its window reaches is then one document.

All tables are integers on the host, as pieces are runs of tokens; `gather_keys.py` reads them.

Shapes: P = ranks, C = tokens of a rank, R = tokens received, Tk = gathered keys,
Hkv = num_kv_heads, D = head_dim. Token indices count the C own tokens, then the R received ones.

Imports: torch. Never transformers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexvarlen.layout.boundaries import round_up_to_power_of_two
from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.parallel.pieces import Piece, Pieces
from flexvarlen.parallel.plan import RowPlan


@dataclass(frozen=True)
class KeyExchange:
    """What one rank sends, receives and attends to, of a row in which a document is cut.

    Attributes:
        layout_k: the keys that each of the rank's pieces needs, on the device of the tokens.
        runs: int64 `[N, 4]` on the host, (token, rank, tokens, key): where the gathered keys come
            from, own ones first, then by rank. The first begins at token 0 and key 0, and may be
            empty.
        sends: int64 `[M, 3]` on the host, (token, rank, tokens), by rank: whose keys go there.
        received: int64 `[P]` on the host, the tokens whose keys come from each rank.
        returns: int64 `[L, 3]` on the host, (token, rank, tokens), by rank: whose gradients come
            back, once for each piece there that attends to them.
        own_keys: int64 `[C]`, on the device of the tokens: the key of each of the rank's tokens,
            where its query is put, too; None where queries stay as they are.
    """

    layout_k: PackedLayout
    runs: Tensor
    sends: Tensor
    received: Tensor
    returns: Tensor
    own_keys: Tensor | None = None

    @classmethod
    def of(
        cls, plan: RowPlan, rank: int, *, capacity: int, window: int | None = None
    ) -> KeyExchange | None:
        """The exchange of one rank; None, on every rank, if no document of the row is cut.

        Args:
            plan: of the row.
            rank: whose exchange.
            capacity: slots of the layout of the rank's own pieces.
            window: a query sees the keys less than this many tokens away; None: all.

        The shapes of its tensors are the same on all ranks, and rounded up, so that a compiled
        model meets few of them.
        """
        pieces, tokens_per_rank = plan.pieces, plan.tokens_per_rank
        documents = _by_document(pieces)
        if all(len(parts) == 1 for parts in documents.values()):
            return None
        two_sided = window is not None and not plan.causal
        keys = [[_keys_of(piece, documents, plan, window) for piece in own] for own in pieces]
        needed = [_needed(of_rank, other) for other, of_rank in enumerate(keys)]
        lengths = [[sum(part.tokens for part in each) for each in own] for own in keys]
        num_keys = [sum(each) for each in lengths]
        if two_sided:  # the rank's own padding follows, as queries
            num_keys = [n + plan.padding(other) for other, n in enumerate(num_keys)]
        layout_k = PackedLayout.from_lengths(
            lengths[rank],
            total_tokens=_in_quarters(max(num_keys), tokens_per_rank),
            capacity=capacity,
            max_seqlen_bound=round_up_to_power_of_two(max(n for own in lengths for n in own)),
        )
        senders = [sent.rank for of_rank in needed for sent in of_rank]
        sends = [
            (sent.token, other, sent.tokens)
            for other, of_other in enumerate(needed)
            for sent in of_other
            if sent.rank == rank
        ]
        received = [0] * len(pieces)
        for sent in needed[rank]:
            received[sent.rank] += sent.tokens
        gathered = [
            (other, part)
            for other, of_rank in enumerate(keys)
            for parts in of_rank
            for part in parts
            if part.rank != other
        ]
        returns = [
            (part.token, other, part.tokens) for other, part in gathered if part.rank == rank
        ]
        owners = Counter(part.rank for _, part in gathered)
        return cls(
            layout_k,
            runs=_table(
                _runs(keys[rank], needed[rank], rank, tokens_per_rank),
                columns=4,
                at_least=1 + max(sum(map(len, own)) for own in keys),
            ),
            sends=_table(sends, at_least=max(Counter(senders).values(), default=1)),
            received=_on_host(received),
            returns=_table(returns, at_least=max(owners.values(), default=1)),
            own_keys=_own_keys(keys[rank], pieces[rank], plan.padding(rank)) if two_sided else None,
        )

    def moved(self, move: Callable[[Tensor], Tensor]) -> KeyExchange:
        """The same with `move` of the tensors on the device; the tables stay on the host."""
        own_keys = None if self.own_keys is None else move(self.own_keys)
        return replace(self, layout_k=self.layout_k.moved(move), own_keys=own_keys)


# ---- the tables ----


class _HeldPiece(NamedTuple):
    """A piece of a document, the rank that holds it, and its first token there."""

    document: int
    start: int
    stop: int
    rank: int
    token: int

    @property
    def tokens(self) -> int:
        return self.stop - self.start


def _by_document(pieces: Pieces) -> dict[int, list[_HeldPiece]]:
    """The pieces of each document, in its order."""
    found: dict[int, list[_HeldPiece]] = defaultdict(list)
    for rank, own in enumerate(pieces):
        token = 0
        for document, start, stop in own:
            found[document].append(_HeldPiece(document, start, stop, rank, token))
            token += stop - start
    for parts in found.values():
        parts.sort()
    return found


def _keys_of(
    piece: Piece, documents: dict[int, list[_HeldPiece]], plan: RowPlan, window: int | None
) -> list[_HeldPiece]:
    """What a piece attends to of the pieces of its document."""
    length = plan.lengths[piece.document]
    reach = length if window is None else window - 1
    low, high = piece.start - reach, piece.stop if plan.causal else piece.stop + reach
    return [
        part._replace(
            start=max(part.start, low),
            stop=min(part.stop, high),
            token=part.token + max(0, low - part.start),
        )
        for part in documents[piece.document]
        if part.start < high and low < part.stop
    ]


def _own_keys(keys: list[list[_HeldPiece]], own: Sequence[Piece], padding: int) -> Tensor:
    """The key of each token of a rank; those of padding come last."""
    found, key = list[int](), 0
    for parts, piece in zip(keys, own, strict=True):
        first = key + piece.start - parts[0].start
        found += range(first, first + piece.tokens)
        key += sum(part.tokens for part in parts)
    return _on_host([*found, *range(key, key + padding)])


class _Sent(NamedTuple):
    """What a rank sends: this many tokens from `token` on."""

    rank: int
    token: int
    tokens: int


def _needed(keys: list[list[_HeldPiece]], rank: int) -> list[_Sent]:
    """What a rank receives, once each, by the rank that sends it."""
    others = (part for parts in keys for part in parts if part.rank != rank)
    found: list[_Sent] = []
    for sender, token, tokens in sorted((part.rank, part.token, part.tokens) for part in others):
        last = found[-1] if found else None
        if last and last.rank == sender and token <= last.token + last.tokens:
            more = token + tokens - last.token  # windows of two pieces may overlap
            found[-1] = last._replace(tokens=max(last.tokens, more))
        else:
            found.append(_Sent(sender, token, tokens))
    return found


def _runs(
    keys: list[list[_HeldPiece]], needed: list[_Sent], rank: int, tokens: int
) -> list[tuple[int, int, int, int]]:
    """(token, rank, tokens, key) of the gathered keys; adjacent ones of a rank are one run."""
    firsts = [(sent.rank, sent.token) for sent in needed]
    arrivals = [*accumulate((sent.tokens for sent in needed), initial=tokens)]
    found = [(0, rank, 0, 0)]
    for part in (part for parts in keys for part in parts):
        token = part.token
        if part.rank != rank:
            at = bisect_right(firsts, (part.rank, part.token)) - 1
            token += arrivals[at] - needed[at].token
        start, owner, length, key = found[-1]
        if owner == part.rank and start + length == token:
            found[-1] = start, owner, length + part.tokens, key
        else:
            found.append((token, part.rank, part.tokens, key + length))
    return sorted(found, key=lambda run: (run[1] != rank, run[1]))


def _in_quarters(keys: int, tokens: int) -> int:
    """Keys rounded up to a multiple of a quarter of a rank's tokens."""
    quarter = -(-tokens // 4)
    return -(-keys // quarter) * quarter


def _table(ranges: Sequence[tuple[int, ...]], *, columns: int = 3, at_least: int) -> Tensor:
    """int64 `[N, columns]`, N a power of two; ranges without tokens at the end."""
    size = round_up_to_power_of_two(max(len(ranges), at_least))
    return _on_host([*ranges, *[(0,) * columns] * (size - len(ranges))])


def _on_host(values: Sequence[Any]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device="cpu")
