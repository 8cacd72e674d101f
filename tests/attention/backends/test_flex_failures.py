"""`flex`: what FlexAttention itself fails at."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import flexvarlen as fv
from flexvarlen.attention.backends.compiled_flex import _inductor_keeping_buffers
from flexvarlen.measure import watch_compilation
from tests.attention.accuracy import assert_same_bits
from tests.backends import gpu_param
from tests.oracle import differentiate, random_qkv


def saves_a_buffer(x):
    y = x.sin()
    return (y @ y.T).cos() @ y


SIZES = {"recompiled_for_any_size": (8, 9, 8), "one_size": (8, 8)}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.sampled(1)
def test_two_backwards_of_one_forward(sizes):
    """By default inductor's graphs reuse what they saved, and raise about donated buffers.

    The backward of a graph for any size is compiled with its forward, that of one size later.
    """
    torch._dynamo.reset()
    options = {"fullgraph": True, "backend": partial(_inductor_keeping_buffers, options=None)}
    compiled = torch.compile(saves_a_buffer, **options)
    for again in (True, False, True):
        for size in sizes:
            x = torch.randn(size, 8, requires_grad=True)
            out, expected = compiled(x), torch.autograd.grad(saves_a_buffer(x).sum(), x)[0]
            for _ in range(1 + again):
                grad = torch.autograd.grad(out.sum(), x, retain_graph=again)[0]
                torch.testing.assert_close(grad, expected)


def test_orders_of_strides_share_a_graph():
    """Partial rotary embeddings concatenate: their queries are heads by tokens in memory."""
    torch._dynamo.reset()
    layout = fv.PackedLayout.from_lengths([40, 24])
    q, k, v = (torch.randn(64, heads, 16) for heads in (4, 2, 2))
    expected = fv.packed_attention(q, k, v, layout, backend="flex")
    other = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k)]
    with watch_compilation() as stats:
        found = fv.packed_attention(*other, v, layout, backend="flex")
    assert torch.equal(found, expected)
    assert stats.compilations == 0


LAYOUTS = ((100, 1, 155), (90, 33, 200, 5), (300,), (100, 1, 155))  # the second recompiles


@pytest.mark.parametrize(
    ("name", "options"),
    [
        gpu_param(name, options)
        for name in ("flex", "flex_fa4")
        for options in ({}, {"softcap": 20.0}, {"window": 30}, {"deterministic": True})
        if name == "flex" or "deterministic" not in options  # flex_fa4 refuses it
    ],
)
def test_two_backwards_of_packed_forwards(name, options):
    """Also past the recompilation for any length, and for the first lengths again."""
    torch._dynamo.reset()
    seen = []
    for lengths in LAYOUTS:
        layout = fv.PackedLayout.from_lengths(lengths, device="cuda")
        of = {"device": "cuda", "dtype": torch.bfloat16, "seed": sum(lengths)}
        leaves = [x.requires_grad_() for x in random_qkv(sum(lengths), 4, 2, 64, **of)[:3]]
        out = fv.packed_attention(*leaves, layout, backend=name, **options)
        first = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
        second = torch.autograd.grad(out.sum(), leaves)
        torch.testing.assert_close(first, second, rtol=1e-2, atol=1e-2)
        seen.append([out.detach(), *first])
    if options.get("deterministic"):  # the order of sums is fixed for every compilation
        assert_same_bits(seen[0], seen[-1])


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [136, 192, 200, 256])
@pytest.mark.parametrize("needs_grad", [False, True])
def test_wide_heads_in_float32(head_dim, needs_grad):
    """Tiles that do not fit into shared memory: No valid triton configs."""
    layout = fv.PackedLayout.from_lengths([100, 1, 155], device="cuda")
    *qkv, _ = random_qkv(256, 4, 2, head_dim, device="cuda")

    def run(name):
        attend = partial(fv.packed_attention, layout=layout, backend=name)
        return differentiate(attend, qkv, torch.ones_like(qkv[0])) if needs_grad else attend(*qkv)

    torch.testing.assert_close(run("flex"), run("reference"), rtol=1e-2, atol=1e-2)
