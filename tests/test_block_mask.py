"""flexvarlen.block_mask: the closed form gives create_block_mask's tables, and brute force's."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask

from flexvarlen import PackedLayout, document_block_mask
from tests import oracle
from tests.oracle import Documents
from tests.rows import layout_of, masks, rows

KINDS = ("kv", "full_kv", "q", "full_q")
block_sizes = st.sampled_from([16, 32, 64, 128]).flatmap(
    lambda size: st.sampled_from([(size, size), (2 * size, size), (size, 2 * size)])
)


def listed(block_mask, kind):
    """bool `[rows, columns]`: the blocks that a table lists, each once and inside the row."""
    counts = getattr(block_mask, f"{kind}_num_blocks")[0, 0]
    indices = getattr(block_mask, f"{kind}_indices")[0, 0]
    tokens = block_mask.seq_lengths[0]
    block = block_mask.BLOCK_SIZE[1 if kind.endswith("kv") else 0]
    assert counts.dtype == indices.dtype == torch.int32
    assert indices.is_contiguous()
    assert (counts <= indices.shape[1]).all()
    table = torch.zeros(counts.shape[0], -(-tokens // block), dtype=torch.int32)
    for row, count in enumerate(counts.tolist()):
        for column in indices[row, :count].tolist():
            table[row, column] += 1
    assert (table <= 1).all(), f"{kind} lists a block twice"
    return table.bool()


def brute_force(mask, block_size):
    """bool `[NQ, NK]` twice: the blocks that a dense mask touches, and those it keeps whole."""
    tokens = mask.shape[0]
    block_q, block_k = block_size
    padded = torch.zeros(-(-tokens // block_q) * block_q, -(-tokens // block_k) * block_k)
    padded[:tokens, :tokens] = mask
    tiles = padded.unflatten(1, (-1, block_k)).unflatten(0, (-1, block_q)).sum((1, 3))
    return tiles > 0, tiles == block_q * block_k


def evaluated(block_mask, tokens):
    """bool `[T, T]`: what the mask_mod says of every pair."""
    at = torch.arange(tokens)
    nothing = torch.zeros((), dtype=torch.int64)
    return block_mask.mask_mod(nothing, nothing, at[:, None], at[None, :])


def only_padding(documents, block_size):
    """bool `[NQ]`: the query blocks without a token of a document."""
    return torch.stack([rows.all() for rows in documents.padded().split(block_size[0])])


@settings(max_examples=200)
@given(rows(padding_runs=False), masks(), block_sizes, st.booleans())
@example(Documents((1,), 1), {"causal": True, "window": None}, (128, 128), True)
@example(Documents((0, 0), 300), {"causal": False, "window": None}, (128, 128), True)
@example(Documents((90, 38), 128), {"causal": False, "window": (0, 60)}, (16, 32), True)
def test_tables_are_those_of_create_block_mask(documents, mask, block_size, compact):
    tokens = documents.total_tokens
    dense = oracle.dense(documents, **mask)
    block_mask = document_block_mask(
        layout_of(documents), block_size=block_size, compact=compact, **mask
    )
    theirs = create_block_mask(
        lambda b, h, q, kv: dense[q, kv], None, None, tokens, tokens, "cpu", block_size
    )
    assert block_mask.shape == (1, 1, tokens, tokens)
    assert block_size == block_mask.BLOCK_SIZE
    ours = {kind: listed(block_mask, kind) for kind in KINDS}
    if block_size[0] < block_size[1]:
        # A key block wider than the query blocks can hold the last document's end and, in query
        # blocks of their own, padding rows: listed for those too, and masked.
        blank = only_padding(documents, block_size)
        ours["kv"][blank] = False
        ours["q"][:, blank] = False
    for kind in KINDS:
        assert torch.equal(ours[kind], listed(theirs, kind)), kind
    touched, whole = brute_force(dense, block_size)
    assert torch.equal(ours["full_kv"], whole)
    assert torch.equal(ours["kv"], touched & ~whole)


@given(rows(), masks(), block_sizes, st.booleans())
def test_padding_inside_the_row_hides_no_block(documents, mask, block_size, compact):
    """A block that only padding rows touch may be listed, and is masked; no other is missing."""
    dense = oracle.dense(documents, **mask)
    block_mask = document_block_mask(
        layout_of(documents), block_size=block_size, compact=compact, **mask
    )
    touched, whole = brute_force(dense, block_size)
    partial, full = listed(block_mask, "kv"), listed(block_mask, "full_kv")
    assert not (partial & full).any()
    assert (partial | full)[touched].all(), "a block with keys to see is not listed"
    assert whole[full].all(), "a block with masked pairs is listed as full"
    assert torch.equal(evaluated(block_mask, documents.total_tokens), dense)


@given(rows(), masks(), block_sizes, st.booleans())
def test_backward_tables_are_the_forward_tables_transposed(documents, mask, block_size, compact):
    block_mask = document_block_mask(
        layout_of(documents), block_size=block_size, compact=compact, **mask
    )
    assert torch.equal(listed(block_mask, "q"), listed(block_mask, "kv").T)
    assert torch.equal(listed(block_mask, "full_q"), listed(block_mask, "full_kv").T)


@given(rows(), masks(), block_sizes)
def test_compact_tables_list_what_full_width_tables_list(documents, mask, block_size):
    compact, wide = (
        document_block_mask(layout_of(documents), block_size=block_size, compact=c, **mask)
        for c in (True, False)
    )
    for kind in KINDS:
        assert torch.equal(listed(compact, kind), listed(wide, kind)), kind


@pytest.mark.parametrize(
    ("mask", "widths"),
    [
        ({"causal": True}, (5, 5)),  # ceil(512 / 128) + 1
        ({"causal": False}, (9, 9)),  # 2 * ceil(511 / 128) + 1
        ({"causal": True, "window": 128}, (2, 2)),
        ({"causal": True, "window": 130}, (3, 3)),
        ({"causal": False, "window": (0, 256)}, (3, 3)),
    ],
)
def test_compact_tables_do_not_grow_with_the_row(mask, widths):
    layout = PackedLayout.from_lengths([512] * 64)
    block_mask = document_block_mask(layout, compact=True, **mask)
    assert block_mask.kv_indices.shape[-1] == block_mask.full_kv_indices.shape[-1] == widths[0]
    assert block_mask.q_indices.shape[-1] == block_mask.full_q_indices.shape[-1] == widths[1]


def test_tables_are_full_width_on_the_cpu_and_square_by_default():
    """Its compiled kernel reads a column for every block."""
    block_mask = document_block_mask(PackedLayout.from_lengths([128] * 10))
    assert block_mask.BLOCK_SIZE == (128, 128)
    assert block_mask.kv_indices.shape[-1] == block_mask.q_indices.shape[-1] == 10


@pytest.mark.parametrize("causal", [True, False])
def test_shapes_are_the_same_whatever_the_documents(causal):
    """A shape that varied with the documents would recompile."""
    shapes = set()
    for lengths in ([1] * 8, [256], [100, 0, 156, 744], [300, 200, 400]):
        layout = PackedLayout.from_lengths(
            lengths, total_tokens=1000, capacity=8, max_seqlen_bound=800
        )
        block_mask = document_block_mask(layout, causal=causal, compact=True)
        shapes.add(tuple(x.shape for x in block_mask.as_tuple() if isinstance(x, torch.Tensor)))
    assert len(shapes) == 1


@pytest.mark.gpu
@given(rows(), masks(), block_sizes)
def test_tables_on_the_gpu_are_compact_and_those_of_the_cpu(documents, mask, block_size):
    here = document_block_mask(layout_of(documents), block_size=block_size, compact=True, **mask)
    there = document_block_mask(layout_of(documents, device="cuda"), block_size=block_size, **mask)
    for kind in KINDS:
        for table in (f"{kind}_num_blocks", f"{kind}_indices"):
            assert torch.equal(getattr(here, table), getattr(there, table).cpu()), table


@pytest.mark.gpu
def test_building_the_tables_reads_nothing_back():
    layout = PackedLayout.from_lengths([300, 1, 0, 500], total_tokens=1000, device="cuda")
    document_block_mask(layout)
    torch.cuda.set_sync_debug_mode("error")
    try:
        document_block_mask(layout)
        document_block_mask(layout, causal=False, window=100)
    finally:
        torch.cuda.set_sync_debug_mode("default")
