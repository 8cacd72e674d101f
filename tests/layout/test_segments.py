"""`PrefixTree`: rows come back along their paths, and share what they may."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.layout.segments import PrefixTree

# Of few tokens, so that rows share a lot.
texts = st.lists(st.lists(st.integers(0, 1), max_size=8), min_size=1, max_size=8)


def rows_of(ids, learns=False):
    """Tokens, and labels of the next tokens."""
    labels = [[*row[1:], -100] if learns else [-100] * len(row) for row in ids]
    return [torch.tensor(pair, dtype=torch.long).T for pair in zip(ids, labels, strict=True)]


@given(texts, st.booleans(), st.one_of(st.none(), st.integers(1, 4)), st.integers(1, 4))
def test_each_row_is_its_path(ids, learns, max_depth, min_tokens):
    rows = rows_of(ids, learns)
    tree = PrefixTree.from_rows(rows, max_depth=max_depth, min_tokens=min_tokens)
    layout = PackedLayout.from_tree(tree.lengths, tree.parents)  # depth first, or it raises
    tokens = tree.take(rows)[:, 0] if tree.pieces else torch.empty(0)
    for row, path in zip(rows, tree.paths(), strict=True):
        assert torch.equal(tokens[path], row[:, 0])
        assert torch.equal(layout.position_ids()[path], torch.arange(len(row)))
    depths = []
    for parent in tree.parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    assert tree.depth == max(depths, default=0) <= (max_depth or len(depths))
    for segment, length in enumerate(tree.lengths):
        assert length >= min_tokens or segment not in tree.parents


@given(texts)
def test_nothing_is_computed_twice(ids):
    rows = rows_of(ids)
    prefixes = {tuple(row[:n]) for row in ids for n in range(1, len(row) + 1)}
    tree = PrefixTree.from_rows(rows)
    assert sum(tree.lengths) == len(prefixes)
    above = [parent for parent in tree.parents if parent >= 0]
    assert all(above.count(parent) > 1 for parent in above)  # cut only where rows part


def test_rows_that_share_little_still_share_among_themselves():
    """Below `min_tokens` or `max_depth` the rows part by what follows, from the same token on."""
    rows = rows_of([[1, 2, 3, 4], [1, 2, 3, 5], [1, 7, 8, 9], [1, 7, 8, 6]])
    for options in ({"min_tokens": 2}, {"max_depth": 2, "min_tokens": 2}):
        tree = PrefixTree.from_rows(rows, **options)
        assert tree.parents == [-1, 0, 0, -1, 3, 3]
        assert tree.lengths == [3, 1, 1, 3, 1, 1]
    assert PrefixTree.from_rows(rows, max_depth=2).parents == [-1, 0, 0, 0, 0]


def test_rows_that_each_continue_the_last():
    """They are parts of the longest, not segments of a path of 199."""
    for learns in (False, True):
        tree = PrefixTree.from_rows(rows_of([range(n) for n in range(1, 200)], learns))
        assert (tree.lengths, tree.ends) == ([199], [0] * 199)
