"""`PrefixTree`: the prefixes that rows of tokens share, as segments of trees."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from flexvarlen.layout.segments import path_to


class PrefixTree:
    """Rows as paths through segments, laid out depth first.

    Rows share a token if they are equal at it and at every token before it. So equal rows share
    everything, and a row that another one continues shares all its tokens.

    Args:
        row_lengths: tokens of each row.
        common: called with two rows and an offset up to which they are equal; returns how many
            tokens they share from there.
        next_token: called with a row and an offset; returns a key, equal for two rows that are
            equal up to there if and only if they have the same token there.
        max_depth: segments on a path at most; rows share nothing below. None: no bound.
        min_tokens: a shared segment shorter than this is repeated in each of its branches.

    Attributes:
        pieces: of each segment, a row that holds it, and where it starts and stops in that row.
        parents: the segment that each continues, -1 at a root.
        counts: how many rows go through each.
        ends: the last segment of each row, -1 if it has no tokens.
        depth: segments on the longest path.
    """

    def __init__(
        self,
        row_lengths: Sequence[int],
        common: Callable[[int, int, int], int],
        next_token: Callable[[int, int], Hashable],
        *,
        max_depth: int | None = None,
        min_tokens: int = 1,
    ) -> None:
        self.pieces: list[tuple[int, int, int]] = []
        self.parents: list[int] = []
        self.counts: list[int] = []
        self.ends = [-1] * len(row_lengths)
        self.depth = 0

        def branches_of(group: Iterable[int], at: int) -> list[list[int]]:
            """The rows of a group that go on, by their next token, in order of appearance."""
            found: dict[Hashable, list[int]] = {}
            for row in group:
                if at < row_lengths[row]:
                    found.setdefault(next_token(row, at), []).append(row)
            return list(found.values())

        stack = [(group, 0, -1, 1) for group in reversed(branches_of(range(len(row_lengths)), 0))]
        while stack:
            group, start, parent, depth = stack.pop()
            stop = start + min(common(group[0], other, start) for other in group)
            branches = branches_of(group, stop)
            ended = [row for row in group if row_lengths[row] == stop]
            if len(group) > 1 and branches and (stop - start < min_tokens or depth == max_depth):
                apart = [*branches, ended] if ended else branches
                stack += [(each, start, parent, depth) for each in reversed(apart)]
                continue
            self.depth = max(self.depth, depth)
            segment = len(self.pieces)
            self.pieces.append((group[0], start, stop))
            self.parents.append(parent)
            self.counts.append(len(group))
            for row in ended:
                self.ends[row] = segment
            stack += [(each, stop, segment, depth + 1) for each in reversed(branches)]

    @classmethod
    def from_rows(
        cls, rows: Sequence[Tensor], *, max_depth: int | None = None, min_tokens: int = 1
    ) -> PrefixTree:
        """The tree of rows of `[L, C]` integers on the host; tokens are equal in all C."""

        def common(a: int, b: int, start: int) -> int:
            first, second = rows[a][start:], rows[b][start:]
            length = min(len(first), len(second))
            differ = (first[:length] != second[:length]).any(1).nonzero()
            return int(differ[0]) if len(differ) else length

        def next_token(row: int, at: int) -> Hashable:
            return tuple(rows[row][at].tolist())

        lengths = [len(row) for row in rows]
        return cls(lengths, common, next_token, max_depth=max_depth, min_tokens=min_tokens)

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
        return [path_to(end, starts, self.parents) for end in self.ends]
