"""Convolutions and scans by document: equal to each document alone, and blind to the others."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from transformers.models.qwen3_5 import modeling_qwen3_5

from flexvarlen.recurrent.functions import (
    TransformersFunction,
    convolve,
    gated_delta_rule,
    mamba2_scan,
)
from tests.recurrent.cases import CASES, HV, LENGTHS, H, K, T, V, documents, of_tokens, randn


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
    """What causal-conv1d and mamba-ssm would get, with stub kernels."""
    calls, docs = [], documents()  # before tensors claim to be on a GPU, where Triton makes them
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))

    def kernel(x, *args, seq_idx, **kwargs):
        calls.append((x.shape, x.stride(1), seq_idx))
        return x

    theirs = TransformersFunction(kernel, None)
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


def test_a_package_that_cannot_be_imported(monkeypatch):
    """transformers 5.17 would fall back to plain torch, and drop seq_idx."""
    broken, works = ModuleType("causal_conv1d"), ModuleType("causal_conv1d")
    works.causal_conv1d_fn = lambda x, seq_idx=None: x
    broken.__getattr__ = lambda name: (_ for _ in ()).throw(ImportError("undefined symbol"))
    for package, has_kernel in ((works, True), (broken, False), (None, False)):
        monkeypatch.setitem(sys.modules, "causal_conv1d", package)
        function = TransformersFunction.of(modeling_qwen3_5.causal_conv1d_fn)
        assert (function.kernel is not None) == has_kernel


def test_a_state_that_goes_on():
    tensors = of_tokens()
    with pytest.raises(NotImplementedError, match="use_cache=False"):
        gated_delta_rule(None, documents(), *tensors, output_final_state=True)


def test_an_activation_that_is_dropped():
    with pytest.raises(NotImplementedError, match=r"activation must be silu.*'gelu'"):
        convolve(None, documents(), randn(1, 6, T), randn(6, 4), activation="gelu")
