"""`sdpa` on a GPU: torch chooses among several kernels there, of which one is wrong."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.testing import make_tensor

import flexvarlen as fv
from tests import oracle
from tests.oracle import Documents, differentiate

pytestmark = pytest.mark.gpu

LENGTHS = (64, 128)


def attention(**options):
    """Ours of q, k and v."""
    layout = fv.PackedLayout.from_lengths(LENGTHS, device="cuda")
    return partial(fv.packed_attention, layout=layout, backend="sdpa", **options)


def exact(q, k, v, grad, window=None):
    """Output and gradients of each document alone, in fp64."""
    documents = Documents(LENGTHS, sum(LENGTHS))
    inputs = [x.double() for x in (q, k, v)]
    return differentiate(
        lambda *x: oracle.attend(*x, documents, window=window)[0], inputs, grad.double()
    )


def assert_near(found, expected, dtype):
    """Errors of a right kernel are a few roundings; these bugs gave NaN, and 1.4 of the norm."""
    (out, grads), (exact_out, exact_grads) = found, expected
    for x, y in zip([out, *grads], [exact_out, *exact_grads], strict=True):
        size = max(float(y.norm()), 1e-2 * y.numel() ** 0.5)  # dq and dk may be zero
        assert float((x.double() - y).norm()) < 16 * torch.finfo(dtype).eps * size


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("window", [1, 2, 9])
def test_nan_in_gradients_under_windows(dtype, window):
    """cuDNN's backward in float16, where softmax leaves one key: torch's own permutation test."""
    q, k, v, grad = (
        make_tensor((sum(LENGTHS), 2, 128), device="cuda", dtype=dtype, low=-9, high=9)
        for _ in range(4)
    )
    found = differentiate(attention(window=window), [q, k, v], grad)
    assert_near(found, exact(q, k, v, grad, window), dtype)


def memory_of_heads(x):
    """The same values, each head in one piece."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def memory_of_features(x):
    """The same values, each feature's tokens in one piece."""
    return x.permute(2, 1, 0).contiguous().permute(2, 1, 0)


@pytest.mark.parametrize("memory", [torch.clone, memory_of_heads, memory_of_features])
@pytest.mark.parametrize("grad_memory", [torch.clone, memory_of_heads, memory_of_features])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
def test_gradients_by_memory_formats(memory, grad_memory, heads):
    torch.manual_seed(0)
    q, k, v, grad = (
        torch.randn(sum(LENGTHS), n, 64, device="cuda", dtype=torch.bfloat16)
        for n in (heads[0], heads[1], heads[1], heads[0])
    )
    expected = exact(q, k, v, grad)
    leaves = [memory(x).detach().requires_grad_() for x in (q, k, v)]
    out = attention()(*leaves)
    found = out, torch.autograd.grad(out, leaves, grad_memory(grad))
    assert_near(found, expected, torch.bfloat16)


@pytest.mark.parametrize("squeeze", [True, False])
def test_gradients_after_calls_in_another_memory_format(squeeze):
    """cuDNN takes its plan for a shape from the first call, whatever memory the gradient has."""
    torch.manual_seed(0)
    q, k, v, grad = (
        torch.randn(sum(LENGTHS), 4, 128, device="cuda", dtype=torch.bfloat16) for _ in range(4)
    )
    for rows in torch.arange(sum(LENGTHS), device="cuda").split(LENGTHS):
        leaves = [x[rows].requires_grad_() for x in (q, k, v)]
        heads_first = [x.transpose(0, 1).unsqueeze(0) for x in leaves]
        out = scaled_dot_product_attention(*heads_first, is_causal=True)
        out = (out.squeeze(0) if squeeze else out[0]).transpose(0, 1)
        torch.autograd.grad(out, leaves, grad[rows])
    found = differentiate(attention(), [q, k, v], grad)
    assert_near(found, exact(q, k, v, grad), torch.bfloat16)


def test_equal_bits_of_one_query_with_a_window():
    """Where equal bits are promised: run to run, and whatever else is in the row."""
    torch.manual_seed(0)
    options = {"window": 300, "batch_invariant": True, "deterministic": True, "backend": "sdpa"}
    for keys in (64, 333, 1024, 4096):
        q, k = (
            torch.randn(n, h, 128, device="cuda", dtype=torch.bfloat16)
            for n, h in ((1, 16), (keys, 4))
        )
        layouts = [fv.PackedLayout.from_lengths([n], device="cuda") for n in (1, keys)]
        alone = fv.packed_attention(q, k, k, layouts[0], layout_k=layouts[1], **options)
        several = [fv.PackedLayout.from_lengths([n] * 3, device="cuda") for n in (1, keys)]
        for _ in range(20):
            tripled = fv.packed_attention(
                *(x.repeat(3, 1, 1) for x in (q, k, k)), several[0], layout_k=several[1], **options
            )
            assert all(torch.equal(one, alone) for one in tripled.split(1))


def test_users_choice_of_kernels_stays():
    enabled = torch.backends.cuda.cudnn_sdp_enabled()
    q = torch.randn(sum(LENGTHS), 2, 64, device="cuda", dtype=torch.bfloat16)
    differentiate(attention(), [q, q, q], q)
    assert torch.backends.cuda.cudnn_sdp_enabled() == enabled


def test_a_cuda_graph_repeats_the_documents_of_no_other_row():
    q, k, v = (make_tensor(192, 4, 64, dtype=torch.bfloat16, device="cuda") for _ in "qkv")
    sizes = {"total_tokens": 192, "capacity": 4, "max_seqlen_bound": 128, "device": "cuda"}
    rows = [fv.PackedLayout.from_lengths(lengths, **sizes) for lengths in (LENGTHS, (100, 92))]

    def attend(layout):
        return fv.packed_attention(q, k, v, layout, backend="sdpa")

    compiled = torch.compile(attend, fullgraph=True, mode="reduce-overhead")
    for layout in rows * 4:  # warm up, record, replay
        torch.compiler.cudagraph_mark_step_begin()
        torch.testing.assert_close(compiled(layout), attend(layout), atol=2e-2, rtol=2e-2)
