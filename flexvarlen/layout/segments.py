"""The segments of a row whose documents are trees: paths that share their beginnings.

`PrefixTree` finds them in rows of tokens; `Segments` holds them.

A tree is laid out depth first: a segment, then the subtrees of its children. A token sees its own
segment up to itself, and the segments above it. Positions count along the path.

Shapes: T = total_tokens, S = number of segment slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from flexvarlen.layout.arguments import as_int, integers
from flexvarlen.layout.boundaries import HAS_TRITON, host_int32, is_traced, slots_of
from flexvarlen.layout.labels import IGNORE_INDEX
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

    Rows share a token if they are equal up to it. Segments are cut where rows part: a row of which
    others are continuations goes along with the first of them, and ends within a segment.

    Args:
        row_lengths: tokens of each row.
        common: called with rows and an offset, whose token they share; returns the offset at which
            the first of them part, or the end of the longest.
        branches: called with rows that have a token at an offset; returns those that share it.
        max_depth: segments on a path at most; rows share nothing below. None: no bound.
        min_tokens: a shared segment shorter than this is repeated in each of its branches.

    Attributes:
        pieces: of each segment, a row that holds it, and where it starts and stops in that row.
        parents: the segment that each continues, -1 at a root.
        ends: the segment in which each row ends, -1 if it has no tokens.
        depth: segments on the longest path.
    """

    def __init__(
        self,
        row_lengths: Sequence[int],
        common: Callable[[list[int], int], int],
        branches: Callable[[list[int], int], list[list[int]]],
        *,
        max_depth: int | None = None,
        min_tokens: int = 1,
    ) -> None:
        self.pieces: list[tuple[int, int, int]] = []
        self.parents: list[int] = []
        self.ends = [-1] * len(row_lengths)
        self.depth = 0
        self._row_lengths = row_lengths
        roots = branches([row for row, length in enumerate(row_lengths) if length], 0)
        stack = [(group, 0, -1, 1) for group in reversed(roots)]
        while stack:
            group, start, parent, depth = stack.pop()
            stop = common(group, start)
            ended = [row for row in group if row_lengths[row] <= stop]
            going = branches([row for row in group if row_lengths[row] > stop], stop)
            if going and (stop - start < min_tokens or depth == max_depth):
                going[0] += ended
                stack += [(each, start, parent, depth) for each in reversed(going)]
                continue
            self.depth = max(self.depth, depth)
            segment = len(self.pieces)
            self.pieces.append((max(group, key=row_lengths.__getitem__), start, stop))
            self.parents.append(parent)
            for row in ended:
                self.ends[row] = segment
            stack += [(each, stop, segment, depth + 1) for each in reversed(going)]

    @classmethod
    def from_rows(
        cls, rows: Sequence[Tensor], *, max_depth: int | None = None, min_tokens: int = 1
    ) -> PrefixTree:
        """The tree of rows of `[L, 2]` integers on the host: tokens, and labels of the next tokens.

        Rows share a token if they are equal in all tokens up to it, and their labels agree at each
        of these; -100 agrees with every label. Where the labels of rows that are equal so far do
        not agree, each has the token for itself with those that have its label; a row with -100
        there, with those whose label is its next token.
        """
        lengths = [len(row) for row in rows]

        def common(group: list[int], start: int) -> int:
            longest = rows[max(group, key=lengths.__getitem__)]
            stop, labels = len(longest), longest[start:, 1].clone()
            for row in group:
                tokens, own = rows[row][start:stop].unbind(1)
                known = labels[: len(own)]
                differ = tokens != longest[start : start + len(own), 0]
                differ |= (own != known) & (own != IGNORE_INDEX) & (known != IGNORE_INDEX)
                known.copy_(own.where(known == IGNORE_INDEX, known))
                if differ.any():
                    stop = start + int(differ.int().argmax())
            return stop

        def branches(group: list[int], at: int) -> list[list[int]]:
            found: dict[int, list[int]] = {}
            for row in group:
                found.setdefault(int(rows[row][at, 0]), []).append(row)
            return [branch for same in found.values() for branch in _by_label(rows, same, at)]

        return cls(lengths, common, branches, max_depth=max_depth, min_tokens=min_tokens)

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


def _by_label(rows: Sequence[Tensor], group: list[int], at: int) -> list[list[int]]:
    """Rows that have the same tokens up to an offset, parted if their labels there differ."""
    labels = {row: int(rows[row][at, 1]) for row in group}
    if len({*labels.values()} - {IGNORE_INDEX}) < 2:
        return [group]
    found: dict[int, list[int]] = {}
    ended = [row for row in group if labels[row] == IGNORE_INDEX and len(rows[row]) == at + 1]
    for row in group:
        if row not in ended:
            is_masked = labels[row] == IGNORE_INDEX
            key = int(rows[row][at + 1, 0]) if is_masked else labels[row]
            found.setdefault(key, []).append(row)
    first, *others = found.values()
    return [first + ended, *others]


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
