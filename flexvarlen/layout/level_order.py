"""The segments of a row by their depth: all roots, then all segments below a root, and so on.

Recurrent layers run in this order, as a segment starts from the final state of its parent. In a
level the segments keep the order of the row, so those of one parent follow one another.

Shapes: S = number of segment slots; L = max_depth, a bound on the number of levels.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from flexvarlen.layout.boundaries import host_int32


@dataclass(eq=False)
class LevelOrder:
    """The order, and what precedes each segment.

    Attributes:
        table: int32 `[4, S + 1]`, on the device of the tokens. Its first three rows describe the
            segments in this order: the first token; the parent, as an index in this order, -1 at a
            root; the token before it on its path, -1 where there is none. Tokens are counted in
            this order. The fourth row has the index in this order of each segment of the row. Spare
            slots are empty and come last.
        levels: int32 `[L + 1]` on the host: the first segment of each level, then their number.
        index: of each segment of the row, its index in this order; on the host.
    """

    table: Tensor
    levels: Tensor
    index: tuple[int, ...]

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        parents: Sequence[int],
        depths: Sequence[int],
        capacity: int,
        max_depth: int,
        device: torch.device,
    ) -> LevelOrder:
        """The order of valid segments, given depth first."""
        count = len(lengths)
        order = sorted(range(count), key=depths.__getitem__)
        index = [0] * count
        for i, segment in enumerate(order):
            index[segment] = i
        sizes = [lengths[segment] for segment in order]
        starts = list(accumulate(sizes, initial=0))
        above = [-1 if parents[x] < 0 else index[parents[x]] for x in order]
        before: list[int] = []
        for parent in above:
            has_tokens = parent >= 0 and sizes[parent] > 0
            last = starts[parent + 1] - 1 if has_tokens else -1
            before.append(before[parent] if parent >= 0 and not has_tokens else last)
        spare = capacity + 1 - count
        first = starts + [starts[-1]] * (spare - 1)
        last_slots = list(range(count, capacity + 1))
        rows = (first, above + [-1] * spare, before + [-1] * spare, index + last_slots)
        flat = host_int32([x for row in rows for x in row], device)
        at_depth = [depths[segment] for segment in order]
        at_level = [bisect_left(at_depth, level) for level in range(max_depth + 1)]
        return cls(
            flat.view(4, -1).to(device, non_blocking=True),
            torch.tensor(at_level, dtype=torch.int32, device="cpu"),
            tuple(index),
        )
