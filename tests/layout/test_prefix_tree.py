"""`PrefixTree`: rows come back along their paths, and share what they may."""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.layout.prefix_tree import PrefixTree

# Of few tokens, so that rows share a lot. Each is a token, and whether it is learned.
tokens = st.tuples(st.integers(0, 1), st.booleans())
texts = st.lists(st.lists(tokens, max_size=8), min_size=1, max_size=8)
depths = st.none() | st.integers(1, 4)


def tree_of(texts, **options):
    """Also the tokens of each row."""
    rows = [np.array([token for token, _ in text], np.int64)[:, None] for text in texts]
    learned = [np.array([own for _, own in text], bool) for text in texts]
    for own in learned:
        own[:1] = False
    return PrefixTree(rows, learned, **options), [torch.from_numpy(row[:, 0]) for row in rows]


def plain_segments(texts, max_depth, min_tokens):
    """By the rule in words, of each segment: its whole path, and where on it the segment begins."""
    found = []

    def part_by(rows, at):
        return [[row for row in rows if row[at][0] == token] for token in {x[at][0] for x in rows}]

    def is_shared(rows, at):
        there = [row for row in rows if len(row) > at]
        labels = {row[at + 1][0] for row in there if len(row) > at + 1 and row[at + 1][1]}
        return len({row[at][0] for row in there}) == 1 and len(labels) < 2

    def grow(rows, start, depth):
        longest = max(rows, key=len)
        stop = start
        while stop < len(longest) and is_shared(rows, stop):
            stop += 1
        branches = part_by([row for row in rows if len(row) > stop], stop)
        if len(branches) == 1:  # what they have there is learned to go on in several ways
            branches = part_by([row for row in rows if len(row) > stop + 1], stop + 1)
        is_kept = not branches or (stop - start >= min_tokens and depth != max_depth)
        if is_kept:
            found.append((tuple(token for token, _ in longest[:stop]), start))
        for branch in branches:
            grow(branch, *((stop, depth + 1) if is_kept else (start, depth)))

    grow(texts, 0, 1)
    return Counter(found)


@given(texts, depths, st.integers(1, 4))
def test_segments_are_those_of_a_plain_search(texts, max_depth, min_tokens):
    tree, rows = tree_of(texts, max_depth=max_depth, min_tokens=min_tokens)
    found = Counter((tuple(rows[row][:stop].tolist()), start) for row, start, stop in tree.pieces)
    assert found == plain_segments(texts, max_depth, min_tokens) - Counter([((), 0)])


@given(texts, depths, st.integers(1, 4))
def test_each_row_is_its_path(texts, max_depth, min_tokens):
    tree, rows = tree_of(texts, max_depth=max_depth, min_tokens=min_tokens)
    layout = PackedLayout.from_tree(tree.lengths, tree.parents)  # depth first, or it raises
    tokens = tree.take(rows) if tree.pieces else torch.empty(0)
    for row, path in zip(rows, tree.paths(), strict=True):
        assert torch.equal(tokens[path], row)
        assert torch.equal(layout.position_ids()[path], torch.arange(len(row)))
    depths = []
    for parent in tree.parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    assert tree.depth == max(depths, default=0) <= (max_depth or len(depths))


def test_rows_that_share_little_still_share_among_themselves():
    """Below `min_tokens` or `max_depth` the rows part by what follows, from the same token on."""
    texts = [[(x, False) for x in row] for row in ([1, 2, 3, 4], [1, 2, 3, 5], [1, 7, 8, 9])]
    texts.append([*texts[-1][:-1], (6, False)])
    for options in ({"min_tokens": 2}, {"max_depth": 2, "min_tokens": 2}):
        tree, _ = tree_of(texts, **options)
        assert tree.parents == [-1, 0, 0, -1, 3, 3]
        assert tree.lengths == [3, 1, 1, 3, 1, 1]
    assert tree_of(texts, max_depth=2)[0].parents == [-1, 0, 0, 0, 0]


def test_large_branches_come_before_small_ones_and_equals_in_the_order_of_their_first_rows():
    tree, _ = tree_of([[(x, False) for x in row] for row in ([7], [9, 5], [3], [9, 4], [3, 2])])
    assert tree.parents == [-1, 0, 0, -1, -1]
    assert tree.ends == [3, 1, 4, 2, 4]


def test_a_conversation_is_one_run_of_keys_behind_which_its_turns_branch_off():
    conversation = [(x, False) for x in range(30)]
    turns = [conversation[:n] + [(99, True)] * 5 for n in (10, 20, 30)]
    tree, _ = tree_of(turns)
    assert tree.lengths == [10, 10, 5, 15, 5]
    assert tree.parents == [-1, 0, 1, 1, 0]


def test_rows_that_each_continue_the_last():
    """They are parts of the longest, not segments of a path of 199."""
    for learned in (False, True):
        tree, _ = tree_of([[(x, learned) for x in range(n)] for n in range(1, 200)])
        assert (tree.lengths, tree.ends) == ([199], [0] * 199)
