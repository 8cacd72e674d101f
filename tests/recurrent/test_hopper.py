"""The step of fla's backwards whose kernel Triton compiles wrongly with four warps on Hopper."""

from __future__ import annotations

import math

import pytest
import torch

from flexvarlen import PackedLayout
from flexvarlen.recurrent.documents import RecurrentDocuments
from flexvarlen.recurrent.fla_kernels.hopper import gradients_of_chunks
from tests.recurrent.cases import HV, H, randn

K, V = 48, 80  # more than a tile, and no multiple of one
pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _fla():
    pytest.importorskip("fla")


def on_gpu(tensors, dtype):
    """As the kernel takes them: sums of decays stay in fp32."""
    return {
        n: x.detach().to("cuda", torch.float32 if n == "g" else dtype) for n, x in tensors.items()
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [H, HV])
def test_gradients_of_chunks(heads, dtype):
    """Against autograd through the same chunk: outputs, and the state after it."""
    lengths = (5, 64, 30)  # one chunk each
    total = sum(lengths)
    docs = RecurrentDocuments(PackedLayout.from_lengths(lengths, capacity=4))
    q, k, v, grad, dv = (
        randn(1, total, h, d, seed=i)
        for i, (h, d) in enumerate([(H, K), (H, K), (heads, V), (heads, V), (heads, V)])
    )
    g = -30 * randn(1, total, heads, seed=5).abs().cumsum(1)  # so much that exp2(-g) overflows
    h, dh = (randn(1, len(docs.chunk_indices), heads, K, V, seed=i) for i in (6, 7))
    q, k, g = (x.requires_grad_() for x in (q, k, g))
    losses, dw, start = [], [], 0
    for i, length in enumerate(lengths):
        tokens = slice(start, start + length)
        q_i, k_i = (x[0, tokens].repeat_interleave(heads // H, 1) for x in (q, k))
        decay = g[0, tokens]
        future = torch.ones(length, length, dtype=torch.bool).triu(1)[..., None]
        between = (decay[:, None] - decay[None]).masked_fill(future, -torch.inf).exp2()
        weights = torch.einsum("ihd,jhd->ijh", q_i, k_i) * between
        out = torch.einsum("ijh,jhv->ihv", weights, v[0, tokens])
        out = 0.3 * (out + torch.einsum("ihd,hdv->ihv", q_i * decay.exp2()[..., None], h[0, i]))
        kept = k_i * (decay[-1] - decay).exp2()[..., None]
        state = decay[-1].exp2()[:, None, None] * h[0, i]
        state = state + torch.einsum("ihd,ihv->hdv", kept, v[0, tokens])
        losses.append((out * grad[0, tokens]).sum() + (state * dh[0, i]).sum())
        dw.append(-torch.einsum("ihv,hdv->ihd", dv[0, tokens], h[0, i]))
        start += length
    expected = torch.autograd.grad(torch.stack(losses).sum(), (q, k, g))
    natural = expected[2] / math.log(2)  # g is a log2; fla differentiates the natural log
    given = {"cu_seqlens": docs.cu_seqlens.cuda(), "chunk_indices": docs.chunk_indices.cuda()}
    tensors = {"q": q, "k": k, "v": v, "do": grad, "h": h, "dh": dh, "g": g, "dv": dv}
    tensors["w"] = torch.zeros_like(torch.cat(dw)[None])
    found = gradients_of_chunks(**on_gpu(tensors, dtype), **given, scale=0.3)
    for x, y in zip(found, (*expected[:2], torch.cat(dw)[None], natural), strict=True):
        assert (x.cpu().double() - y).norm() < 0.01 * y.norm()  # float32 is rounded to TF32


def test_rows_are_documents():
    rows, tokens, chunks = 3, 70, 2
    shapes = [(H, K), (H, K), (HV, V), (HV, V), (HV, V), (HV, K)]
    names = ("q", "k", "v", "do", "dv", "w")
    drawn = (randn(rows, tokens, *shape, seed=i) for i, shape in enumerate(shapes))
    tensors = dict(zip(names, drawn, strict=True))
    tensors["g"] = -randn(rows, tokens, HV, seed=5).abs().cumsum(1)
    for i, name in enumerate(("h", "dh")):
        tensors[name] = randn(rows, chunks, HV, K, V, seed=6 + i)
    tensors = on_gpu(tensors, torch.bfloat16)
    found = gradients_of_chunks(**tensors, scale=0.3)
    for row in range(rows):
        alone = gradients_of_chunks(
            **{name: x[row : row + 1] for name, x in tensors.items()},
            scale=0.3,
            cu_seqlens=torch.tensor([0, tokens], device="cuda"),
            chunk_indices=torch.tensor([[0, 0], [0, 1]], device="cuda"),
        )
        for x, y in zip(found, alone, strict=True):
            torch.testing.assert_close(x[row : row + 1], y)
