"""Trees of a row over ranks: each whole on one, with its columns, or a sentence."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import flexvarlen as fv
from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.parallel.shard import shard_batch
from flexvarlen.recurrent.documents import RecurrentDocuments

# For each tree the lengths of its segments: the root, its two branches, and theirs.
TREES = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=5), min_size=1, max_size=8)
DEPTH_FIRST = {0: (), 1: (0,), 3: (0, 1), 4: (0, 1), 2: (0,)}
"""The segments of a tree in the order of the row, and those above each."""


def row_of(trees, total_tokens):
    """Tokens that are their index in the row."""
    lengths, parents = [], []
    for segments in trees:
        place = {}
        for segment, above in DEPTH_FIRST.items():
            if segment < len(segments):
                place[segment] = len(lengths)
                lengths.append(segments[segment])
                parents.append(place[above[-1]] if above else -1)
    layout = PackedLayout.from_tree(lengths, parents, total_tokens=total_tokens, max_depth=3)
    return {"input_ids": torch.arange(total_tokens)[None], "packed_layout": layout}


@pytest.mark.parametrize("other", [[5, 6, 9, 9], [7, 8, 9]], ids=["shared", "nothing shared"])
def test_a_row_whose_samples_share_nothing_is_like_the_others(other):
    """Its layout has no segments; recurrent layers run, and its trees are whole, as in any."""
    collate = fv.TreeCollator(total_tokens=20, capacity=4, max_seqlen_bound=10)
    row = collate([{"input_ids": ids, "labels": ids} for ids in ([5, 6, 7, 8], other)])
    layout = shard_batch(row, 0, 2, method="contiguous")["packed_layout"]
    assert not RecurrentDocuments(layout, group="0").over_ranks
    assert len(layout.split(torch.zeros(10, 2))) == 1


def test_a_rank_without_a_tree_says_so():
    shard = shard_batch(row_of([[3, 1]], 8), 1, 2)["packed_layout"]
    assert repr(shard).startswith("PackedLayout(0 trees of 0 segments, shard=1 of 2, ")


@settings(max_examples=50)
@given(TREES, st.integers(1, 5), st.integers(0, 7))
@example([[3, 2, 2, 1]], 4, 0)  # ranks without a tree
@example([[0, 0], [4], [5, 1, 2]], 2, 1)
def test_each_rank_has_whole_trees(trees, ranks, padding):
    """With their branches, of equal sizes on all ranks, and each token on one of them."""
    longest = max(map(sum, trees)) + sum(map(sum, trees)) // ranks  # so surely all fit
    row = row_of(trees, ranks * (longest + padding + 1))
    shards = [shard_batch(row, rank, ranks) for rank in range(ranks)]
    tokens = torch.cat([shard["input_ids"] for shard in shards], 1)
    assert tokens.sort().values.equal(row["input_ids"])
    paths = [
        path.tolist()
        for shard in shards
        for path in shard["packed_layout"].unfold(shard["input_ids"])
    ]
    expected = [path.tolist() for path in row["packed_layout"].unfold(row["input_ids"])]
    assert sorted(filter(None, paths)) == sorted(filter(None, expected))
    sizes = {
        (x.total_tokens, x.capacity, x.max_seqlen_bound, x.segments.max_depth, x.shard.ranks)
        for x in (shard["packed_layout"] for shard in shards)
    }
    assert len(sizes) == 1


def test_columns_go_along_and_positions_do_not():
    samples = [[5, 6, 7, 8], [5, 6, 7, 9], [4, 4]]
    row = fv.TreeCollator(total_tokens=14)(samples)
    row["token"] = torch.arange(14)[None]
    shards = [shard_batch(row, rank, 2) for rank in range(2)]
    for shard in shards:
        assert "position_ids" not in shard  # a model refuses them beside trees
        assert shard["num_items_in_batch"] == 3 + 3 + 1
        for name in ("input_ids", "label_counts", "sample_counts", "shift_labels"):
            assert shard[name].equal(row[name].gather(1, shard["token"]))


def test_samples_that_share_nothing_are_not_cut_either():
    """Else it would depend on the batch whether a rank has whole samples."""
    samples = [[1, 2, 3], [4, 5, 6, 7, 8], [9, 9, 9]]
    row = fv.TreeCollator(total_tokens=14)(samples)
    layouts = [shard_batch(row, rank, 2)["packed_layout"] for rank in range(2)]
    assert row["packed_layout"].segments is None
    assert [layout.lengths for layout in layouts] == [(5,), (3, 3)]
    assert all(layout.shard.exchange is None for layout in layouts)
    with pytest.raises(ValueError, match="of 4 tokens each, got one of 5"):
        shard_batch(fv.TreeCollator(total_tokens=8)(samples[:2]), 0, 2)


def test_a_tighter_placement_is_found_where_even_work_leaves_no_room():
    """The longest first, each to the rank with the least work: 5 3 and 4 4, and no room for 2."""
    row = row_of([[length] for length in (5, 4, 4, 3, 2)], 18)
    layouts = [shard_batch(row, rank, 2)["packed_layout"] for rank in range(2)]
    assert sorted(sorted(x.segments.lengths) for x in layouts) == [[2, 3, 4], [4, 5]]


@pytest.mark.parametrize(
    ("trees", "words"),
    [
        ([[3, 2, 2]], "of 4 tokens each, got one of 7 tokens .* raise total_tokens to at least 14"),
        ([[3], [3], [2]], "got one of 2 tokens that finds no room, 8 in all; raise total_tokens, "),
    ],
)
def test_trees_that_do_not_fit_are_a_sentence(trees, words):
    with pytest.raises(ValueError, match=words):
        shard_batch(row_of(trees, 8), 0, 2)
