"""Layouts of trees: positions, paths, and parents that are no trees."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given

import flexvarlen as fv
from flexvarlen import PackedLayout
from tests.trees import EXAMPLES, trees


@given(trees())
def test_positions_and_paths(tree):
    layout = tree.layout()
    positions = layout.position_ids()
    for segment, length in enumerate(tree.lengths):
        path = tree.path_of(segment)
        own = path[len(path) - length :]
        assert positions[own].tolist() == list(range(len(path) - length, len(path)))
    expected = [tree.path_of(leaf) for leaf in tree.leaves()]
    assert [path.tolist() for path in layout.paths()] == expected
    x = torch.arange(tree.total_tokens)
    assert [own.tolist() for own in layout.unfold(x[None])] == expected


@pytest.mark.parametrize(
    ("parents", "words"),
    [
        ([-1, 1, 0], "come before their children, got 1 at index 1"),
        ([-1, 2, 0], "come before their children, got 2 at index 1"),
        ([-1, -2, 0], "come before their children, got -2 at index 1"),
        ([-1, -1, 0], "depth first, got parent 0 at index 2"),
        ([-1, 0], "one segment for each of the 3 lengths"),
    ],
)
def test_parents_that_are_no_trees(parents, words):
    with pytest.raises(ValueError, match=words):
        PackedLayout.from_tree([3, 2, 1], parents)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"capacity": 2}, "at least the 3 segments"),
        ({"max_depth": 1}, "at least the segments of the longest path, 2"),
        ({"max_seqlen_bound": 5}, "max_seqlen_bound must be at least"),
        ({"total_tokens": 5}, "total_tokens must be at least the tokens of all segments, 6, got 5"),
    ],
)
def test_trees_that_do_not_fit(sizes, words):
    with pytest.raises(ValueError, match=words):
        PackedLayout.from_tree([3, 2, 1], [-1, 0, 0], **sizes)


def test_roots_alone_are_plain_documents():
    layout = PackedLayout.from_tree([3, 2], [-1, -1])
    assert layout.segments is None
    assert layout.lengths == (3, 2)
    deeper = PackedLayout.from_tree([3, 2], [-1, -1], max_depth=2)
    assert deeper.segments.max_depth == 2
    assert torch.equal(deeper.position_ids(), layout.position_ids())


def test_copies():
    layout = EXAMPLES["levels"].layout(max_depth=4)
    assert torch.equal(pickle.loads(pickle.dumps(layout)).position_ids(), layout.position_ids())
    moved = layout.to("meta")
    assert moved.segments.table.device.type == "meta"
    assert moved.segments.max_depth == 4


def test_what_takes_one_vector_of_a_document_refuses():
    layout = EXAMPLES["group"].layout()
    x = torch.zeros(layout.total_tokens, 4)
    with pytest.raises(NotImplementedError, match="unfold"):
        fv.pool(x, layout)
    with pytest.raises(NotImplementedError, match="unfold"):
        fv.document_logprobs(x, torch.zeros(layout.total_tokens, dtype=torch.long), layout)
