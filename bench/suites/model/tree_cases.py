"""Cases of the suite "trees", and the trees that they are made of."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor

from flexvarlen.bench.suites.model.geometries import GEOMETRIES, GeometryCase
from flexvarlen.layout.packed_layout import PackedLayout

Kind = Literal["attention", "eager", "compiled", "memory", "parts"]
STEPS: tuple[Kind, ...] = ("eager", "compiled", "memory")

REPEATED = "repeated:"
"""Begins a variant in which every sample is a document of its own, its prompt included."""

SEGMENTS = "segments:"
"""Begins a variant in which every segment is a document of its own: as many tokens, no trees."""

Form = Literal["equal", "ragged", "paths", "chain", "agents"]
"""Trees that are alike; `Tree.ragged`; `Tree.uneven`, of which all tokens have labels; one tree in
which each root but the first continues the one before it; `Tree.of_agents`."""

Shape = tuple[tuple[int, int], ...]
"""For each level of a tree, the number of segments per parent, and their tokens."""


@dataclass(frozen=True)
class Tree:
    """Segments of a row, depth first, as in `PackedLayout.from_tree`."""

    lengths: tuple[int, ...]
    parents: tuple[int, ...]

    @classmethod
    def of(cls, levels: Shape, groups: int, shift: int = 0) -> Tree:
        """Equal trees; `shift`: tokens that every second leaf gives to the one before it.

        >>> Tree.of(((1, 5), (2, 3)), groups=1)
        Tree(lengths=(5, 3, 3), parents=(-1, 0, 0))
        """
        segments: list[tuple[int, int]] = []

        def grow(parent: int, levels: Shape) -> None:
            (count, tokens), *below = levels
            for branch in range(count):
                moved = 0 if below or parent < 0 else shift
                segments.append((tokens - moved if branch % 2 else tokens + moved, parent))
                if below:
                    grow(len(segments) - 1, tuple(below))

        for _ in range(groups):
            grow(-1, levels)
        lengths, parents = zip(*segments, strict=True)
        return cls(lengths, parents)

    @classmethod
    def of_agents(cls, levels: Shape, rollouts: int, seed: int) -> Tree:
        """Rollouts of one task, of which each turn is a leaf, as `share_prefixes` lays them out.

        A turn has between 0.4 and 1.6 times the tokens of the last level. The turns behind it see
        the half of it that is not reasoning, in a segment with a tool's answer of 50 to 300 tokens
        for each 375 of that level.

        >>> Tree.of_agents(((1, 5), (3, 3)), rollouts=1, seed=0).parents
        (-1, 0, 1, 2, 1, 0)
        """
        (_, prompt), (turns, tokens) = levels
        draw, segments = random.Random(seed).randint, [(prompt, -1)]
        for _ in range(rollouts):
            of_turns = [draw(tokens * 2 // 5, tokens * 8 // 5) for _ in range(turns)]
            above = [0, *range(len(segments), len(segments) + turns - 1)]
            for length, parent in zip(of_turns[:-1], above, strict=False):
                answer = draw(tokens * 2 // 15, tokens * 4 // 5)
                segments.append((length - length // 2 + answer, parent))
            segments += reversed(list(zip(of_turns, above, strict=True)))
        lengths, parents = zip(*segments, strict=True)
        return cls(lengths, parents)

    def ragged(self, seed: int) -> Tree:
        """The same trees with segments of very different lengths, of at most as many tokens."""
        draw = random.Random(seed).randint
        drawn = [draw(x - x // 2, x + x // 2) for x in self.lengths]
        share = sum(self.lengths) / sum(drawn)
        return Tree(tuple(int(x * share) for x in drawn), self.parents)

    def uneven(self, seed: int) -> Tree:
        """The same trees; each segment below a root has 0.6 to 1.4 times its tokens."""
        draw, segments = random.Random(seed).randint, zip(self.lengths, self.parents, strict=True)
        lengths = (x if parent < 0 else draw(x * 3 // 5, x * 7 // 5) for x, parent in segments)
        return Tree(tuple(lengths), self.parents)

    def chained(self) -> Tree:
        """One tree of these, each root a child of the root before it.

        >>> Tree.of(((1, 5), (1, 3)), groups=3).chained()
        Tree(lengths=(5, 3, 5, 3, 5, 3), parents=(-1, 0, 0, 2, 2, 4))
        """
        parents, root = [], -1
        for segment, parent in enumerate(self.parents):
            parents.append(root if parent < 0 else parent)
            root = segment if parent < 0 else root
        return Tree(self.lengths, tuple(parents))

    def longest(self) -> int:
        """Tokens of the largest whole tree."""
        roots = torch.tensor(self.parents).lt(0).cumsum(0) - 1
        return int(roots.repeat_interleave(torch.tensor(self.lengths)).bincount().max())

    def paths(self) -> list[Tensor]:
        """int64 `[L]` on the host: the tokens of each sample, from its root to its leaf."""
        return list(PackedLayout.from_tree(self.lengths, self.parents).paths())

    def labelled(self, form: Form) -> list[bool]:
        """Which segments have labels: the turns of agents; all of paths; else all but roots."""
        if form == "agents":
            return [segment not in self.parents for segment in range(len(self.parents))]
        return [parent >= 0 or form == "paths" for parent in self.parents]

    def counts(self) -> Tensor:
        """int64 `[T]` on the host: the number of samples that share each token."""
        return torch.cat(self.paths()).bincount()


@dataclass(frozen=True)
class TreeCase(GeometryCase):
    """A row of equal trees, and the same samples without sharing; attention has the model's heads.

    Attributes:
        levels, groups: of `Tree.of`.
        max_row_tokens: tokens of a row of repeated samples at most.
        compiler: a backend of torch.compile; "" where nothing is compiled.
        other_trees: that follow the first one, in a compiled step.
    """

    kind: Kind
    levels: Shape
    groups: int
    max_row_tokens: int
    compiler: str = ""
    other_trees: int = 0
    form: Form = "equal"

    @property
    def name(self) -> str:
        (_, root), *others = self.levels
        kind = [self.kind] if self.form == "equal" else [self.kind, self.form]
        shape = [str(root), *(f"{n}x{tokens}" for n, tokens in others)]
        return "-".join([self.geometry, *kind, *shape])

    @property
    def heads(self) -> tuple[int, int, int]:
        config = GEOMETRIES[self.geometry](self.layers)
        return config.num_attention_heads, config.num_key_value_heads, config.head_dim

    @property
    def samples(self) -> int:
        return self.groups * prod(count for count, _ in self.levels)

    @property
    def checked(self) -> Sequence[int]:
        """The samples that are compared with the reference: those of the last tree.

        Of agents every third turn of the last rollout, as all would take half a minute.
        """
        every = range(self.samples)
        last = every if self.form == "chain" else every[-(self.samples // self.groups) :]
        return last[::3] if self.form == "agents" else last

    @property
    def tokens(self) -> int:
        return sum(self.tree().lengths)

    def tree(self, index: int = 0) -> Tree:
        """The row; other indices have as many tokens in other answers."""
        if self.form == "agents":
            return Tree.of_agents(self.levels, self.groups, self.seed)
        step = max(1, self.levels[-1][1] // (2 + 2 * self.other_trees))
        tree = Tree.of(self.levels, self.groups, index * step)
        if self.form == "paths":
            return tree.uneven(self.seed)
        if self.form == "ragged":
            return tree.ragged(self.seed)
        return tree.chained() if self.form == "chain" else tree

    def rows(self, paths: Sequence[Tensor]) -> list[Sequence[Tensor]]:
        """The paths of the samples, row by row: as many as fit; in steps equally many.

        Of samples that differ in length, each row is filled before the next one begins.
        """
        found: list[Sequence[Tensor]] = []
        if self.form in ("paths", "agents"):
            for path in paths:
                row = found.pop() if found else ()
                fits = sum(map(len, [*row, path])) <= self.max_row_tokens
                found += [[*row, path]] if fits or not row else [row, [path]]
            return found
        for count in range(1, self.samples + 1):
            if self.kind in STEPS and self.samples % count:
                continue  # equally many, so that one compiled graph serves all rows
            rows = [paths[first : first + count] for first in range(0, len(paths), count)]
            if not found or all(sum(map(len, row)) <= self.max_row_tokens for row in rows):
                found = rows
        return found

    def data(self) -> dict[str, Any]:
        sizes = {"samples": self.samples, "tokens": self.tokens, "heads": list(self.heads)}
        return super().data() | sizes
