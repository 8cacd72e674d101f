"""Deal the samples of one tree to ranks, and cut out what a rank needs; on the host.

Shapes: T = tokens of the row, L = tokens of a sample, C = tokens of the rank.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.trees.plan import segments_of


def deal_samples(paths: Sequence[Tensor], ranks: int) -> list[list[int]]:
    """Split the samples, in the order of the row, so that the fullest rank has few tokens.

    Args:
        paths: int64 `[L]` of each sample: its tokens in a row of trees, depth first.
        ranks: how many.

    Returns:
        The samples of each rank, ascending; none for the last ranks if there are too few. The
        largest number of tokens of a rank is the least that this order allows.
    """
    order = sorted(range(len(paths)), key=lambda i: (int(paths[i][-1]), i))
    whole = [len(paths[i]) for i in order]
    added = [
        b - _common(paths[i], paths[j])
        for (i, j), b in zip(pairwise(order), whole[1:], strict=True)
    ]
    added = [*whole[:1], *added]

    def starts(most: int) -> list[int]:
        """Where ranges begin that have at most that many tokens."""
        found, tokens = [0], 0
        for number, (own, more) in enumerate(zip(whole, added, strict=True)):
            tokens += more
            if tokens > most:
                found.append(number)
                tokens = own
        return found

    fewest, total = max(whole, default=0), sum(added)
    most = fewest + bisect_left(range(fewest, total), True, key=lambda x: len(starts(x)) <= ranks)
    cuts = [*starts(most), len(order)]
    dealt = [sorted(order[a:b]) for a, b in pairwise(cuts)]
    return dealt + [[] for _ in range(ranks - len(dealt))]


def _common(a: Tensor, b: Tensor) -> int:
    """How many tokens two paths of a tree share."""
    length = min(len(a), len(b))
    return int((a[:length] == b[:length]).sum())


class TreeSubset:
    """The tokens of some samples of a row of trees, or its first token if there are no samples.

    Args:
        layout: of the row.
        paths: int64 `[L]` of each of the samples.

    Attributes:
        tokens: int64 `[C]`: the indices of the tokens in the row.
        layout: theirs, on the host.
    """

    def __init__(self, layout: PackedLayout, paths: Sequence[Tensor]) -> None:
        is_kept = torch.zeros(layout.total_tokens, dtype=torch.bool)
        is_kept[torch.cat(list(paths)) if paths else 0] = True
        self.tokens = is_kept.nonzero()[:, 0]
        self._index = is_kept.cumsum(0) - 1
        lengths, parents = segments_of(layout)
        sizes: list[int] = []
        above: list[int] = []
        new = {-1: -1}
        for segment, own in enumerate(is_kept[: sum(lengths)].split(list(lengths))):
            if size := int(own.sum()):
                new[segment] = len(sizes)
                above.append(new[parents[segment]])
                sizes.append(size)
        depth = None if layout.segments is None else layout.segments.max_depth
        # The row's bounds, as parts of a compiled model take their sizes from them.
        bounds: dict[str, Any] = {"capacity": layout.capacity, "max_depth": depth}
        self.layout = PackedLayout.from_tree(sizes, above, **bounds)

    def paths(self, paths: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The same paths, by the indices of their tokens here."""
        return tuple(self._index[path] for path in paths)

    def counts(self, paths: Sequence[Tensor], where: Sequence[Tensor] | None = None) -> Tensor:
        """In how many samples each token is, int64 `[1, C]`.

        Args:
            paths: of the samples.
            where: bool `[L]` of each sample, which of its tokens to count; None: all.
        """
        own = self.paths(paths)
        if where is not None:
            own = tuple(path[which] for path, which in zip(own, where, strict=True))
        index = torch.cat([torch.arange(0), *own])
        return torch.bincount(index, minlength=len(self.tokens))[None]
