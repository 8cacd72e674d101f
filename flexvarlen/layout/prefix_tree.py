"""The segments that rows of tokens share.

Rows are sorted, so that those with a common beginning are neighbours: how much each has in common
with the next says where rows part.

Shapes: L = tokens of a row; C = numbers that make a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flexvarlen.layout.segments import path_to


class PrefixTree:
    """Rows as paths through segments, laid out depth first.

    Rows share a token if they are equal up to it. They part at the first token that differs, or,
    where several branches have labels there, one token earlier, so that no token has two labels.
    A row that others continue is the beginning of one of them.

    Args:
        rows: for each row int64 `[L, C]`, on the host.
        is_label: for each row bool `[L]`, whether the token is the label of the one before it;
            False at its first. None: nowhere.
        max_depth: segments on a path at most; rows share nothing below. None: no bound.
        min_tokens: a shared segment shorter than this is repeated in each of its branches.

    Attributes:
        pieces: of each segment, a row that holds it, and where it starts and stops in that row.
        parents: the segment that each continues, -1 at a root.
        ends: for each row a segment whose path begins with the row, -1 if it has no tokens.
        depth: segments on the longest path.
    """

    def __init__(
        self,
        rows: Sequence[NDArray[np.int64]],
        is_label: Sequence[NDArray[np.bool_]] | None = None,
        *,
        max_depth: int | None = None,
        min_tokens: int = 1,
    ) -> None:
        self.pieces: list[tuple[int, int, int]] = []
        self.parents: list[int] = []
        self.ends = [-1] * len(rows)
        self.depth = 0
        self._row_lengths = [len(row) for row in rows]
        leaves = _leaves(rows, is_label or [np.zeros(len(row), bool) for row in rows])
        stack = [(leaves, 0, -1, 1)] if leaves else []
        while stack:
            group, start, parent, depth = stack.pop()
            stop, branches = _parts(group)
            if branches and (stop - start < min_tokens or depth == max_depth):
                stack += [(branch, start, parent, depth) for branch in reversed(branches)]
                continue
            segment = len(self.pieces)
            self.pieces.append((group[0].rows[-1], start, stop))
            self.parents.append(parent)
            self.depth = max(self.depth, depth)
            stack += [(branch, stop, segment, depth + 1) for branch in reversed(branches)]
            if not branches:
                for row in group[0].rows:
                    self.ends[row] = segment

    @property
    def lengths(self) -> list[int]:
        """Tokens of each segment."""
        return [stop - start for _, start, stop in self.pieces]

    def take(self, of_rows: Sequence[Tensor]) -> Tensor:
        """`[T, ...]`: what each segment's tokens have in `of_rows`, a tensor `[L, ...]` a row."""
        return torch.cat([of_rows[row][start:stop] for row, start, stop in self.pieces])

    def paths(self) -> list[Tensor]:
        """int64 `[L]` on the host, of each row: where its tokens are among all segments' tokens."""
        starts = list(accumulate(self.lengths, initial=0))
        return [
            path_to(end, starts, self.parents)[:length]
            for end, length in zip(self.ends, self._row_lengths, strict=True)
        ]


@dataclass(frozen=True)
class _Leaf:
    """A row that no other continues, and those that it continues.

    Attributes:
        rows: their indices; its own is the last.
        is_label: bool `[L]`, whether the token is a label in any of them.
        shared: the tokens that the next leaf in sorted order has in common with it.
    """

    rows: list[int]
    is_label: NDArray[np.bool_]
    shared: int


def _leaves(
    rows: Sequence[NDArray[np.int64]], is_label: Sequence[NDArray[np.bool_]]
) -> list[_Leaf]:
    """The leaves, sorted."""
    found, group = [], []
    order = sorted((i for i, row in enumerate(rows) if len(row)), key=lambda i: rows[i].tobytes())
    shared = [_common_tokens(rows[a], rows[b]) for a, b in pairwise(order)]
    for row, common in zip(order, [*shared, -1], strict=False):  # of no row, -1 is left
        group.append(row)
        if common < len(rows[row]):  # the next row does not continue it
            own = is_label[row].copy()
            for other in group[:-1]:
                own[: len(is_label[other])] |= is_label[other]
            found.append(_Leaf(group, own, common))
            group = []
    return found


def _common_tokens(a: NDArray[np.int64], b: NDArray[np.int64]) -> int:
    """How many tokens two rows begin with alike."""
    length = min(len(a), len(b))
    differs = (a[:length] != b[:length]).reshape(-1)
    first = int(differs.argmax())
    return first // a.shape[1] if differs[first] else length


def _parts(group: list[_Leaf]) -> tuple[int, list[list[_Leaf]]]:
    """Where the rows of sorted leaves part, and the branches; of one leaf its end, and none.

    The branch with the most leaves comes first, and equals in the order of their first rows: along
    a conversation, of which each turn leaves a branch, the keys of a token then lie close together,
    and attention computes fewer blocks that it sees in part.
    """
    *others, last = group
    if not others:
        return len(last.is_label), []
    at = min(leaf.shared for leaf in others)
    branches: list[list[_Leaf]] = [[]]
    for leaf in others:
        branches[-1].append(leaf)
        if leaf.shared == at:
            branches.append([])
    branches[-1].append(last)
    branches.sort(key=lambda branch: (-len(branch), min(min(leaf.rows) for leaf in branch)))
    labelled = sum(any(leaf.is_label[at] for leaf in branch) for branch in branches)
    return at - (labelled > 1), branches
