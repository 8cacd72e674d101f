"""Keys and values of cut documents, exchanged between the ranks of a row.

Each rank holds consecutive tokens of documents (pieces). The queries of a piece also attend to keys
of their document on other ranks: those before the piece (causal), all (bidirectional), or those
within the window. The ranks that hold these keys send them, and receive their gradients. A document
that lies whole on a rank needs nothing, and where none of the row is cut nothing is sent.

With `layout_k` queries and keys of a piece are aligned at their ends (FlashAttention's bottom-right
alignment). That is right for causal attention, and does not matter to bidirectional attention
without a window. With a window to both sides a piece has keys after its last query: there each
query is placed at the index of its own key (`own_keys`), and queries and keys share one layout.

The tables hold ranges of tokens, so they are short, and stay on the host; `gather_keys.py` reads
them. All tables of all ranks have one length, a power of two, so that few shapes reach graphs.

Shapes: P = ranks, C = tokens of a rank, R = tokens received. Token indices count the C own tokens,
then the R received ones.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain
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
        layout_k: of the gathered keys, a document for each of the rank's pieces; on the device of
            the tokens.
        key_ranges: int64 `[N, 4]` on the host, (first token, owner, tokens, first key): the tokens
            that keys are gathered from, own ones first, then by the rank that owns them.
        send_ranges: int64 `[N, 3]` on the host, (first token, rank, tokens): the own tokens whose
            keys are sent to a rank, by rank.
        receive_counts: int64 `[P]` on the host, the number of tokens received from each rank.
        grad_ranges: int64 `[N, 3]` on the host, (first token, rank, tokens): the own tokens whose
            gradients a rank sends back, once for each of its pieces that attends to them; by rank.
        own_keys: int64 `[C]`, on the device of the tokens: the index of each own token's key, and
            of its query; None unless a window to both sides needs it.
    """

    layout_k: PackedLayout
    key_ranges: Tensor
    send_ranges: Tensor
    receive_counts: Tensor
    grad_ranges: Tensor
    own_keys: Tensor | None = None

    @classmethod
    def of(
        cls, plan: RowPlan, rank: int, *, capacity: int, window: int | None = None
    ) -> KeyExchange | None:
        """The exchange of one rank; None, on every rank, if no document of the row is cut.

        Args:
            plan: of the row.
            rank: whose exchange.
            capacity: document slots of the rank's layout.
            window: a query sees the keys less than this many tokens away; None: all.

        The shapes of its tensors are the same on all ranks, and rounded up, so that ranks and rows
        share compiled graphs.
        """
        if not plan.cut_documents:
            return None
        documents = _by_document(plan.pieces)
        two_sided = window is not None and not plan.causal
        keys = [
            [_keys_of(piece, documents, plan, window) for piece in of_rank]
            for of_rank in plan.pieces
        ]
        gathered = [
            [part for part in chain.from_iterable(of_rank) if part.rank != r]
            for r, of_rank in enumerate(keys)
        ]
        needed = list(map(_needed, gathered))
        sends, returns = _by_owner(needed), _by_owner(gathered)
        ranges = [
            _key_ranges(*of_rank, r, plan.tokens_per_rank)
            for r, of_rank in enumerate(zip(keys, needed, strict=True))
        ]
        rows = max(*map(len, ranges), *map(len, sends), *map(len, returns))
        table = partial(_table, rows=rows)
        counts = [sum(x.tokens for x in needed[rank] if x.rank == r) for r in range(plan.ranks)]
        return cls(
            _layout_of_keys(keys, plan, rank, capacity, with_padding=two_sided),
            key_ranges=table(ranges[rank], columns=4),
            send_ranges=table(sends[rank], columns=3),
            receive_counts=_on_host(counts),
            grad_ranges=table(returns[rank], columns=3),
            own_keys=_own_keys(keys[rank], plan, rank) if two_sided else None,
        )

    def moved(self, move: Callable[[Tensor], Tensor]) -> KeyExchange:
        """A copy with `move` applied to the tensors on the device; the tables stay on the host."""
        own_keys = None if self.own_keys is None else move(self.own_keys)
        return replace(self, layout_k=self.layout_k.moved(move), own_keys=own_keys)


# ---- the tables ----


def _layout_of_keys(
    keys: list[list[list[_HeldPiece]]],
    plan: RowPlan,
    rank: int,
    capacity: int,
    *,
    with_padding: bool,
) -> PackedLayout:
    """The layout of a rank's gathered keys, with sizes that suit all ranks.

    Args:
        keys: of each piece of each rank.
        with_padding: whether padding has rows after the last key, for its queries.
    """
    lengths = [[sum(part.tokens for part in of_piece) for of_piece in of_rank] for of_rank in keys]
    padding = [plan.padding(r) if with_padding else 0 for r in range(plan.ranks)]
    most = max(sum(of_rank) + more for of_rank, more in zip(lengths, padding, strict=True))
    total_tokens = _in_quarters(most, plan.tokens_per_rank)
    longest = round_up_to_power_of_two(max(map(max, filter(None, lengths))))
    return PackedLayout.from_lengths(
        lengths[rank],
        total_tokens=total_tokens,
        capacity=capacity,
        max_seqlen_bound=min(longest, total_tokens),
    )


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
    """The parts of its document that a piece attends to."""
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


def _own_keys(keys: list[list[_HeldPiece]], plan: RowPlan, rank: int) -> Tensor:
    """The key of each token of a rank; those of padding come last."""
    found, key = list[int](), 0
    for parts, piece in zip(keys, plan.pieces[rank], strict=True):
        first = key + piece.start - parts[0].start
        found += range(first, first + piece.tokens)
        key += sum(part.tokens for part in parts)
    return _on_host([*found, *range(key, key + plan.padding(rank))])


class _Sent(NamedTuple):
    """Tokens `token : token + tokens` of `rank`, which sends them."""

    rank: int
    token: int
    tokens: int


def _needed(gathered: list[_HeldPiece]) -> list[_Sent]:
    """What a rank receives, each token once, by the rank that sends it."""
    found: list[_Sent] = []
    for sender, token, tokens in sorted((part.rank, part.token, part.tokens) for part in gathered):
        last = found[-1] if found else None
        if last and last.rank == sender and token <= last.token + last.tokens:
            more = token + tokens - last.token  # windows of two pieces may overlap
            found[-1] = last._replace(tokens=max(last.tokens, more))
        else:
            found.append(_Sent(sender, token, tokens))
    return found


def _by_owner(
    wanted: Sequence[Sequence[_Sent | _HeldPiece]],
) -> list[list[tuple[int, int, int]]]:
    """(first token, rank, tokens) of what each rank owns and other ranks want, by these."""
    found: list[list[tuple[int, int, int]]] = [[] for _ in wanted]
    for rank, of_rank in enumerate(wanted):
        for part in of_rank:
            found[part.rank].append((part.token, rank, part.tokens))
    return found


def _key_ranges(
    keys: list[list[_HeldPiece]], needed: list[_Sent], rank: int, tokens: int
) -> list[tuple[int, int, int, int]]:
    """(token, rank, tokens, key) of the gathered keys; adjacent ones of a rank are one range."""
    firsts = [(sent.rank, sent.token) for sent in needed]
    arrivals = [*accumulate((sent.tokens for sent in needed), initial=tokens)]
    found: list[tuple[int, int, int, int]] = []
    key = 0
    for part in chain.from_iterable(keys):
        token = part.token
        if part.rank != rank:
            at = bisect_right(firsts, (part.rank, part.token)) - 1
            token += arrivals[at] - needed[at].token
        first, owner, n, first_key = found[-1] if found else (0, -1, 0, 0)
        if owner == part.rank and first + n == token:
            found[-1] = first, owner, n + part.tokens, first_key
        else:
            found.append((token, part.rank, part.tokens, key))
        key += part.tokens
    return sorted(found, key=lambda row: (row[1] != rank, row[1]))


def _in_quarters(keys: int, tokens: int) -> int:
    """Keys rounded up to a multiple of a quarter of a rank's tokens."""
    quarter = -(-tokens // 4)
    return -(-keys // quarter) * quarter


def _table(ranges: Sequence[tuple[int, ...]], *, columns: int, rows: int) -> Tensor:
    """int64 `[N, columns]`, N the next power of two of `rows`; spare rows are 0."""
    spare = round_up_to_power_of_two(rows) - len(ranges)
    return _on_host([*ranges, *[(0,) * columns] * spare])


def _on_host(values: Sequence[Any]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device="cpu")
