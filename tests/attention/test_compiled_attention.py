"""packed_attention inside torch.compile(fullgraph=True): one compilation, whatever the documents.

Shape legend: T = tokens of the row.
"""

from __future__ import annotations

import random
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from flexvarlen import PackedLayout, packed_attention, why_not
from tests import malformed_boundaries, oracle
from tests.attention.accuracy import assert_right
from tests.backends import FLASH, differentiable, kernels, with_values
from tests.oracle import Documents, differentiate, random_qkv

TOKENS = 256
CAPACITY = 8
BOUND = 200
HEADS = (6, 2)

compiled_kernels = [
    *kernels("sdpa", gpu=False),
    *kernels("reference", "flex"),
    *kernels("flex_fa4", *FLASH, "nested", cpu=False),
]


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def packings(count=10):
    """Rows of other documents each: empty ones, single tokens, full rows, padding tails."""
    made = [
        Documents((TOKENS - BOUND, BOUND), TOKENS),
        Documents((0, 0, 1), TOKENS),
        Documents((32,) * 8, TOKENS),
    ]
    pick = random.Random(0)
    while len(made) < count:
        lengths = [pick.randint(0, 120) for _ in range(pick.randint(1, CAPACITY))]
        if sum(lengths) <= TOKENS:
            made.append(Documents(tuple(lengths), TOKENS))
    return made


def inputs(device, dtype):
    head_dim = 16 if device == "cpu" else 64
    return random_qkv(TOKENS, *HEADS, head_dim, dtype=dtype, device=device)


def boundaries(documents, device):
    """int32 `[CAPACITY + 1]`, the last one repeated, as a collator of fixed shapes makes them."""
    ends = torch.tensor([0, *documents.lengths]).cumsum(0).tolist()
    ends += ends[-1:] * (CAPACITY + 1 - len(ends))
    return torch.tensor(ends, dtype=torch.int32, device=device)


def layout_outside(q, k, v, layout, options):
    return packed_attention(q, k, v, layout, **options)


def layout_inside(q, k, v, cu_seqlens, options):
    layout = PackedLayout.from_cu_seqlens(
        cu_seqlens, total_tokens=TOKENS, capacity=CAPACITY, max_seqlen_bound=BOUND
    )
    return packed_attention(q, k, v, layout, **options)


def layout_from_flags(q, k, v, flags, options):
    starts, padding = flags
    layout = PackedLayout.from_starts(
        starts, padding_T=padding, capacity=CAPACITY + 1, max_seqlen_bound=TOKENS
    )
    return packed_attention(q, k, v, layout, **options)


WAYS = {
    "layout_outside": (
        layout_outside,
        lambda documents, device: PackedLayout.from_lengths(
            documents.lengths,
            total_tokens=TOKENS,
            capacity=CAPACITY,
            max_seqlen_bound=BOUND,
            device=device,
        ),
    ),
    "layout_inside": (layout_inside, boundaries),
    "flags_inside": (
        layout_from_flags,
        lambda documents, device: (documents.starts().to(device), documents.padded().to(device)),
    ),
}


# One way is enough for the second mask, which `nested` has not.
UNEVEN = {"causal": False, "window": (30, 5)}


@pytest.mark.parametrize(
    ("kernel", "way", "mask"),
    [
        with_values(param, way, mask)
        for param in compiled_kernels
        for way, mask in [*((way, {"causal": True}) for way in WAYS), ("layout_inside", UNEVEN)]
        if (param.values[0][0], mask) != ("nested", UNEVEN)
    ],
)
@pytest.mark.sampled(4)
def test_other_documents_compile_nothing_again(kernel, way, mask):
    name, device, dtype = kernel
    function, boundaries_of = WAYS[way]
    *qkv, grad = inputs(device, dtype)
    options = {"backend": name, **mask}
    # Graphs and breaks are Dynamo's: on the CPU, where inductor is slow, it compiles two of them.
    in_inductor = device != "cpu" or name == "flex" or (name, mask) == ("sdpa", UNEVEN)
    compiler = "inductor" if in_inductor else "aot_eager"
    compiled = torch.compile(function, fullgraph=True, backend=compiler)
    for documents in packings():
        given = boundaries_of(documents, device)
        assert_right(
            lambda *x, given=given: compiled(*x, given, options),
            lambda *x, of=documents: oracle.attend(*x, of, **mask)[0],
            qkv,
            grad,
            has_backward=differentiable(kernel),
            blank=documents.padded().to(device),
        )
    assert counters["stats"]["unique_graphs"] == 1
    assert sum(counters["graph_break"].values()) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", kernels("flex", "flex_fa4", *FLASH, cpu=False))
def test_compiled_layer_reads_nothing_back(kernel):
    name, device, dtype = kernel
    *qkv, grad = inputs(device, dtype)
    compiled = torch.compile(layout_inside, fullgraph=True)
    first, second = (boundaries(documents, device) for documents in packings(5)[3:])

    def step(cu_seqlens):
        return differentiate(lambda *x: compiled(*x, cu_seqlens, {"backend": name}), qkv, grad)

    step(first)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(second)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def computed(*tensors):
    """Of each another tensor, in the order of memory of rotated heads."""
    return [x.transpose(0, 1).contiguous().sin().transpose(0, 1) for x in tensors]


@pytest.mark.parametrize("kernel", kernels("flex", "flex_fa4", *FLASH, "cudnn"))
def test_compiled_without_gradients(kernel):
    """Of what the graph does not return: Inductor frees it, and gives it strides of its own."""
    name, device, dtype = kernel
    call = {"device": device, "dtype": dtype, "num_heads": HEADS[0], "num_kv_heads": HEADS[1]}
    reason = why_not(name, compiled=True, needs_grad=False, **call)
    if reason is not None:
        pytest.skip(reason)
    *qkv, grad = inputs(device, dtype)

    @torch.no_grad()
    @torch.compile(fullgraph=True)
    def ours(q, k, v, given):
        return layout_inside(*computed(q, k, v), given, {"backend": name})

    for documents in packings(5)[3:]:
        given = boundaries(documents, device)
        assert_right(
            lambda *x, given=given: ours(*x, given),
            lambda *x, of=documents: oracle.attend(*computed(*x), of)[0],
            qkv,
            grad,
            has_backward=False,
            blank=documents.padded().to(device),
        )


def test_eager_flex_compiles_once_for_all_documents():
    *qkv, grad = inputs("cpu", torch.float32)
    for documents in packings():
        for shapes in ({}, {"capacity": CAPACITY, "max_seqlen_bound": TOKENS}):
            layout = PackedLayout.from_lengths(documents.lengths, total_tokens=TOKENS, **shapes)
            assert_right(
                partial(packed_attention, layout=layout, backend="flex"),
                lambda *x, of=documents: oracle.attend(*x, of)[0],
                qkv,
                grad,
                has_backward=False,
                blank=documents.padded(),
            )
    assert counters["stats"]["unique_graphs"] == 1


def run_malformed(device, *cases):
    """In a process of its own: an index out of range aborts it, a device assertion spoils CUDA."""
    return subprocess.run(
        [sys.executable, "-m", "tests.malformed_boundaries", device, *cases],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        check=False,
    )


def test_malformed_boundaries_in_a_compiled_graph_fail_with_the_sentence():
    result = run_malformed("cpu", *malformed_boundaries.CASES)
    assert result.returncode == 0, result.stdout + result.stderr
    for case in malformed_boundaries.CASES.values():
        assert f"{case.name}: {case.sentence}" in result.stdout, result.stdout
    assert f"{malformed_boundaries.GOOD}: no error" in result.stdout


@pytest.mark.gpu
@pytest.mark.parametrize("case", malformed_boundaries.CASES)
def test_malformed_boundaries_on_the_gpu_fail_with_the_sentence(case):
    result = run_malformed("cuda", case)
    everything = result.stdout + result.stderr  # a device prints its assertion itself
    assert f"{malformed_boundaries.GOOD}: no error" in result.stdout, everything
    assert malformed_boundaries.CASES[case].sentence in everything, everything
    assert f"{case}: no error" not in everything, everything


def test_layers_of_other_scales_and_caps_trace_whole():
    """As when each layer is compiled by itself: a number that varies becomes symbolic."""
    q, k, v, _ = random_qkv(16, *HEADS, 16)
    layout = PackedLayout.from_lengths([16])

    def layer(scale, softcap):
        options = {"scale": scale, "softcap": softcap}
        return packed_attention(q, k, v, layout, backend="reference", **options)

    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    for numbers in ((0.5, 3.0), (0.25, 5.0), (2.0, 1.5)):
        torch.testing.assert_close(compiled(*numbers), layer(*numbers))


@pytest.mark.usefixtures("_flex_without_inductor")
@pytest.mark.slow
def test_eager_flex_takes_any_number_of_scales():
    """Dynamo gives up on a function after eight compilations: each scale is a kind of its own."""
    q, k, v, _ = random_qkv(128, 2, 2, 16)
    layout = PackedLayout.from_lengths([128])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # a kind that is full says so
        for number in range(10):
            packed_attention(q, k, v, layout, backend="flex", scale=0.1 + number / 100)
    assert counters["stats"]["unique_graphs"] == 10


@pytest.mark.usefixtures("_flex_without_inductor")
@pytest.mark.slow
def test_eager_flex_past_dynamos_limit():
    """Ever other strides, here: the run would end with Dynamo's error, hours after its start."""
    (q, k, v, _), layout = random_qkv(128, 4, 4, 16, seed=1), PackedLayout.from_lengths([50, 78])
    expected = packed_attention(q, k, v, layout, backend="reference")
    with torch._dynamo.config.patch(recompile_limit=1):
        first = packed_attention(q, k, v, layout, backend="flex", scale=0.25)
        strided = [x.movedim(0, 2).contiguous().movedim(2, 0) for x in (q, k, v)]
        with pytest.warns(UserWarning, match="rows of one size"):
            second = packed_attention(*strided, layout, backend="flex", scale=0.25)
        again = packed_attention(q, k, v, layout, backend="flex", scale=0.25)
    for found in (first, second, again):
        torch.testing.assert_close(found, expected)


def test_sdpa_makes_no_zeros_on_the_host():
    """Where it records CUDA graphs, Inductor would move them to the GPU, and not the boundaries."""
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph

    layout = PackedLayout.from_lengths([3, 5])
    q = torch.randn(8, 2, 16)
    torch.compile(lambda q: packed_attention(q, q, q, layout, backend="sdpa"), backend=keep)(q)
    (graph,) = graphs
    assert "sdpa_forward" in graph.code
    assert "zeros" not in graph.code
