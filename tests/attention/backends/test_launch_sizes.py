"""What kernels over cu_seqlens are launched for: the documents of the row, or of any.

A plain kernel stands in for FlashAttention; see `tests.attention.backends.plain_kernel`.
"""

from __future__ import annotations

import pickle
import sys
from functools import partial
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from flexvarlen import DocumentMask, PackedLayout, packed_attention
from flexvarlen.attention.backends.cu_seqlens import kernel as cu_seqlens_kernel
from flexvarlen.layout import launch_sizes
from flexvarlen.measure import watch_compilation
from tests.attention.backends.plain_kernel import attend
from tests.attention.test_trees import by_path
from tests.oracle import differentiate, random_qkv
from tests.overwrite import overwrite
from tests.trees import Tree

TOKENS = 256
LONG = TOKENS + 100
MANY = [[LONG], [100, 150], [LONG - 2, 1, 1], [8] * 8, [0, 0, 5], []]
TREES = [
    Tree((150, 150, 56), (-1, 0, 0)),
    Tree((70, 20, 5, 100, 0, 60), (-1, 0, 1, 1, -1, 4), LONG - 255),
    Tree((0, 0, 5), (-1, 0, 1), LONG - 5),
    Tree((LONG,), (-1,)),
    Tree((), (), LONG),
]
SIZES = {"total_tokens": LONG, "capacity": 8, "max_seqlen_bound": LONG}


@pytest.fixture(autouse=True)
def _long_rows_are_short(monkeypatch):
    monkeypatch.setattr(launch_sizes, "SHORT_ROW", TOKENS)


def row_of(lengths, tokens=LONG, **options):
    sizes = {"total_tokens": tokens, "capacity": 8, "max_seqlen_bound": tokens}
    return PackedLayout.from_lengths(lengths, **sizes | options)


def attention(backend, q, layout):
    """Of q to itself."""
    return attend(backend, q, q, q, DocumentMask.of(layout))[0]


@pytest.mark.parametrize("compiler", [None, "aot_eager"])
def test_kernels_are_launched_for_the_documents_that_there_are(backend, compiler):
    """Other documents recompile nothing; a short row, or an unknown one, keeps its bounds."""
    q = torch.randn(LONG, 2, 8, requires_grad=True)
    given = backend.given

    def run(layout):
        return attention(backend, q * 2, layout)

    torch._dynamo.reset()
    called = torch.compile(run, fullgraph=True, backend=compiler) if compiler else run
    with watch_compilation() as stats:
        for lengths in MANY:
            given.clear()
            layout = row_of(lengths)
            called(layout).sum().backward()
            assert len(given) == 2  # forward and backward
            for segments, _ in given:
                slots = max(1, len(lengths))  # kernels refuse a batch of none
                assert segments.cu_seqlens_q.tolist() == layout.cu_seqlens[: slots + 1].tolist()
                assert segments.max_seqlen_q == segments.max_seqlen_k == max([2, *lengths])
    assert stats.compilations == (1 if compiler else 0)
    given.clear()
    run(layout.replace(num_docs=None, max_seqlen=None))  # as only the device knows them
    [(segments, _)] = given
    assert (segments.cu_seqlens_q.shape[0], segments.max_seqlen_q) == (9, LONG)


@pytest.mark.parametrize("tokens", [TOKENS, LONG])
def test_a_tail_is_zeroed_where_there_is_one(backend, monkeypatch, tokens):
    """In a compiled graph too, which is not made anew for it."""
    zeroed = []

    def zero(cu_seqlens, *tensors):
        zeroed.append(cu_seqlens[-1].item())
        for x in tensors:
            x[cu_seqlens[-1] :] = 0

    monkeypatch.setattr(cu_seqlens_kernel, "_zero_tail", zero)
    q = torch.randn(tokens, 2, 8, requires_grad=True)
    cu_seqlens_kernel._is_first(q)
    run = partial(attention, backend, q)
    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    with watch_compilation() as stats:
        for called in (run, compiled):
            for lengths in ([tokens], [tokens - 9], [9, tokens - 9], [5]):
                zeroed.clear()
                out = called(row_of(lengths, tokens, capacity=2))
                (grad,) = torch.autograd.grad(out.sum(), q)
                end = sum(lengths)
                assert set(zeroed) == ({end} if end < tokens else set()), lengths
                assert not out[end:].any()
                assert not grad[end:].any()
                assert out.isfinite().all()
    assert stats.compilations == 1


def rows_of(tokens):
    """Functions that make the row that is traced, and others."""
    lengths = ([70, tokens - 70], [1, tokens - 11, 4], [30] * 7)
    return [partial(row_of, own, tokens) for own in lengths]


ROWS = {
    "short": rows_of(TOKENS),
    "long": rows_of(LONG),
    "trees": [partial(tree.layout, **SIZES, max_depth=3) for tree in TREES],
}


@pytest.mark.parametrize("trace", ["export", "strict export", "make_fx"])
@pytest.mark.parametrize("row", ROWS)
def test_a_program_that_outlives_its_call_is_made_for_any_documents(backend, row, trace):
    """The sizes that it was traced with are constants to it; the boundaries are read again."""
    layout, *others = (make() for make in ROWS[row])

    class Model(torch.nn.Module):
        def forward(self, q):
            return attention(backend, q, layout)

    q = torch.randn(layout.total_tokens, 2, 8)
    if trace == "make_fx":
        program = make_fx(Model())(q)
    else:
        program = torch.export.export(Model(), (q,), strict=trace == "strict export").module()
    for other in others:
        expected = attention(backend, q, other)
        overwrite(layout, other)
        torch.testing.assert_close(program(q), expected)


@pytest.mark.gpu
def test_inductors_cuda_graphs_hold_what_the_row_needs(monkeypatch):
    """`mode="reduce-overhead"` records anew for a tail; a user's own graph is made for any row."""
    captured = []

    def zero(cu_seqlens, *tensors):
        captured.append(torch.cuda.is_current_stream_capturing())
        real(cu_seqlens, *tensors)

    real = cu_seqlens_kernel._zero_tail
    monkeypatch.setattr(cu_seqlens_kernel, "_zero_tail", zero)
    sizes = {"total_tokens": TOKENS, "capacity": 2, "max_seqlen_bound": TOKENS, "device": "cuda"}
    full, padded = [TOKENS - 9, 9], [100]
    x = torch.randn(TOKENS, 2, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)

    def run(layout):
        return packed_attention(x * 2, x, x, layout, backend="varlen")

    def step(called, layout):
        out = called(layout)
        return out.detach().clone(), torch.autograd.grad(out.sum(), x)[0].clone()

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, mode="reduce-overhead")
    with watch_compilation() as stats:
        for lengths, zeroes in ((full, False), (padded, True), (full, False)):
            layout = PackedLayout.from_lengths(lengths, **sizes)
            captured.clear()
            for _ in range(3):  # warm up, record, replay
                torch.compiler.cudagraph_mark_step_begin()
                found = step(compiled, layout)
            assert any(captured) is zeroes
            torch.testing.assert_close(found, step(run, layout), atol=2e-2, rtol=2e-2)
            assert not any(x[sum(lengths) :].any() for x in found)
    assert stats.compilations == 1
    captured.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        out = run(layout)
    assert captured == [True]
    other = PackedLayout.from_lengths(padded, **sizes)
    overwrite(layout, other)
    graph.replay()
    torch.testing.assert_close(out, run(other), atol=2e-2, rtol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("who", ["another operator inside inductor's graph", "a user beside it"])
def test_other_captures_are_made_for_any_documents(who):
    """Numbers that inductor is not handed are constants of its graph, as of a user's own."""
    long = 2148
    sizes = {"total_tokens": long, "capacity": 4, "max_seqlen_bound": long, "device": "cuda"}
    layout = PackedLayout.from_lengths([long - 9, 9], **sizes)
    x = torch.randn(long, 2, 64, dtype=torch.bfloat16, device="cuda")

    def attention(q, documents=layout):
        return packed_attention(q, q, q, documents, backend="varlen")

    name = f"flexvarlen_tests::{'opaque' if who.startswith('another') else 'plain'}"
    schema = "(Tensor q) -> Tensor"
    opaque = torch.library.custom_op(name, lambda q: attention(q), mutates_args=(), schema=schema)
    opaque.register_fake(torch.empty_like)
    torch._dynamo.reset()
    compiled = torch.compile(lambda q: opaque(q * 2), fullgraph=True, mode="reduce-overhead")
    for _ in range(3):  # warm up, record, replay
        torch.compiler.cudagraph_mark_step_begin()
        compiled(x)
    graphs = []
    if who == "a user beside it":
        trees = sys.modules["torch._inductor.cudagraph_trees"]
        stream = trees.get_manager(x.device.index).stream  # of a pool: others get it, too
        for _ in range(2):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                out = attention(x * 2)
            graphs.append((graph, out))
    for lengths in ([1, 700, 40, long - 741], [long], [100]):
        other = PackedLayout.from_lengths(lengths, **sizes)
        overwrite(layout, other)
        expected = attention(x * 2, other)
        torch.compiler.cudagraph_mark_step_begin()
        found = [compiled(x).clone()] if not graphs else []
        for graph, out in graphs:
            graph.replay()
            found.append(out)
        for out in found:
            torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)


def test_a_pickled_layout_still_recompiles_nothing(backend):
    run = partial(attention, backend, torch.randn(LONG, 2, 8))
    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="eager")
    with watch_compilation() as stats:
        for lengths in ([LONG], [9, 50, 3]):
            # As DataLoader's workers hand a layout over: tensors lose what Dynamo wrote on them.
            compiled(pickle.loads(ForkingPickler.dumps(row_of(lengths))))
    assert stats.compilations == 1


@pytest.mark.parametrize("compiler", [None, "aot_eager"])
def test_kernels_are_launched_for_the_segments_of_trees(backend, compiler):
    """Inside segments, then for two levels, each with two slots a segment."""
    *qkv, grad = random_qkv(LONG, 4, 2, 16)
    given = backend.given

    def run(q, k, v, layout):
        return attend(backend, q, k, v, DocumentMask.of(layout))[0]

    torch._dynamo.reset()
    called = torch.compile(run, fullgraph=True, backend=compiler) if compiler else run
    with watch_compilation() as stats:
        for tree in TREES:
            given.clear()
            layout = tree.layout(**SIZES, max_depth=3)
            found = differentiate(lambda *x, to=layout: called(*x, to), qkv, grad)
            expected = differentiate(by_path(tree), qkv, grad)
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-3)
            slots, segment = max(1, len(tree.lengths)), max([2, *tree.lengths])
            whole = max([2, *layout.segments.tree_lengths()])
            launches = [(slots, segment), (2 * slots, whole), (2 * slots, whole)]
            assert [
                (len(x.boundaries.cu_seqlens_q) - 1, x.boundaries.max_seqlen_q) for x in given
            ] == 2 * launches  # forward and backward
            assert {x.boundaries.max_seqlen_k for x in given} == {segment}
    assert stats.compilations == (1 if compiler else 0)


def test_documents_that_one_side_does_not_know_are_launched_for(backend):
    """Cross-attention: slots past the known ones hold keys all the same."""
    known = PackedLayout.from_lengths([5, 6], total_tokens=LONG, capacity=4)
    keys = PackedLayout.from_lengths([5, 6, 7, 8], total_tokens=LONG, capacity=4)
    keys = keys.replace(num_docs=None, max_seqlen=None)
    mask = DocumentMask.of(known, layout_k=keys)
    q = torch.randn(LONG, 2, 8)
    attend(backend, q, q, q, mask)
    boundaries = backend.given[-1].boundaries
    assert boundaries.cu_seqlens_k.diff().tolist() == [5, 6, 7, 8]
    assert boundaries.cu_seqlens_q.shape == boundaries.cu_seqlens_k.shape


def test_a_row_of_millions_of_tokens_has_sizes_too():
    """Their product would not fit a stride."""
    tokens = 2**26
    layout = PackedLayout.from_lengths([1] * 5000 + [tokens - 5000], device="cpu")
    assert layout.launch.read(compiling=False) == (5001, tokens - 5000, 0)
