"""`flex`: what FlexAttention itself fails at."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import flexvarlen as fv
from flexvarlen.attention.backends.compiled_flex import _inductor_keeping_buffers
from tests.backends import gpu_param


def saves_a_buffer(x):
    y = x.sin()
    return (y @ y.T).cos() @ y


def test_two_backwards_of_one_forward():
    """By default inductor's graphs reuse what they saved, and raise about donated buffers."""
    x = torch.randn(8, 8, requires_grad=True)
    options = {"fullgraph": True, "backend": partial(_inductor_keeping_buffers, options=None)}
    out = torch.compile(saves_a_buffer, **options)(x)
    grads = [torch.autograd.grad(out.sum(), x, retain_graph=True)[0] for _ in range(2)]
    expected = torch.autograd.grad(saves_a_buffer(x).sum(), x)[0]
    for grad in grads:
        torch.testing.assert_close(grad, expected)


@pytest.mark.parametrize("name", [gpu_param("flex"), gpu_param("flex_fa4")])
@pytest.mark.parametrize("softcap", [None, 20.0])
def test_two_backwards_of_one_packed_forward(name, softcap):
    layout = fv.PackedLayout.from_lengths([100, 1, 155], device="cuda")
    leaves = [
        torch.randn(256, heads, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for heads in (4, 2, 2)
    ]
    out = fv.packed_attention(*leaves, layout, backend=name, softcap=softcap)
    first = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
    second = torch.autograd.grad(out.sum(), leaves)
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [136, 192, 200, 256])
@pytest.mark.parametrize("needs_grad", [False, True])
def test_wide_heads_in_float32(head_dim, needs_grad):
    """Tiles that do not fit into shared memory: No valid triton configs."""
    layout = fv.PackedLayout.from_lengths([100, 1, 155], device="cuda")
    leaves = [
        torch.randn(256, heads, head_dim, device="cuda", requires_grad=needs_grad)
        for heads in (4, 2, 2)
    ]
    out = fv.packed_attention(*leaves, layout, backend="flex")
    expected = fv.packed_attention(*leaves, layout, backend="reference")
    torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-2)
    if needs_grad:
        for a, b in zip(
            torch.autograd.grad(out.sum(), leaves),
            torch.autograd.grad(expected.sum(), leaves),
            strict=True,
        ):
            torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)
