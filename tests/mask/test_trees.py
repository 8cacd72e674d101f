"""Masks over trees: equal to brute force, whatever the tree, window, chunk and block size."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexvarlen import DocumentMask, PackedLayout
from flexvarlen.mask.block_mask import block_mask_of
from flexvarlen.mask.picture import FULL, block_states
from flexvarlen.measure import watch_compilation
from flexvarlen.trees.keys_above import last_keys
from tests.mask.test_block_mask import brute_force, evaluated, listed
from tests.trees import EXAMPLES, Tree, chunks, trees, windows


@given(trees(), windows, chunks)
def test_dense_mask(tree, window, chunk):
    mask = DocumentMask.of(tree.layout(), window=window, chunk=chunk)
    expected = tree.dense(window, chunk)
    assert torch.equal(mask.to_dense(), expected)
    assert mask.num_pairs() == int(expected.sum())


@given(trees(), windows, chunks, st.integers(0, 90))
def test_dense_mask_of_the_last_queries(tree, window, chunk, keys_before):
    mask = tree.last_queries(keys_before, window=window, chunk=chunk)
    expected = tree.dense(window, chunk)[tree.total_tokens - mask.layout.total_tokens :]
    assert torch.equal(mask.to_dense(), expected)
    assert mask.num_pairs() == int(expected.sum())


@given(
    trees(),
    windows,
    chunks,
    st.sampled_from([(16, 16), (16, 32), (32, 16), (128, 128)]),
    st.booleans(),
    st.sampled_from([0, 0, 1, 16, 50]),
)
def test_blocks_cover_the_mask(tree, window, chunk, block_size, compact, keys_before):
    """No block with a visible pair is missing, and a full one hides nothing."""
    mask = DocumentMask.of(tree.layout(), window=window, chunk=chunk)
    dense = tree.dense(window, chunk)
    if keys_before:
        mask = tree.last_queries(keys_before, window=window, chunk=chunk)
        dense = dense[tree.total_tokens - mask.layout.total_tokens :]
    touched, whole = brute_force(dense, block_size)
    states = block_states(mask, block_size)
    assert (states[touched] > 0).all(), "a block is missing"
    assert whole[states == FULL].all(), "a full block hides something"
    block_mask = block_mask_of(mask, block_size=block_size, compact=compact)
    for full in ("", "full_"):
        kv, q = (listed(block_mask, f"{full}{x}") for x in ("kv", "q"))
        assert torch.equal(kv, q.T), "the transpose lists other blocks"


@given(trees(), windows, chunks, st.integers(0, 90), st.integers(0, 90))
def test_without_the_first_keys(tree, window, chunk, keys_before, dropped):
    """Segments may lose some of their tokens, or all, and windows and chunks count as before."""
    mask = tree.last_queries(keys_before, window=window, chunk=chunk)
    dropped = min(dropped, tree.total_tokens - mask.layout.total_tokens)
    expected = mask.to_dense()[:, dropped:]
    row = last_keys(mask.layout_k, dropped)
    assert torch.equal(row.position_ids(), mask.layout_k.position_ids()[dropped:])
    mask = DocumentMask(mask.layout, mask.spec, layout_k=row)
    assert torch.equal(mask.to_dense(), expected)
    touched, whole = brute_force(expected, (16, 16))
    states = block_states(mask, (16, 16))
    assert (states[touched] > 0).all(), "a block is missing"
    assert whole[states == FULL].all(), "a full block hides something"


@pytest.mark.parametrize("tree", EXAMPLES.values(), ids=EXAMPLES)
@pytest.mark.parametrize("options", [{}, {"window": 7}, {"chunk": 10}])
def test_mask_mod(tree, options):
    block_mask = block_mask_of(DocumentMask.of(tree.layout(), **options))
    assert torch.equal(evaluated(block_mask), tree.dense(**options))
    below = block_mask_of(tree.last_queries(33, **options))
    assert torch.equal(evaluated(below), tree.dense(**options)[33:])


def test_few_blocks_are_listed_for_nothing():
    """The tables of a group of answers: the prompt's blocks, and the answer's own."""
    layout = PackedLayout.from_tree([1024] + [512] * 4, [-1] + [0] * 4)
    counts = DocumentMask.of(layout).num_blocks()
    assert counts.full + counts.partial == 36 + 4 * (4 * 8 + 10)
    assert counts.partial == 8 + 4 * 4


@pytest.mark.parametrize(
    "options",
    [
        {"causal": False},
        {"prefix": 2},
        {"window": (3, 1), "causal": False},
        {"layout_k": EXAMPLES["group"].layout()},
    ],
    ids=str,
)
def test_other_masks_are_refused(options):
    with pytest.raises(NotImplementedError, match="trees need causal attention"):
        DocumentMask.of(EXAMPLES["group"].layout(), **options)


def test_other_trees_compile_nothing_again():
    sizes = {"total_tokens": 160, "capacity": 8, "max_seqlen_bound": 160, "max_depth": 3}
    layouts = [
        Tree((30, 10, 20, 5), (-1, 0, 0, 2)).layout(**sizes),
        Tree((1, 1, 100, 3, 4), (-1, 0, -1, 2, 2)).layout(**sizes),
        Tree((100, 60), (-1, 0)).layout(**sizes),
    ]
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda layout: (DocumentMask.of(layout, window=9).dense(), layout.position_ids()),
        fullgraph=True,
        backend="eager",
    )
    with watch_compilation() as stats:
        for layout in layouts:
            dense, positions = compiled(layout)
            assert torch.equal(dense, DocumentMask.of(layout, window=9).dense())
            assert torch.equal(positions, layout.position_ids())
    assert stats.compilations == 1


@pytest.mark.gpu
@settings(max_examples=40, deadline=None)
@given(trees(most_tokens=300), windows, chunks, st.sampled_from([(32, 32), (64, 128), (128, 128)]))
def test_tables_of_a_gpu_are_those_of_the_cpu(tree, window, chunk, block_size):
    if not tree.total_tokens:
        return
    found, expected = (
        DocumentMask.of(tree.layout(device=device), window=window, chunk=chunk).tables(
            block_size, compact=True
        )
        for device in ("cuda", "cpu")
    )
    for name, mine, theirs in zip(found._fields, found, expected, strict=True):
        assert torch.equal(mine.cpu(), theirs), name
