"""Trees drawn at random, and what their tokens see, by brute force."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st

from flexvarlen import DocumentMask, PackedLayout


@dataclass(frozen=True)
class Tree:
    """Segments of a row, depth first; what they leave of `total_tokens` is padding."""

    lengths: tuple[int, ...]
    parents: tuple[int, ...]
    padding: int = 0

    @property
    def total_tokens(self):
        return sum(self.lengths) + self.padding

    def layout(self, **sizes):
        """flexvarlen's."""
        sizes = {"total_tokens": self.total_tokens, **sizes}
        return PackedLayout.from_tree(self.lengths, self.parents, **sizes)

    def last_queries(self, keys_before, *, device="cpu", **options):
        """The mask of all tokens but the first, at least one, which are keys alone."""
        row = self.layout(device=device, max_depth=8)
        tokens = max(min(1, self.total_tokens), self.total_tokens - keys_before)
        queries = PackedLayout.from_lengths([tokens], device=device)
        spec = replace(DocumentMask.of(row, **options).spec, cross=True)
        return DocumentMask(queries, spec, layout_k=row)

    def batch(self, vocabulary, **sizes):
        """Random tokens of it, as a model takes them."""
        rng = torch.Generator().manual_seed(0)
        ids = torch.randint(3, vocabulary, (1, self.total_tokens), generator=rng)
        return {"input_ids": ids, "packed_layout": self.layout(**sizes)}

    def path_of(self, segment):
        """The tokens from the root to the end of a segment."""
        tokens = []
        while segment >= 0:
            start = sum(self.lengths[:segment])
            tokens = [*range(start, start + self.lengths[segment]), *tokens]
            segment = self.parents[segment]
        return tokens

    def dense(self, window=None, chunk=None):
        """bool `[T, T]`: each segment's queries on its path, which is a document."""
        mask = torch.zeros(self.total_tokens, self.total_tokens, dtype=torch.bool)
        for segment, length in enumerate(self.lengths):
            path = self.path_of(segment)
            for at in range(len(path) - length, len(path)):
                first = 0
                if window is not None:
                    first = max(first, at - window + 1)
                if chunk is not None:
                    first = max(first, at - at % chunk)
                mask[path[at], path[first : at + 1]] = True
        return mask

    def leaves(self):
        return [x for x in range(len(self.lengths)) if x not in self.parents]


@st.composite
def trees(draw, most_tokens=90):
    """Up to 12 segments on up to 6 levels, some of them empty or of one token."""
    lengths, parents, path = [], [], []
    for segment in range(draw(st.integers(1, 12))):
        depth = draw(st.integers(0, min(len(path), 5)))
        path = path[:depth]
        parents.append(path[-1] if path else -1)
        path.append(segment)
        lengths.append(draw(st.sampled_from([0, 1, 2, 9, 30, most_tokens])))
    return Tree(tuple(lengths), tuple(parents), draw(st.sampled_from([0, 1, 40])))


windows = st.none() | st.integers(1, 60)
chunks = st.none() | st.integers(1, 60)
EXAMPLES = {
    "group": Tree((40, 9, 30, 1), (-1, 0, 0, 0), 12),
    "levels": Tree((33, 5, 7, 20, 0, 3, 64, 8), (-1, 0, 1, 1, 0, 4, -1, 6)),
    "trees_and_documents": Tree((10, 3, 50, 20, 1, 1), (-1, 0, -1, -1, 3, 3), 1),
}
