"""Convolutions and scans by document: equal to each document alone, and blind to the others."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from torch.nn import functional as F
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.qwen3_5 import modeling_qwen3_5

from flexvarlen import PackedLayout
from flexvarlen.recurrent import functions
from flexvarlen.recurrent.documents import CHUNK, RecurrentDocuments
from flexvarlen.recurrent.fla.hopper import gradients_of_chunks
from flexvarlen.recurrent.functions import Theirs, convolve, gated_delta_rule, mamba2_scan

LENGTHS = (5, 1, 64, 0, 70)
T = 150  # the last ten are padding
H, HV, K, V = 2, 4, 8, 16


def documents(lengths=LENGTHS, total=T):
    return RecurrentDocuments(PackedLayout.from_lengths(lengths, total_tokens=total, capacity=8))


def randn(*shape, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=rng, dtype=torch.float64)


def test_chunk_indices():
    docs = documents()
    lengths = docs.cu_seqlens.diff().tolist()
    assert (sum(lengths), lengths[-1]) == (T, 0)
    real = [[i, n] for i, length in enumerate(lengths) for n in range(-(-length // CHUNK))]
    assert docs.chunk_indices[: len(real)].tolist() == real
    empty = len(lengths) - 1
    assert len(real) < len(docs.chunk_indices) == T // CHUNK + empty
    assert (docs.chunk_indices[len(real) :, 0] == empty).all()


def convolution(docs, x, weight, bias):
    return convolve(None, docs, x.transpose(1, 2), weight, bias, "silu").transpose(1, 2)


def convolution_alone(x, weight, bias):
    out = F.conv1d(x.transpose(1, 2), weight[:, None], bias, padding=3, groups=len(weight))
    return F.silu(out[..., : x.shape[1]]).transpose(1, 2)


def delta_rule(module, name):
    torch_function = inspect.unwrap(getattr(module, name))
    theirs = Theirs(None, torch_function)

    def run(docs, *tensors):
        return gated_delta_rule(theirs, docs, *tensors, use_qk_l2norm_in_kernel=True)[0]

    def alone(q, k, v, g, beta):
        return torch_function(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0]

    return run, alone


def scan():
    torch_function = inspect.unwrap(modeling_mamba2.mamba2_chunk_scan)
    fixed = {"chunk_size": 16, "dt_softplus": True, "dt_limit": (0.1, 2.0)}

    def run(docs, x, dt, B, C, A, D, bias):
        return mamba2_scan(
            Theirs(None, torch_function), docs, x, dt, A, B, C, D=D, dt_bias=bias, **fixed
        )

    def alone(x, dt, B, C, A, D, bias):
        return torch_function(x, dt, A, B, C, D=D, dt_bias=bias, **fixed)

    return run, alone


def of_tokens(per_key=False):
    q, k, v = (randn(1, T, h, d, seed=i) for i, (h, d) in enumerate([(H, K), (H, K), (HV, V)]))
    if per_key:
        v = v[:, :, :H]
    g = -randn(*v.shape[:3], *([K] if per_key else []), seed=3).abs()
    return [q, k, v, g, randn(*v.shape[:3], seed=4).sigmoid()]


CASES = {
    # how it runs, the document alone, tensors by token, other tensors
    "convolution": lambda: (
        *(convolution, convolution_alone),
        *([randn(1, T, 6)], [randn(6, 4, seed=1), randn(6, seed=2)]),
    ),
    "gated_delta": lambda: (
        *delta_rule(modeling_qwen3_5, "torch_chunk_gated_delta_rule"),
        *(of_tokens(), []),
    ),
    "kimi_delta": lambda: (
        *delta_rule(modeling_kimi_linear, "chunk_kimi_delta_attention"),
        *(of_tokens(per_key=True), []),
    ),
    "mamba2": lambda: (
        *scan(),
        [randn(1, T, HV, V), randn(1, T, HV, seed=1)] + [randn(1, T, H, K, seed=i) for i in (2, 3)],
        [-randn(HV, seed=4).abs(), randn(HV, seed=5), randn(HV, seed=6)],
    ),
}


@pytest.mark.filterwarnings("ignore:flexvarlen. recurrent layers run one document after another")
@pytest.mark.parametrize("name", CASES)
def test_not_as_alone(name):
    """Outputs and gradients, with padding, an empty document, and chunks that begin anew."""
    run, alone, by_token, shared = CASES[name]()
    leaves = [x.clone().requires_grad_() for x in (*by_token, *shared)]
    out = run(documents(), *leaves)
    grad = randn(*out.shape, seed=9)
    found = torch.autograd.grad(out, leaves, grad)
    parts, expected = [], [torch.zeros_like(x) for x in leaves]
    start = 0
    for length in LENGTHS:
        if length:
            tokens = slice(start, start + length)
            own = [x.detach()[:, tokens].requires_grad_() for x in leaves[: len(by_token)]]
            parts.append(alone(*own, *leaves[len(by_token) :]))
            grads = torch.autograd.grad(
                parts[-1], [*own, *leaves[len(by_token) :]], grad[:, tokens]
            )
            for i, x in enumerate(grads):
                (expected[i][:, tokens] if i < len(by_token) else expected[i]).add_(x)
        start += length
    tolerance = {"rtol": 1e-5, "atol": 1e-5}  # transformers computes scans in fp32
    torch.testing.assert_close(out[:, :start], torch.cat(parts, 1), **tolerance)
    assert not out[:, start:].any()
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, **tolerance)


@pytest.mark.filterwarnings("ignore:flexvarlen. recurrent layers run one document after another")
@pytest.mark.parametrize("name", CASES)
def test_a_bit_of_another_document(name):
    run, _, by_token, shared = CASES[name]()
    before = run(documents(), *by_token, *shared)
    changed = [x.clone() for x in by_token]
    for x in changed:
        x[:, 6:70] *= 0.5  # the third document
    after = run(documents(), *changed, *shared)
    others = torch.ones(T, dtype=torch.bool)
    others[6:70] = False
    assert torch.equal(before[:, others], after[:, others])
    assert not torch.equal(before[:, 6:70], after[:, 6:70])


def test_kernels_of_other_packages(monkeypatch):
    """What causal-conv1d and mamba-ssm get, where they are installed; none is, on this machine."""
    monkeypatch.setattr(functions, "HAS_CAUSAL_CONV1D", True)
    monkeypatch.setattr(functions, "HAS_MAMBA_SSM", True)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
    calls = []

    def kernel(x, *args, seq_idx, **kwargs):
        calls.append((x.shape, x.stride(1), seq_idx))
        return x

    theirs, docs = Theirs(kernel, None), documents()
    x = randn(1, T, 6).float()
    out = convolve(theirs, docs, x.transpose(1, 2), randn(6, 4), activation="silu")
    assert torch.equal(out[..., :140], x.transpose(1, 2)[..., :140])
    assert not out[..., 140:].any()
    x = randn(1, T, HV, V).float()
    tensors = [randn(1, T, HV), randn(HV), randn(1, T, H, K), randn(1, T, H, K)]
    out = mamba2_scan(theirs, docs, x, *tensors, chunk_size=16)
    assert torch.equal(out[:, :140], x[:, :140])
    (shape, channel_stride, ids), (_, _, same) = calls
    assert (shape, channel_stride, ids.dtype) == ((1, 6, T), 1, torch.int32)
    assert ids is same
    lengths = [*LENGTHS, T - sum(LENGTHS)]
    assert torch.unique_consecutive(ids[0], return_counts=True)[1].tolist() == [
        length for length in lengths if length
    ]


def test_a_cache():
    tensors = of_tokens()
    with pytest.raises(NotImplementedError, match="use_cache=False"):
        gated_delta_rule(None, documents(), *tensors, output_final_state=True)


def test_another_activation():
    with pytest.raises(NotImplementedError, match=r"activation must be silu.*'gelu'"):
        convolve(None, documents(), randn(1, 6, T), randn(6, 4), activation="gelu")


@pytest.mark.parametrize("heads", [H, HV])
def test_gradients_of_chunks(heads):
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
    given = {"cu_seqlens": docs.cu_seqlens, "chunk_indices": docs.chunk_indices, "scale": 0.3}
    tensors = {"q": q, "k": k, "v": v, "do": grad, "h": h, "dh": dh, "g": g, "dv": dv}
    found = gradients_of_chunks(**{n: x.detach().float() for n, x in tensors.items()}, **given)
    for x, y in zip(found, (*expected[:2], torch.cat(dw)[None], natural), strict=True):
        torch.testing.assert_close(x.double(), y, rtol=1e-4, atol=1e-4)
