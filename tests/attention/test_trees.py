"""Attention over trees, against each path as a document of its own in fp64.

Shape legend: T = tokens of the row, H = num_heads, D = head_dim.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from flexvarlen import packed_attention, why_not
from flexvarlen.attention.auto.check_results import compare_with_reference, failure
from flexvarlen.attention.backends.registry import refusal
from flexvarlen.attention.call import AttentionCall
from flexvarlen.mask.spec import MaskSpec
from flexvarlen.measure import watch_compilation
from tests import oracle
from tests.attention.accuracy import assert_right
from tests.backends import FLASH, differentiable, kernels, serving
from tests.oracle import Documents, differentiate, random_qkv
from tests.planted import ignore_branches
from tests.trees import EXAMPLES, Tree, chunks, trees, windows

KINDS = {"causal": {}, "window": {"window": 20}, "chunk": {"chunk": 16}, "one": {"window": 1}}
SIZES = {"head_dim": 64, "num_heads": 6, "num_kv_heads": 2}


def ends_of_paths(tree, q, k, v, **options):
    """Of each segment at the end of its path: its tokens, their output and their LSE."""
    for segment, length in enumerate(tree.lengths):
        path = tree.path_of(segment)
        if length:
            alone = Documents((len(path),), len(path))
            out, lse = oracle.attend(q[path], k[path], v[path], alone, **options)
            yield path[-length:], out[-length:], lse[:, -length:]


def by_path(tree, **options):
    """Attention of q, k and v, each path as a document of its own; differentiable."""

    def attend(q, k, v, sinks=None):
        out = 0 * q  # not plain zeros: padding alone has gradients too
        for tokens, own, _ in ends_of_paths(tree, q, k, v, sinks=sinks, **options):
            out = out.index_copy(0, torch.tensor(tokens, device=q.device), own)
        return out

    return attend


def check(tree, name, device, dtype, head_dim, sinks=(), **options):
    *qkv, grad = random_qkv(tree.total_tokens, 6, 2, head_dim, dtype=dtype, device=device)
    layout = tree.layout(device=device)
    padding = torch.arange(tree.total_tokens, device=device) >= sum(tree.lengths)

    def ours(q, k, v, sinks=None):
        return packed_attention(q, k, v, layout, backend=name, sinks=sinks, **options)

    assert_right(
        ours,
        by_path(tree, **options),
        [*qkv, *sinks],
        grad,
        has_backward=differentiable((name, device)),
        blank=padding,
    )


@pytest.mark.parametrize("kernel", kernels("reference", "sdpa", "flex", "flex_fa4", *FLASH))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tree", EXAMPLES.values(), ids=EXAMPLES)
def test_each_path_is_a_document(kernel, tree, kind):
    name, device, dtype = kernel
    needs_grad = differentiable((name, device))
    reason = why_not(name, device=device, dtype=dtype, needs_grad=needs_grad, **SIZES)
    if name in FLASH and KINDS[kind]:
        reason = f"{name} has no windows or chunks in trees"
    if reason is not None:
        pytest.skip(reason)
    check(tree, *kernel, 16 if device == "cpu" else 64, **KINDS[kind])


@pytest.mark.parametrize("kernel", serving(kernels(*FLASH, cpu=False), **SIZES))
def test_long_rows_are_launched_for_their_own_segments(kernel):
    check(Tree((1000, 600, 0, 300, 400), (-1, 0, 1, 1, 0), 60), *kernel, 64)


@pytest.mark.parametrize("name", ["reference", "sdpa"])
@settings(max_examples=12)
@given(trees(most_tokens=40), windows, chunks)
def test_any_tree(name, tree, window, chunk):
    if tree.total_tokens:
        check(tree, name, "cpu", torch.float32, 16, window=window, chunk=chunk)


@pytest.mark.parametrize(
    "kernel", serving(kernels("reference", "flex", *FLASH), return_lse=True, **SIZES)
)
def test_lse(kernel):
    name, device, dtype = kernel
    tree = EXAMPLES["levels"]
    q, k, v, _ = random_qkv(tree.total_tokens, 6, 2, 64, dtype=dtype, device=device)
    _, found = packed_attention(q, k, v, tree.layout(device=device), backend=name, return_lse=True)
    expected = torch.full((6, tree.total_tokens), float("-inf"), device=device)
    for tokens, _, lse in ends_of_paths(tree, q.double(), k.double(), v.double()):
        expected[:, tokens] = lse.float()
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=2e-3)


def test_sinks_and_softcap():
    sinks = [torch.randn(6)]
    check(EXAMPLES["levels"], "reference", "cpu", torch.float32, 16, sinks, softcap=2.0)


@pytest.mark.parametrize("kernel", kernels("reference", "sdpa", "flex", "flex_fa4", *FLASH))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("tree", "keys_before"), [("group", 40), ("levels", 33), ("levels", 45), ("levels", 139)]
)
def test_the_last_tokens_as_queries(kernel, kind, tree, keys_before):
    """Those of a part of a tree, with the keys above."""
    name, device, dtype = kernel
    mask = EXAMPLES[tree].last_queries(keys_before, device=device, **KINDS[kind])
    needs_grad = differentiable((name, device))
    head_dim = 16 if device == "cpu" else 64
    call = AttentionCall(
        torch.device(device), dtype, 6, 2, head_dim, mask.spec, 0.25, needs_grad=needs_grad
    )
    reason = refusal(name, call)
    if reason is not None:
        pytest.skip(reason)
    compare_with_reference(name, call, mask)


@pytest.mark.parametrize("name", ["reference", "sdpa"])
def test_no_bit_of_a_sibling_changes(name):
    tree = EXAMPLES["group"]
    q, k, v, grad = random_qkv(tree.total_tokens, 6, 2, 16)
    sibling = slice(40, 49)

    def run(changed):
        leaves = [x.clone() for x in (q, k, v)]
        for x in leaves:
            x[sibling] = x[sibling].flip(0) if changed else x[sibling]
            x.requires_grad_()
        out = packed_attention(*leaves, tree.layout(), backend=name)
        grads = torch.autograd.grad(out, leaves, grad)
        return [out, *grads]

    answers = torch.arange(tree.total_tokens) >= sibling.stop
    for before, after in zip(run(False), run(True), strict=True):
        assert torch.equal(before[answers], after[answers])
        assert not torch.equal(before[sibling], after[sibling])


# Masks are made by the same code for both.
@pytest.mark.parametrize("name", ["sdpa", pytest.param("reference", marks=pytest.mark.slow)])
def test_one_graph_for_trees_of_equal_sizes(name):
    sizes = {"total_tokens": 128, "capacity": 8, "max_seqlen_bound": 128, "max_depth": 3}
    rows = [
        Tree((30, 10, 20, 5), (-1, 0, 0, 2)),
        Tree((1, 1, 100, 3, 4), (-1, 0, -1, 2, 2)),
        Tree((100, 28), (-1, 0)),
    ]
    qkv = [x.requires_grad_() for x in random_qkv(128, 6, 2, 16)[:3]]

    def run(layout):
        return packed_attention(*qkv, layout, backend=name, window=30)

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    with watch_compilation() as stats:
        for row in rows:
            layout = row.layout(**sizes)
            outs = compiled(layout), run(layout)
            grads = [torch.autograd.grad(x.square().sum(), qkv) for x in outs]
            torch.testing.assert_close(*outs, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(*grads, atol=1e-5, rtol=1e-5)
    assert (stats.compilations, stats.graph_breaks) == (1, 0)


@pytest.mark.parametrize("kernel", serving(kernels("flex", *FLASH, cpu=False), **SIZES))
def test_one_graph_for_twenty_trees(kernel):
    name, device, dtype = kernel
    sizes = {"total_tokens": 2304, "capacity": 8, "max_seqlen_bound": 2304, "max_depth": 3}
    *qkv, grad = random_qkv(2304, 6, 2, 64, dtype=dtype, device=device)

    def attend(*given):
        return packed_attention(*given[:3], given[3], backend=name)

    torch._dynamo.reset()
    compiled, compilations = torch.compile(attend, fullgraph=True), []
    for n in range(20):
        lengths, parents = (1000 + 13 * n, 200, 400 - 7 * n, 500), (-1, 0, n % 2, n % 2 - 1)
        layout = Tree(lengths, parents).layout(device=device, **sizes)
        # Not counted: the eager flex compiles a kernel of its own.
        expected = differentiate(lambda *x, to=layout: attend(*x, to), qkv, grad)
        with watch_compilation() as stats:
            found = differentiate(lambda *x, to=layout: compiled(*x, to), qkv, grad)
        compilations.append(stats.compilations)
        torch.testing.assert_close(found, expected, atol=0.05, rtol=0.05)
    assert compilations == [1] + 19 * [0]


@pytest.mark.parametrize("kernel", serving(kernels("nested", "cudnn", cpu=False)))
def test_kernels_without_trees_refuse(kernel):
    tree = EXAMPLES["group"]
    *qkv, _ = random_qkv(tree.total_tokens, 6, 2, 64, dtype=kernel[2], device="cuda")
    with pytest.raises(NotImplementedError, match="has no trees"):
        packed_attention(*qkv, tree.layout(device="cuda"), backend=kernel[0])


@pytest.mark.parametrize("name", ["reference", "sdpa"])
@pytest.mark.parametrize("window", [None, 20])
def test_auto_trusts_a_right_kernel_and_not_one_that_ignores_the_tree(name, window, monkeypatch):
    spec = MaskSpec.of(window=window).with_trees()
    call = AttentionCall(torch.device("cpu"), torch.float32, 4, 2, 16, spec, 0.25)
    assert failure(lambda: compare_with_reference(name, call)) is None
    ignore_branches(monkeypatch)
    assert "output is off" in failure(lambda: compare_with_reference("sdpa", call))
