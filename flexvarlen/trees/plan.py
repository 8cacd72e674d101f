"""Which segments of a tree make a part, and which parts continue which; on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from flexvarlen.layout.boundaries import round_up_to_power_of_two
from flexvarlen.layout.packed_layout import PackedLayout


@dataclass(frozen=True, eq=False)
class PlannedPart:
    """Segments that run together, below one path.

    Attributes:
        segments: indices into `TreePlan.lengths`, in the order of their tokens.
        path: the segments above them, from the root.
        continued: those of `segments` that other parts continue, and their ancestors in this part.
        below: the parts that continue them.
    """

    segments: tuple[int, ...]
    path: tuple[int, ...]
    continued: tuple[int, ...] = ()
    below: list[PlannedPart] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class TreePlan:
    """The parts of a row of trees.

    Attributes:
        lengths: tokens of each segment; those longer than a part are cut into chains.
        parents: the segment above each, -1 at a root.
        roots: the parts with nothing above.
    """

    lengths: tuple[int, ...]
    parents: tuple[int, ...]
    roots: tuple[PlannedPart, ...]

    def tokens_above(self, part: PlannedPart) -> int:
        """Tokens of the path above a part."""
        return sum(self.lengths[segment] for segment in part.path)

    def longest_path(self) -> int:
        """The most tokens above any part."""
        longest, waiting = 0, list(self.roots)
        while waiting:
            part = waiting.pop()
            longest = max(longest, self.tokens_above(part))
            waiting += part.below
        return longest


class PartSizes(NamedTuple):
    """The sizes that all parts of a tree are padded to, and later trees' parts too.

    Attributes:
        tokens: of a part.
        keys_above: before its own.
        capacity: slots for its segments.
        max_depth: a bound on the number of its segments on a path.
    """

    tokens: int
    keys_above: int
    capacity: int
    max_depth: int

    @classmethod
    def of(cls, plan: TreePlan, max_tokens: int, capacity: int, max_depth: int) -> PartSizes:
        """The sizes of a plan's parts; `capacity` and `max_depth` are of the whole trees' layout.

        A part holds at most one piece of each segment: every piece but the last fills a part.
        """
        keys_above = round_up_to_power_of_two(max(plan.longest_path(), max_tokens))
        capacity = min(capacity, max_tokens)
        return cls(max_tokens, keys_above, capacity, max(min(max_depth, capacity), 2))

    def of_queries(self) -> dict[str, int]:
        """Arguments of `PackedLayout.from_tree` for a part's tokens."""
        return self._of(self.tokens, self.capacity, self.max_depth)

    def of_keys(self) -> dict[str, int]:
        """Sizes for its keys: a tree of padding, one segment of all keys above, then the part."""
        return self._of(self.keys_above + self.tokens, self.capacity + 2, self.max_depth + 1)

    @staticmethod
    def _of(tokens: int, capacity: int, max_depth: int) -> dict[str, int]:
        sizes = {"total_tokens": tokens, "max_seqlen_bound": tokens}
        return sizes | {"capacity": capacity, "max_depth": max_depth}


def segments_of(layout: PackedLayout) -> tuple[Sequence[int], Sequence[int]]:
    """The tokens of each segment of a row, and the segment above each, -1 at a root."""
    if layout.segments is not None:
        return layout.segments.lengths, layout.segments.parents
    lengths = layout.lengths or ()
    return lengths, [-1] * len(lengths)


def plan_parts(lengths: Sequence[int], parents: Sequence[int], max_tokens: int) -> TreePlan:
    """Cut trees into few parts of at most `max_tokens` tokens.

    Greedy, from the leaves up, first fit, largest first: a segment joins the subtrees below it that
    fit. The others become parts; several small ones share a part. A segment longer than
    `max_tokens` is cut into a chain. Only segments with a part below them run twice.

    Args:
        lengths: tokens of each segment, in the order of the row: depth first.
        parents: the index of the segment above each, -1 at a root.
        max_tokens: of a part, at least 1.

    >>> plan = plan_parts([4, 3, 3, 2], [-1, 0, 0, 0], max_tokens=7)
    >>> [(part.segments, part.continued) for part in plan.roots]
    [((0, 1), (0,))]
    >>> [(part.segments, part.path) for part in plan.roots[0].below]
    [((2, 3), (0,))]
    """
    lengths, parents = _cut_long(lengths, parents, max_tokens)
    children: dict[int, list[int]] = {}
    for segment, parent in enumerate(parents):
        children.setdefault(parent, []).append(segment)
    piece_tokens, piece_segments = list(lengths), [[segment] for segment in range(len(lengths))]
    cut: list[tuple[int, list[int]]] = []  # the parent, and the segments

    def fill(first: int, parent: int) -> list[list[int]]:
        """Pieces below a parent, the largest first, each into the first bin with room.

        `first` tokens of the first bin are taken.
        """
        bins, sizes = [list[int]()], [first]
        for child in sorted(children.get(parent, ()), key=lambda x: -piece_tokens[x]):
            fits = (i for i, size in enumerate(sizes) if size + piece_tokens[child] <= max_tokens)
            found = next(fits, len(bins))
            if found == len(bins):
                bins.append([])
                sizes.append(0)
            bins[found] += piece_segments[child]
            sizes[found] += piece_tokens[child]
        return bins

    for segment in reversed(range(len(lengths))):
        stays, *others = fill(lengths[segment], segment)
        piece_segments[segment] += stays
        piece_tokens[segment] = sum(lengths[x] for x in piece_segments[segment])
        cut += [(segment, sorted(own)) for own in others]
    cut += [(-1, sorted(own)) for own in fill(0, -1) if own]
    return TreePlan(tuple(lengths), tuple(parents), _link_parts(parents, cut))


def _cut_long(
    lengths: Sequence[int], parents: Sequence[int], most: int
) -> tuple[list[int], list[int]]:
    """Segments of at most `most` tokens; those of one that was longer follow one another."""
    sizes: list[int] = []
    above: list[int] = []
    last: dict[int, int] = {-1: -1}  # of each segment given, the last of its pieces
    for segment, (length, parent) in enumerate(zip(lengths, parents, strict=True)):
        whole, rest = divmod(length, most)
        pieces = [most] * whole + [rest] * (rest > 0 or whole == 0)
        for number, size in enumerate(pieces):
            above.append(len(sizes) - 1 if number else last[parent])
            sizes.append(size)
        last[segment] = len(sizes) - 1
    return sizes, above


def _link_parts(
    parents: Sequence[int], cut: Sequence[tuple[int, list[int]]]
) -> tuple[PlannedPart, ...]:
    """Link each part to those below it, and return the roots."""
    of_segment = {segment: number for number, (_, own) in enumerate(cut) for segment in own}
    continued: list[set[int]] = [set() for _ in cut]
    paths: list[tuple[int, ...]] = []
    for parent, _ in cut:
        path = []
        while parent >= 0:
            path.append(parent)
            continued[of_segment[parent]].add(parent)
            parent = parents[parent]
        paths.append(tuple(reversed(path)))
    parts = [
        PlannedPart(tuple(own), path, tuple(sorted(held)))
        for (_, own), path, held in zip(cut, paths, continued, strict=True)
    ]
    for (parent, own), part in sorted(zip(cut, parts, strict=True), key=lambda x: x[0][1]):
        if parent >= 0 and own:
            parts[of_segment[parent]].below.append(part)
    return tuple(part for (parent, _), part in zip(cut, parts, strict=True) if parent < 0)
