"""`plan_row` decides which tokens of a packed row lie on which rank; a function of lengths alone.

Shapes: P = ranks, T = tokens of the row, C = T/P tokens of a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flexvarlen.parallel.balance import even_pieces
from flexvarlen.parallel.pieces import Pieces, attention_work, contiguous_pieces


@dataclass(frozen=True)
class RowPlan:
    """Which tokens of a row lie on which rank.

    Attributes:
        lengths: tokens of each document.
        tokens_per_rank: C, padding included.
        pieces: of each rank, in the order of its tokens; padding follows the last.
        contiguous: whether each rank has consecutive tokens of the row.
        causal: whether attention is causal.
    """

    lengths: tuple[int, ...]
    tokens_per_rank: int
    pieces: Pieces
    contiguous: bool = False
    causal: bool = True

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
        """Pairs of a query and a key on each rank; see `attention_work`."""
        return attention_work(self.pieces, self.lengths, causal=self.causal)

    def order(self, first_tokens: Sequence[int] | None = None) -> NDArray[np.int64]:
        """int64 `[T]`: the row's tokens of rank 0, then of rank 1, and so on; padding last on each.

        Args:
            first_tokens: the index in the row of each document's first token; default: the
                documents follow one another.
        """
        begins = np.cumsum([0, *self.lengths])[:-1] if first_tokens is None else first_tokens
        total = self.ranks * self.tokens_per_rank
        is_padding = np.ones(total, bool)
        order = np.full(total, -1)
        for rank, own in enumerate(self.pieces):
            slot = rank * self.tokens_per_rank
            for document, start, stop in own:
                begin, tokens = begins[document] + start, stop - start
                order[slot : slot + tokens] = np.arange(begin, begin + tokens)
                is_padding[begin : begin + tokens] = False
                slot += tokens
        order[order < 0] = is_padding.nonzero()[0]
        return order


def plan_row(
    lengths: Sequence[int],
    ranks: int,
    *,
    total_tokens: int,
    contiguous: bool = False,
    causal: bool = True,
) -> RowPlan:
    """Plan which tokens of a row lie on which of P ranks.

    Each rank gets exactly T/P tokens, padding last, and at most P - 1 documents are cut. No rank
    has over 5% more work than the mean, `LINEAR_WORK` of each token's linear layers counted. If
    attention is bidirectional, documents longer than T/P are cut besides, and a few rows are less
    even. A contiguous plan is not balanced.

    Args:
        lengths: tokens of each document.
        ranks: P.
        total_tokens: T, padding included; a multiple of P.
        contiguous: whether to cut the row as it is, for models whose state passes from token to
            token.
        causal: whether attention is causal. If not, all tokens of a document have the same work.

    Raises:
        ValueError: T is not a multiple of P, or less than the documents have.

    >>> plan_row([6], 2, total_tokens=6).pieces[0]
    (Piece(document=0, start=0, stop=2), Piece(document=0, start=5, stop=6))
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
    lengths, tokens = tuple(lengths), total_tokens // ranks
    if contiguous:
        pieces = contiguous_pieces(lengths, ranks, tokens)
    else:
        pieces = even_pieces(lengths, ranks, tokens, causal=causal)
    return RowPlan(lengths, tokens, pieces, contiguous, causal)
