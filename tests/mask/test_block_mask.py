"""The tables of a document BlockMask are brute force's and create_block_mask's, block for block."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask

from flexvarlen import PackedLayout, document_block_mask
from flexvarlen.mask.block_mask import block_mask_of
from flexvarlen.mask.picture import block_states
from flexvarlen.mask.table_shapes import Tables
from tests.mask_cases import BLOCK_SIZES, KINDS, MaskCase, cases
from tests.oracle import Documents

TABLES = ("kv", "full_kv", "q", "full_q")
block_sizes = st.sampled_from(BLOCK_SIZES)
TOGETHER = 5  # cases an example: half of what hypothesis takes goes by examples


def listed(block_mask, table):
    """bool `[rows, columns]`: the blocks that a table lists, each once and inside the row."""
    counts = getattr(block_mask, f"{table}_num_blocks")[0, 0]
    indices = getattr(block_mask, f"{table}_indices")[0, 0]
    of_keys = table.endswith("kv")
    tokens, block = block_mask.seq_lengths[of_keys], block_mask.BLOCK_SIZE[of_keys]
    columns = -(-tokens // block)
    assert counts.dtype == indices.dtype == torch.int32
    assert indices.is_contiguous()
    assert (counts <= indices.shape[1]).all()
    valid = torch.arange(indices.shape[1]) < counts[:, None]
    assert (indices[~valid] == 0).all(), f"{table} has something behind its lists"
    assert ((indices >= 0) & (indices < columns)).all(), f"{table} lists a block outside the row"
    times = torch.zeros(counts.shape[0], columns, dtype=torch.int32)
    times.scatter_add_(1, indices.long(), valid.int())
    assert (times <= 1).all(), f"{table} lists a block twice"
    return times.bool()


def brute_force(dense, block_size):
    """bool `[NQ, NK]` twice: the blocks that a dense mask touches, and those it keeps whole."""
    (tokens_q, tokens_k), (block_q, block_k) = dense.shape, block_size
    padded = torch.zeros(-(-tokens_q // block_q) * block_q, -(-tokens_k // block_k) * block_k)
    padded[:tokens_q, :tokens_k] = dense
    tiles = padded.unflatten(1, (-1, block_k)).unflatten(0, (-1, block_q)).sum((1, 3))
    return tiles > 0, tiles == block_q * block_k


def evaluated(block_mask):
    """bool `[Tq, Tk]`: what the mask_mod says of every pair."""
    queries, keys = (torch.arange(tokens) for tokens in block_mask.seq_lengths)
    nothing = torch.zeros((), dtype=torch.int64)
    return block_mask.mask_mod(nothing, nothing, queries[:, None], keys[None, :])


def check(case, block_size, compact):
    """Partial and full blocks, forward, transposed and drawn, and the mask_mod, by brute force."""
    dense, mask = case.dense(), case.mask()
    block_mask = block_mask_of(mask, block_size=block_size, compact=compact)
    assert block_mask.shape == (1, 1, *dense.shape)
    assert block_size == block_mask.BLOCK_SIZE
    touched, whole = brute_force(dense, block_size)
    ours = {table: listed(block_mask, table) for table in TABLES}
    assert torch.equal(ours["full_kv"], whole)
    assert torch.equal(ours["kv"], touched & ~whole)
    assert torch.equal(ours["full_q"], whole.T)
    assert torch.equal(ours["q"], (touched & ~whole).T)
    assert torch.equal(evaluated(block_mask), dense)
    assert torch.equal(block_states(mask, block_size), touched.to(torch.int8) + whole)


@pytest.mark.parametrize("kind", KINDS)
def test_tables_and_mask_are_brute_forces(kind, pytestconfig):
    """`--mask-cases N` sets the number of random cases a kind."""
    drawn = st.tuples(cases(kind), block_sizes, st.booleans())

    @settings(max_examples=-(-pytestconfig.getoption("--mask-cases") // TOGETHER))
    @given(st.tuples(*[drawn] * TOGETHER))
    def run(several):
        for case, block_size, compact in several:
            check(case, block_size, compact)

    run()


@pytest.mark.parametrize(
    "case",
    [
        MaskCase(Documents((1,), 1)),
        MaskCase(Documents((0, 0), 300), {"causal": False}),
        MaskCase(Documents((1,) * 300, 300)),
        MaskCase(Documents((300,), 300), {"causal": False}),
        MaskCase(Documents((90, 38), 128), {"causal": False, "window": (0, 60)}),
        MaskCase(Documents((100, 300, 8), 408, frozenset({1})), {"causal": False}),
        # queries of documents without keys, keys of documents without queries
        MaskCase(Documents((60, 0, 60), 120), {"causal": False}, Documents((0, 300, 60), 400)),
        # more queries than keys, bottom-right: the first queries see nothing
        MaskCase(Documents((200, 90), 300), {"align": "bottom_right"}, Documents((30, 90), 120)),
        MaskCase(Documents((200,), 200), {"prefix": (500,), "window": 7}),
        # as wide as tables get
        MaskCase(Documents((1, 63), 64), {"chunk": 2, "causal": False}),
        MaskCase(Documents((64,), 64), {"causal": False, "window": (2, 2)}, Documents((64,), 64)),
        MaskCase(Documents((20,), 20), {"chunk": 2**31 - 1}),
    ],
    ids=lambda case: f"{case.documents.lengths[:3]}{sorted(case.options)}",
)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_corner_cases(case, block_size):
    for compact in (True, False):
        check(case, block_size, compact)


@settings(max_examples=100)
@given(st.sampled_from(KINDS).flatmap(cases), block_sizes)
@example(MaskCase(Documents((90, 38), 100 + 28)), (16, 32))
def test_tables_are_those_of_create_block_mask(case, block_size):
    dense = case.dense()
    theirs = create_block_mask(
        lambda b, h, q, kv: dense[q, kv], None, None, *dense.shape, "cpu", block_size
    )
    ours = block_mask_of(case.mask(), block_size=block_size)
    for table in TABLES:
        counts, indices = (
            [getattr(mask, f"{table}_{part}") for mask in (ours, theirs)]
            for part in ("num_blocks", "indices")
        )
        assert torch.equal(*counts)
        listed_both = torch.arange(indices[0].shape[-1]) < counts[0][..., None]
        assert torch.equal(*(x.where(listed_both, 0) for x in indices)), table


@given(st.sampled_from(KINDS).flatmap(cases), block_sizes)
def test_spare_slots_and_a_longer_bound_change_no_list(case, block_size):
    few, many = (
        block_mask_of(case.mask(**shapes), block_size=block_size, compact=True)
        for shapes in ({}, {"capacity": 32, "max_seqlen_bound": 1000})
    )
    for table in TABLES:
        assert torch.equal(listed(few, table), listed(many, table))


@pytest.mark.parametrize(
    ("mask", "widths"),
    [
        ({}, (5, 5)),  # ceil(512 / 128) + 1
        ({"causal": False}, (9, 9)),  # 2 * ceil(511 / 128) + 1
        ({"window": 128}, (2, 2)),
        ({"window": 130}, (3, 3)),
        ({"causal": False, "window": (0, 256)}, (3, 3)),
        ({"chunk": 129}, (2, 2)),
        ({"chunk": 129, "causal": False}, (3, 3)),
        ({"prefix": 10}, (9, 9)),
        ({"prefix": 10, "window": 128}, (3, 3)),
    ],
)
def test_compact_tables_do_not_grow_with_the_row(mask, widths):
    layout = PackedLayout.from_lengths([512] * 64)
    block_mask = block_mask_of(MaskCase(None, mask).on(layout), compact=True)
    assert block_mask.kv_indices.shape[-1] == block_mask.full_kv_indices.shape[-1] == widths[0]
    assert block_mask.q_indices.shape[-1] == block_mask.full_q_indices.shape[-1] == widths[1]


@pytest.mark.parametrize("kind", [{}, {"causal": False}, {"chunk": 100}, {"prefix": 7}])
def test_shapes_depend_on_the_sizes_not_on_the_documents(kind):
    """A shape that varied with the documents would recompile."""
    shapes = set()
    for lengths in ([1] * 8, [256], [100, 0, 156, 744], [300, 200, 400]):
        layout = PackedLayout.from_lengths(
            lengths, total_tokens=1000, capacity=8, max_seqlen_bound=800
        )
        mask = MaskCase(None, kind).on(layout)
        shapes.add(tuple(x.shape for x in mask.tables((128, 128), compact=True)))
    assert len(shapes) == 1


# ---- on the GPU: one Triton launch, against the torch path ----

GPU_BLOCK_SIZES = ((128, 128), (256, 128), (48, 80))


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", GPU_BLOCK_SIZES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_triton_kernel_writes_what_the_torch_path_writes(kind, block_size, pytestconfig):
    @settings(max_examples=pytestconfig.getoption("--mask-cases"))
    @given(cases(kind))
    def run(case):
        here = case.mask().tables(block_size, compact=True)
        there = case.mask("cuda").tables(block_size, compact=True)
        for name in Tables._fields:
            mine, theirs = getattr(here, name), getattr(there, name)
            assert torch.equal(mine, theirs.cpu()), name
            assert mine.stride() == theirs.stride(), name
            assert theirs.data_ptr() % 16 == 0, f"{name} is not aligned"

    run()


@pytest.mark.gpu
def test_triton_kernel_on_a_long_row():
    """More slots, blocks and columns than the small cases have."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 9000, (60,), generator=generator).tolist()
    layout = PackedLayout.from_lengths(lengths, total_tokens=sum(lengths) + 777)
    for options in ({}, {"causal": False}, {"window": 4096}, {"prefix": 1000}):
        case = MaskCase(None, options)
        here = case.on(layout).tables((128, 128), compact=True)
        there = case.on(layout.to("cuda")).tables((128, 128), compact=True)
        for name in Tables._fields:
            assert torch.equal(getattr(here, name), getattr(there, name).cpu()), (name, options)


@pytest.mark.gpu
def test_a_build_is_one_launch_and_reads_nothing_back():
    document_block_mask(PackedLayout.from_lengths([1], device="cuda"))  # compiled
    torch.cuda.set_sync_debug_mode("error")
    try:
        layout = PackedLayout.from_lengths([300, 1, 0, 500], total_tokens=1000, device="cuda")
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            document_block_mask(layout)
        document_block_mask(layout, causal=False, window=100)
        document_block_mask(layout, prefix=[3, 1, 0, 200], layout_k=layout)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    kernels = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert [e.name for e in kernels] == ["_document_tables"]


@pytest.mark.gpu
def test_boundaries_overwritten_past_their_bound_stop_the_process_not_the_mask():
    """What no check on the host can see fails an assertion on the device: nothing is cut off."""
    program = """
import torch
from flexvarlen import PackedLayout, document_block_mask
layout = PackedLayout.from_lengths([128] * 8, device="cuda", max_seqlen_bound=128)
layout.cu_seqlens.copy_(torch.tensor([0] + [1024] * 8, dtype=torch.int32))
document_block_mask(layout)
torch.cuda.synchronize()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode != 0
    assert "a document does not fit the layout or max_seqlen_bound" in done.stdout + done.stderr
