"""The segments of a row whose documents are trees: paths that share their beginnings.

`PrefixTree` finds them in rows of tokens; `Segments` holds them.

A tree is laid out depth first: a segment, then the subtrees of its children. A token sees its own
segment up to itself, and the segments above it. Positions count along the path.

Shapes: T = total_tokens, S = number of segment slots.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from flexvarlen.layout.arguments import as_int, integers
from flexvarlen.layout.boundaries import HAS_TRITON, host_int32, is_traced, slots_of
from flexvarlen.layout.level_order import LevelOrder


@dataclass(eq=False)
class Segments:
    """The segments of all documents of a row, in the order of their tokens.

    Attributes:
        table: int32 `[4, S + 1]`, on the device of the tokens. Its rows, for each segment: its
            first token; one past the last token of its subtree; the tokens above it on its path;
            its depth. Spare slots are empty, of depth -1; the last column ends the first row.
        lengths: tokens of each segment, on the host.
        parents: the index of the segment above each, -1 at a root; on the host.
        max_depth: a bound on the number of segments on a path.
        by_level: the segments by their depth.
    """

    table: Tensor
    lengths: tuple[int, ...]
    parents: tuple[int, ...]
    max_depth: int
    by_level: LevelOrder

    @classmethod
    def of(
        cls,
        lengths: Sequence[int] | Tensor,
        parents: Sequence[int] | Tensor,
        capacity: int,
        max_depth: int | None,
        device: torch.device,
    ) -> Segments:
        """Validate the parents, and make the table.

        Raises:
            ValueError: a parent that does not come before its child, segments that are not depth
                first, or paths deeper than `max_depth`.
        """
        sizes, above = integers("lengths", lengths), integers("parents", parents)
        depths = _depths(sizes, above)
        deepest = max(depths, default=0) + 1
        most = deepest if max_depth is None else as_int(max_depth)
        if most is None:
            raise ValueError(f"max_depth must be an integer, got {max_depth!r}; pass a number.")
        if most < deepest:
            raise ValueError(
                f"max_depth must be at least the segments of the longest path, {deepest}, got "
                f"{max_depth}; raise max_depth."
            )
        starts: list[int] = []
        ends: list[int] = []
        offsets: list[int] = []
        token = 0
        for size, parent in zip(sizes, above, strict=True):
            starts.append(token)
            token += size
            ends.append(token)
            offsets.append(0 if parent < 0 else offsets[parent] + sizes[parent])
        for segment in reversed(range(len(sizes))):
            if above[segment] >= 0:
                ends[above[segment]] = max(ends[above[segment]], ends[segment])
        spare = capacity + 1 - len(sizes)
        rows = ((starts, token), (ends, token), (offsets, 0), (depths, -1))
        flat = host_int32([x for row, fill in rows for x in row + [fill] * spare], device)
        table = flat.view(4, -1).to(device, non_blocking=True)
        by_level = LevelOrder.of(sizes, above, depths, capacity, most, device)
        return cls(table, tuple(sizes), tuple(above), most, by_level)

    def moved(self, move: Callable[[Tensor], Tensor]) -> Segments:
        """The same segments, with `move` of their tables."""
        by_level = replace(self.by_level, table=move(self.by_level.table))
        return replace(self, table=move(self.table), by_level=by_level)

    def copied_to(self, other: Segments) -> Segments:
        """The same segments in the tables of `other`, whose values are lost. No sync."""
        other.table.copy_(self.table, non_blocking=True)
        other.by_level.table.copy_(self.by_level.table, non_blocking=True)
        by_level = replace(self.by_level, table=other.by_level.table)
        return replace(self, table=other.table, by_level=by_level)

    def tree_lengths(self) -> list[int]:
        """Tokens of each document."""
        trees: list[int] = []
        for size, parent in zip(self.lengths, self.parents, strict=True):
            if parent < 0:
                trees.append(size)
            else:
                trees[-1] += size
        return trees

    def paths(self) -> Iterator[Tensor]:
        """int64 `[L]` on the host: the tokens from the root to the end of each leaf, in order."""
        starts = list(accumulate(self.lengths, initial=0))
        parents = set(self.parents)
        for segment in range(len(self.lengths)):
            if segment not in parents:
                yield path_to(segment, starts, self.parents)


def path_to(segment: int, starts: Sequence[int], parents: Sequence[int]) -> Tensor:
    """int64 `[L]` on the host: the tokens from the root to the end of a segment.

    Args:
        segment: its index; -1: no tokens.
        starts: the first token of each segment, then the end of the last.
        parents: the index of the segment above each, -1 at a root.
    """
    pieces = [torch.arange(0, device="cpu")]
    while segment >= 0:
        pieces.append(torch.arange(starts[segment], starts[segment + 1], device="cpu"))
        segment = parents[segment]
    return torch.cat(pieces[::-1])


def _depths(sizes: list[int], parents: list[int]) -> list[int]:
    """The number of segments above each.

    Raises:
        ValueError: see `Segments.of`.
    """
    if len(sizes) != len(parents):
        raise ValueError(
            f"parents must give one segment for each of the {len(sizes)} lengths, -1 at a root, "
            f"got {len(parents)}."
        )
    depths: list[int] = []
    path: list[int] = []  # from a root to the segment before this one
    for segment, (size, parent) in enumerate(zip(sizes, parents, strict=True)):
        if size < 0:
            raise ValueError(f"lengths must be at least 0, got {size} at index {segment}.")
        if not -1 <= parent < segment:
            raise ValueError(
                f"parents must come before their children, got {parent} at index {segment}; give "
                "the index of an earlier segment, or -1 at a root."
            )
        while path and path[-1] != parent:
            path.pop()
        if not path and parent >= 0:
            raise ValueError(
                f"segments must be laid out depth first, got parent {parent} at index {segment}, "
                "whose subtree had ended; put each segment's children right behind it."
            )
        depths.append(len(path))
        path.append(segment)
    return depths


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


def token_bounds(table: Tensor, total_tokens: int) -> tuple[Tensor, Tensor]:
    """Of each token, one past the last that may see it, and its position; int32 `[T]` each.

    Args:
        table: of `Segments`.

    No sync; traces under `fullgraph=True`.
    """
    ends, positions = (_operator if is_traced() else _token_bounds)(table, total_tokens)
    return ends, positions


def _token_bounds(table: Tensor, total_tokens: int) -> tuple[Tensor, Tensor]:
    if table.is_cuda and HAS_TRITON and type(table) is Tensor:  # not a FakeTensor
        from flexvarlen.layout.triton.segments import write_token_bounds

        return write_token_bounds(table, total_tokens)
    starts, ends, offsets, _ = table
    tokens = torch.arange(total_tokens, device=table.device, dtype=torch.int32)
    segment = slots_of(starts, tokens)
    return ends[segment], offsets[segment] + tokens - starts[segment]


_operator = torch.library.custom_op("flexvarlen::token_bounds", mutates_args=())(_token_bounds)


@_operator.register_fake
def _(table: Tensor, total_tokens: int) -> tuple[Tensor, Tensor]:
    return table.new_empty(total_tokens), table.new_empty(total_tokens)
