"""A row of no tokens, or no keys: zeros from every backend, where kernels would fail."""

from __future__ import annotations

import pytest
import torch

import flexvarlen as fv
from tests.backends import ALL, differentiable, kernels, serving

CROSS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "cross": True, "needs_grad": False}
EMPTY = {
    "no_keys": ([5], [0]),
    "no_queries": ([0], [5]),
    "nothing": ([0], [0]),
    "empty_documents": ([0, 0], None),
    "no_documents": ([], None),
}
"""The documents, and those of the keys."""


@pytest.mark.parametrize("rows", EMPTY)
@pytest.mark.parametrize(
    "kernel",
    serving([*kernels("reference", "sdpa", "flex"), *kernels(*ALL[3:], cpu=False)], **CROSS),
)
def test_a_row_of_no_tokens(kernel, rows):
    name, device, dtype = kernel
    needs_grad = differentiable(kernel)
    layout, layout_k = (
        None if x is None else fv.PackedLayout.from_lengths(x, device=device) for x in EMPTY[rows]
    )
    tokens, keys = layout.total_tokens, (layout_k or layout).total_tokens
    q, k, v = (
        torch.randn(n, h, 64, device=device, dtype=dtype, requires_grad=needs_grad)
        for n, h in ((tokens, 4), (keys, 2), (keys, 2))
    )
    out = fv.packed_attention(q, k, v, layout, layout_k=layout_k, backend=name)
    assert out.shape == q.shape
    assert not out.any()
    if needs_grad:
        grads = torch.autograd.grad(out.sum(), (q, k, v))
        assert [g.shape for g in grads] == [q.shape, k.shape, v.shape]
        assert not any(g.any() for g in grads)


def no_keys(q, k, **options):
    layout, layout_k = (fv.PackedLayout.from_lengths([len(x)]) for x in (q, k))
    return fv.packed_attention(q, k, k, layout, layout_k=layout_k, **options)


def test_the_lse_of_no_keys():
    q, k = torch.randn(5, 4, 16), torch.randn(0, 2, 16)
    _, lse = no_keys(q, k, backend="reference", return_lse=True)
    assert lse.isneginf().all()


def test_a_compiled_row_of_no_keys():
    torch._dynamo.reset()
    attend = torch.compile(no_keys, fullgraph=True, backend="aot_eager")
    assert not attend(torch.randn(5, 4, 16), torch.randn(0, 2, 16), backend="flex").any()
