"""Trees of a row over ranks: each lies whole on one, so the ranks exchange nothing.

Shapes: P = ranks, T = tokens of the row, C = T/P tokens of a rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.layout.segments import Segments
from flexvarlen.parallel.pieces import Piece, Pieces, longest_first
from flexvarlen.parallel.plan import RowPlan
from flexvarlen.parallel.sharded_layout import RowShard


def own_trees(
    layout: PackedLayout, documents: Sequence[tuple[int, int]], rank: int, ranks: int
) -> tuple[Tensor, PackedLayout]:
    """The tokens of the row that a rank has, int64 `[C]` on the host, and their layout.

    Args:
        layout: of the row; of trees, or of samples that share nothing.
        documents: the first token of each tree that has tokens, and one past its last.
        rank, ranks: whose, and of how many.

    The sizes of the layout are those of the row, which has C tokens of it, so a compiled graph
    serves all ranks, and all rows of equal sizes.

    Raises:
        ValueError: the trees do not fit.
    """
    lengths = tuple(stop - start for start, stop in documents)
    plan = RowPlan(lengths, layout.total_tokens // ranks, whole_trees(lengths, ranks, layout))
    order = torch.from_numpy(plan.order([start for start, _ in documents])).view(ranks, -1)
    own = [piece.document for piece in plan.pieces[rank]]
    segments, sizes, parents = layout.segments, [lengths[tree] for tree in own], [-1] * len(own)
    if segments is not None:
        sizes, parents = _segments_of(segments, own)
    made = PackedLayout.from_tree(
        sizes,
        parents,
        total_tokens=plan.tokens_per_rank,
        capacity=layout.capacity,
        max_seqlen_bound=min(layout.max_seqlen_bound, plan.tokens_per_rank),
        max_depth=1 if segments is None else segments.max_depth,
    )
    starts = torch.zeros(layout.capacity + 1, dtype=torch.int64, device="cpu")
    shard = RowShard(rank, ranks, starts, exchange=None, causal=True, splits_documents=False)
    return order[rank], made.replace(shard=shard).to(layout.device)


def whole_trees(lengths: tuple[int, ...], ranks: int, layout: PackedLayout) -> Pieces:
    """Longest first, each to the rank with the least work, or if that cuts one, to the fullest.

    Raises:
        ValueError: they do not fit so either.
    """
    tokens_per_rank = layout.total_tokens // ranks
    found = longest_first(lengths, ranks, tokens_per_rank)
    if all(piece.tokens == lengths[piece.document] for own in found for piece in own):
        return tuple(tuple(sorted(own)) for own in found)
    room, pieces = [tokens_per_rank] * ranks, [list[Piece]() for _ in range(ranks)]
    for length, tree in sorted(((n, tree) for tree, n in enumerate(lengths)), reverse=True):
        fitting = [rank for rank in range(ranks) if room[rank] >= length]
        if not fitting:
            enough = f" to at least {ranks * length}" if length > tokens_per_rank else ""
            raise ValueError(
                f"each tree must lie whole on one of the {ranks} ranks, of {tokens_per_rank} "
                f"tokens each, got one of {length} tokens that finds no room, {sum(lengths)} in "
                f"all; raise total_tokens{enough}, or put fewer samples into a row."
            )
        rank = min(fitting, key=room.__getitem__)
        room[rank] -= length
        pieces[rank].append(Piece(tree, 0, length))
    return tuple(tuple(sorted(own)) for own in pieces)


def _segments_of(segments: Segments, trees: Sequence[int]) -> tuple[list[int], list[int]]:
    """The lengths and the parents of the segments of some trees, for `PackedLayout.from_tree`.

    Args:
        segments: of the row.
        trees: which of those that have tokens.
    """
    roots = [index for index, parent in enumerate(segments.parents) if parent < 0]
    spans = zip(roots, [*roots[1:], len(segments.parents)], strict=True)
    with_tokens = [(a, b) for a, b in spans if sum(segments.lengths[a:b])]
    lengths: list[int] = []
    parents: list[int] = []
    for begin, end in (with_tokens[tree] for tree in trees):
        moved = len(lengths) - begin
        lengths += segments.lengths[begin:end]
        above = segments.parents[begin:end]
        parents += [-1 if parent < 0 else parent + moved for parent in above]
    return lengths, parents
