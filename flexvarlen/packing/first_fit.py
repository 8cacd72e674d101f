"""First fit: each document goes into the first row with room. Time is independent of `capacity`.

Rows that still have room for the shortest document are kept in two structures:

- *Steps*: rows with more space than any earlier row, in row order. Space increases along the
  steps, so bisection finds the first row that a document fits into. After most documents, the row
  is still a step, and nothing else has to be done.
- *Tree*: all other rows, and any steps in excess of `STEPS`. Each leaf holds the space of one row,
  and each inner node the maximum over its leaves.

The space in a row only shrinks, so a row that becomes a step remains one until it is used. A row is
therefore removed from the tree at most once per document in it, plus once for each time that it is
evicted because another row became a step. Time is O(n log n) for n documents, memory is O(n).
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
from numpy.typing import NDArray

STEPS = 2048
"""Large enough for random lengths (a million log-normal lengths need about 100), and small enough
that an insertion moves at most 32 KiB."""


def first_fit(lengths: NDArray[np.int64], capacity: int) -> list[list[int]]:
    """Return rows of indices into `lengths`, which must be non-empty with values in 1..capacity."""
    documents = lengths.tolist()
    shortest = min(documents)
    rows: list[list[int]] = []
    # No two rows fit into one, or the later row's first document would be in the earlier row.
    waiting = _Spaces(min(len(documents), 2 * (sum(documents) // (capacity + 1)) + 1))
    tree = waiting.tree  # tree[1] is the maximum; a method call here would cost 10% of the time
    spaces, at = [shortest - 1], [-1]  # the first entry is a sentinel, not a row

    for index, length in enumerate(documents):
        step = bisect_left(spaces, length)
        if step == len(spaces):
            while length > spaces[-1] < tree[1] and len(spaces) < STEPS:
                at.append(waiting.first_above(spaces[-1]))
                spaces.append(waiting.take(at[-1]))
            step = len(spaces) - 1
        if spaces[step] >= length:
            row, end = at[step], at[step + 1] if step + 1 < len(at) else 0
            rows[row].append(index)
            left, floor = spaces[step] - length, spaces[step - 1]
            if left > floor:
                spaces[step] = floor = left
                step += 1
            else:
                del spaces[step], at[step]
                if left >= shortest:
                    waiting.put(row, left)
            if row + 1 < end:  # promote rows that become steps; after the last step this can wait
                while tree[1] > floor and (row := waiting.first_above(floor)) < end:
                    floor = waiting.take(row)
                    spaces.insert(step, floor)
                    at.insert(step, row)
                    step += 1
                while len(spaces) > STEPS:
                    waiting.put(at.pop(), spaces.pop())
        elif tree[1] >= length:  # there are too many steps
            row = waiting.first_above(length - 1)
            rows[row].append(index)
            left = waiting.take(row) - length
            if left >= shortest:
                waiting.put(row, left)
        else:
            left = capacity - length
            if left > spaces[-1] and len(spaces) < STEPS:
                spaces.append(left)
                at.append(len(rows))
            elif left >= shortest:
                waiting.put(len(rows), left)
            rows.append([index])
    return rows


class _Spaces:
    """Max tree over the space of each row (0 if not in it); finds the first row above a value."""

    def __init__(self, rows: int) -> None:
        self.leaves = 1 << (rows - 1).bit_length()
        self.tree = [0] * (2 * self.leaves)

    def put(self, row: int, space: int) -> None:
        """Add a row that is not in the tree."""
        tree, node = self.tree, self.leaves + row
        while node and tree[node] < space:
            tree[node] = space
            node >>= 1

    def take(self, row: int) -> int:
        """Remove a row from the tree and return its space."""
        tree, node = self.tree, self.leaves + row
        space, largest = tree[node], 0
        tree[node] = 0
        while node > 1:
            sibling = tree[node ^ 1]
            if sibling > largest:
                largest = sibling
            node >>= 1
            if tree[node] == largest:  # another row has the same space
                break
            tree[node] = largest
        return space

    def first_above(self, floor: int) -> int:
        """Return the first row with more space than `floor`, which must be below the maximum."""
        tree, node, leaves = self.tree, 1, self.leaves
        while node < leaves:
            node *= 2
            if tree[node] <= floor:
                node += 1
        return node - leaves
