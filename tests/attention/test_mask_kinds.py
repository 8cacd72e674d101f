"""Attention under every kind of document mask, against per-document attention in fp64.

Shape legend: T, Tk = tokens of the query and the key row, H = num_heads, D = head_dim.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from flexvarlen import PackedLayout, packed_attention
from flexvarlen.layout import launch_sizes as launch
from flexvarlen.layout.launch_sizes import SHORT_ROW
from flexvarlen.mask.block_mask import block_mask_of, document_block_mask
from tests import oracle
from tests.attention.accuracy import assert_right
from tests.backends import FLASH, differentiable, kernels, refuses, serving
from tests.mask_cases import MaskCase, slots_of
from tests.oracle import Documents, differentiate, random_qkv
from tests.overwrite import overwrite
from tests.rows import poison_spare_memory

ROWS = {
    "mixed": Documents((50, 77, 129), 256),
    "one_token_documents": Documents((1, 127, 1, 126, 1), 256),
    "a_document_per_token": Documents((1,) * 90, 90),
    "one_document": Documents((256,), 256),
    "below_one_block": Documents((20, 0, 17), 40),
    "padding_inside": Documents((9, 60, 30, 100, 1, 20), 256, frozenset({0, 2, 4})),
}
KINDS = {
    "chunk": {"chunk": 20},
    "two_sided_chunk": {"chunk": 20, "causal": False},
    "prefix": {"prefix": 13},
    "prefix_and_window": {"prefix": 30, "window": 9},
    "chunk_and_window": {"chunk": 50, "window": (11, 4), "causal": False},
    "cross": {"causal": False},
    "cross_causal": {},
    "cross_causal_top_left": {"align": "top_left"},
    "cross_window": {"causal": False, "window": (5, 3)},
    "cross_prefix_and_chunk": {"prefix": 4, "chunk": 32},
}
PLAIN_KINDS = {"causal": {}, "bidirectional": {"causal": False}, "window": {"window": 20}}


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    """Functions of one code object share a limit on compilations."""
    torch._dynamo.reset()


def other_lengths(documents):
    """A row of keys: some documents longer, some shorter, one without keys; padding behind.

    Where the row of queries has padding runs inside, this has another one.
    """
    lengths = [n + 9 if i % 2 else n // 2 for i, n in enumerate(documents.lengths)]
    padding = frozenset({1}) if documents.padding else frozenset()
    return Documents(tuple(lengths), sum(lengths) + 3, padding)


def case_of(row, kind):
    documents, options = ROWS[row], dict((KINDS | PLAIN_KINDS)[kind])
    if "prefix" in options:
        options["prefix"] = [options["prefix"]] * len(documents.lengths)
    keys = other_lengths(documents) if kind.startswith("cross") else None
    return MaskCase(documents, options, keys)


def attend_ours(case, name, device, **options):
    """`packed_attention` under the case's mask, of q, k and v."""
    layout = slots_of(case.documents, device)
    layout_k = None if case.keys is None else slots_of(case.keys, device)

    def attend(q, k, v):
        return packed_attention(
            q, k, v, layout, layout_k=layout_k, backend=name, **case.options, **options
        )

    return attend


def attend_plainly(case, **scores):
    """The oracle's, of q, k, v and perhaps sinks."""
    options = case.options | scores

    def attend(q, k, v, sinks=None):
        return oracle.attend(q, k, v, case.documents, case.keys, sinks=sinks, **options)[0]

    return attend


def inputs_of(case, device, dtype, head_dim):
    keys = case.documents if case.keys is None else case.keys
    q, _, _, grad = random_qkv(case.documents.total_tokens, 6, 2, head_dim, dtype=dtype)
    _, k, v, _ = random_qkv(keys.total_tokens, 6, 2, head_dim, dtype=dtype, seed=1)
    return [x.to(device) for x in (q, k, v)], grad.to(device)


def check(case, name, device, dtype, head_dim, **scores):
    """`scores`: a softcap, a scale."""
    qkv, grad = inputs_of(case, device, dtype, head_dim)
    seen = case.dense().to(device)
    if device == "cuda":
        poison_spare_memory()
    assert_right(
        attend_ours(case, name, device, **scores),
        attend_plainly(case, **scores),
        qkv,
        grad,
        has_backward=differentiable((name, device)),
        blank=~seen.any(-1),
        blank_keys=~seen.any(0),
    )


@pytest.mark.pairwise(kernel=kernels("reference", "sdpa"), kind=KINDS, row=ROWS)
def test_attention_under_every_kind(kernel, row, kind):
    name, device, dtype = kernel
    check(case_of(row, kind), name, device, dtype, 16)


@pytest.mark.parametrize("kernel", kernels("flex", cpu=False))
@pytest.mark.parametrize("kind", [*PLAIN_KINDS, *KINDS])
@pytest.mark.parametrize("row", ROWS)
def test_flex_under_every_kind(kernel, row, kind):
    check(case_of(row, kind), *kernel, 64)


@pytest.mark.parametrize("kernel", kernels("flex_fa4", *FLASH, "nested", cpu=False))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("row", ROWS)
def test_flash_kernels_under_every_kind(kernel, row, kind, monkeypatch):
    """They know documents, windows and other keys: chunks are documents too.

    Launched for the documents that there are, as in long rows.
    """
    monkeypatch.setattr(launch, "SHORT_ROW", 0)
    case = case_of(row, kind)
    words = {w for w in ("prefix", "chunk", "window") if w in case.options}
    words |= {"cross"} if case.keys is not None else set()
    alike = {"cross_causal_top_left": "bottom_right", "cross_prefix_and_chunk": "prefix"}
    qkv, _ = inputs_of(case, *kernel[1:], 64)
    ours = attend_ours(case, kernel[0], "cuda")
    if kind in alike and kernel[0] in FLASH:
        with pytest.raises(NotImplementedError, match=alike[kind]):
            ours(*qkv)
    elif not refuses(kernel, lambda: ours(*qkv), *words):
        check(case, *kernel, 64)


@pytest.mark.usefixtures("_flex_without_inductor")
@pytest.mark.parametrize(
    ("row", "kind", "scores"),
    [
        ("padding_inside", "prefix_and_window", {"softcap": 3.0, "scale": 1.0}),
        pytest.param("mixed", "cross_causal", {}, marks=pytest.mark.slow),
    ],
)
def test_flex_on_the_cpu(row, kind, scores):
    """Masks and caps. Inductor's kernels are run by test_compiled_attention.py."""
    check(case_of(row, kind), "flex", "cpu", torch.float32, 16, **scores)


@pytest.mark.parametrize(
    "kernel", serving(kernels("reference", "flex", "sdpa", *FLASH), return_lse=True)
)
def test_log_sum_exp_of_cross_attention(kernel):
    name, device, dtype = kernel
    case = case_of("mixed", "cross_causal")
    qkv, _ = inputs_of(case, device, dtype, 64)
    _, lse = attend_ours(case, name, device, return_lse=True)(*qkv)
    _, exact = oracle.attend(*(x.double() for x in qkv), case.documents, case.keys)
    assert torch.equal(lse.isneginf(), exact.isneginf())
    assert (lse - exact).nan_to_num(0, 0, 0).abs().max() < 2e-2


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("sdpa", "chunk"),
        pytest.param("reference", "prefix", marks=pytest.mark.slow),
        ("sdpa", "cross_causal"),
    ],
)
def test_every_kind_traces_whole(name, kind):
    case = case_of("mixed", kind)
    qkv, grad = inputs_of(case, "cpu", torch.float32, 16)
    if "prefix" in case.options:
        case.options["prefix"] = 13
    ours = attend_ours(case, name, "cpu")
    eager = differentiate(ours, qkv, grad)
    compiled = differentiate(torch.compile(ours, fullgraph=True, backend="aot_eager"), qkv, grad)
    torch.testing.assert_close(compiled, eager, atol=1e-5, rtol=1e-5)


# ---- the GPU: no sync, CUDA graphs, FLASH ----


def packings_of(tokens):
    """Layouts of equal sizes, other documents; the last one ends in padding."""
    for lengths in ([tokens], [100, 28, tokens - 128], [1] * 7, [300, 0, 212]):
        yield PackedLayout.from_lengths(
            lengths, total_tokens=tokens, capacity=8, max_seqlen_bound=tokens, device="cuda"
        )


@pytest.mark.parametrize(
    "kernel", [x for x in kernels("flex", *FLASH, cpu=False) if x.id.endswith("bfloat16")]
)
@pytest.mark.parametrize(
    ("tokens", "options"),
    [
        (512, {}),
        (512, {"causal": False}),
        (512, {"window": 64}),
        (512, {"chunk": 48}),
        (SHORT_ROW + 500, {}),
    ],
    ids=str,
)
def test_a_captured_step_replays_on_other_documents(kernel, tokens, options):
    """Masks are built, and tails zeroed, inside the CUDA graph, from what the boundaries hold.

    Of a long row too it is launched for any documents, not for the short ones it is captured on.
    """
    name = kernel[0]
    options = options | {"deterministic": name not in ("flex", "varlen")}
    q, k, v, grad = random_qkv(tokens, 4, 2, 64, dtype=torch.bfloat16, device="cuda")
    leaves = [x.requires_grad_() for x in (q, k, v)]
    *others, first = packings_of(tokens)

    def step(layout):
        out = packed_attention(*leaves, layout, backend=name, **options)
        return out, *torch.autograd.grad(out, leaves, grad)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(first)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(first)
    for layout in others:
        expected = [x.clone() for x in step(layout)]
        overwrite(first, layout)
        graph.replay()
        # varlen's dq has other bits every time, fa2's for another number of slots.
        near = 2e-2 if name == "varlen" or (name == "fa2" and tokens > SHORT_ROW) else 0
        torch.testing.assert_close(captured, tuple(expected), atol=near, rtol=near)


@pytest.mark.gpu
def test_a_compiled_step_in_a_cuda_graph_builds_its_own_mask():
    """`mode="reduce-overhead"`: other documents of the same sizes compile nothing."""
    tokens = 512
    q, k, v, grad = random_qkv(tokens, 4, 2, 64, dtype=torch.bfloat16, device="cuda")

    def step(q, k, v, cu_seqlens):
        layout = PackedLayout.from_cu_seqlens(cu_seqlens, total_tokens=tokens)
        return packed_attention(q, k, v, layout, backend="flex")

    compiled = torch.compile(step, fullgraph=True, mode="reduce-overhead")
    for number, layout in enumerate(packings_of(tokens)):
        plain = partial(packed_attention, layout=layout, backend="flex")
        expected = differentiate(plain, [q, k, v], grad)
        ours = partial(compiled, cu_seqlens=layout.cu_seqlens)
        with torch._dynamo.config.patch(error_on_recompile=number > 0):
            for _ in range(3):  # warm up, record, replay
                torch.compiler.cudagraph_mark_step_begin()
                out, grads = differentiate(ours, [q, k, v], grad)
                out, grads = out.clone(), [x.clone() for x in grads]
        torch.testing.assert_close((out, grads), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.gpu
def test_built_and_used_without_a_sync():
    tokens = 512
    q, k, v, grad = random_qkv(tokens, 4, 2, 64, dtype=torch.bfloat16, device="cuda")
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def step():
        layout = PackedLayout.from_lengths([100, 28, 372], total_tokens=tokens, device="cuda")
        out = packed_attention(*leaves, layout, backend="flex", window=90, prefix=[3, 2, 50])
        return torch.autograd.grad(out, leaves, grad)

    expected = step()  # compiled
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        grads = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(grads, expected, atol=1e-2, rtol=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [128, 384, 512, (256, 128), (128, 256)], ids=str)
@pytest.mark.parametrize("tokens", [1536, 1000], ids=["divisible", "ragged"])
def test_block_sizes_that_flex_attention_accepts(block_size, tokens):
    from torch.nn.attention.flex_attention import flex_attention

    case = MaskCase(Documents((100, 28, 300, tokens - 450), tokens), {"window": 200})
    q, k, v, grad = random_qkv(tokens, 2, 2, 64, dtype=torch.bfloat16, device="cuda")
    block_mask = block_mask_of(case.mask("cuda"), block_size=block_size)
    # The kernel's own tiles must divide the blocks.
    tiles = {f"{a}BLOCK_{b}": 64 for a in ("", "fwd_") for b in "MN"}
    tiles |= {f"bwd_BLOCK_{b}": 64 for b in ("M1", "N1", "M2", "N2")}

    @torch.compile(fullgraph=True)
    def flex(q, k, v):
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        options = {"BACKEND": "TRITON", **tiles}
        return flex_attention(q, k, v, block_mask=block_mask, kernel_options=options)[0].transpose(
            0, 1
        )

    assert_right(flex, attend_plainly(case), [q, k, v], grad)


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [384, (384, 128), (128, 384)], ids=str)
def test_rows_that_flex_attention_reads_past_the_end_of_are_refused(block_size):
    layout = PackedLayout.from_lengths([100, 28, 300], total_tokens=512, device="cuda")
    with pytest.raises(ValueError, match=r"multiple of block_size=384.*pad the row to 768"):
        document_block_mask(layout, block_size=block_size)
    document_block_mask(layout.to("cpu"), block_size=block_size)  # its kernel checks the ends
