"""The segments of a row whose documents are trees: paths that share their beginnings.

A tree is laid out depth first: a segment, then the subtrees of its children. A token sees its own
segment up to itself, and the segments above it. Positions count along the path.

Shapes: T = total_tokens, S = number of segment slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from flexvarlen.layout.arguments import integers, to_int_or_none
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
        most = deepest if max_depth is None else to_int_or_none(max_depth)
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
    pieces = [np.arange(0)]
    while segment >= 0:
        pieces.append(np.arange(starts[segment], starts[segment + 1]))
        segment = parents[segment]
    return torch.from_numpy(np.concatenate(pieces[::-1]))


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


def token_bounds(table: Tensor, total_tokens: int) -> tuple[Tensor, Tensor]:
    """For each token, one past the last that may see it, and its position; int32 `[T]` each.

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
