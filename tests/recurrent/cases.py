"""The functions of recurrent layers with small inputs, and each document alone.

The oracle is torch's convolution, and transformers' scans in plain torch, one document a call.
"""

from __future__ import annotations

import inspect
import sys
from types import ModuleType

import torch
from torch.nn import functional as F
from torch.nn.functional import pad
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.qwen3_5 import modeling_qwen3_5

from flexvarlen import PackedLayout
from flexvarlen.recurrent.documents import RecurrentDocuments
from flexvarlen.recurrent.layer_functions import (
    convolve,
    gated_delta_rule,
    mamba2_scan,
)
from tests.trees import Tree

LENGTHS = (5, 1, 64, 0, 70)
T = 150  # the last ten are padding
THIRD = slice(6, 70)
H, HV, K, V = 2, 4, 8, 16


TREE = Tree((5, 1, 64, 0, 2, 30, 20, 18), (-1, 0, 1, 1, 3, 4, 0, -1), 10)
"""On five levels; segments of one token, of none, and some shorter than the convolution."""


def documents(lengths=LENGTHS, total=T):
    return RecurrentDocuments(PackedLayout.from_lengths(lengths, total_tokens=total, capacity=8))


def branches(tree=TREE):
    return RecurrentDocuments(tree.layout(capacity=16, max_depth=7))


def randn(*shape, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=rng, dtype=torch.float64)


def convolution(docs, x, weight, bias):
    return convolve(None, docs, x.transpose(1, 2), weight, bias, "silu").transpose(1, 2)


def convolution_alone(x, weight, bias):
    out = F.conv1d(x.transpose(1, 2), weight[:, None], bias, padding=3, groups=len(weight))
    return F.silu(out[..., : x.shape[1]]).transpose(1, 2)


def delta_rule(module, name):
    plain = inspect.unwrap(getattr(module, name))

    def torch_function(q, k, v, **others):
        q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
        return plain(q, k, v, **others)  # transformers 5.17's takes no groups of heads

    def run(docs, *tensors):
        return gated_delta_rule(torch_function, docs, *tensors, use_qk_l2norm_in_kernel=True)[0]

    def alone(q, k, v, g, beta):
        return torch_function(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0]

    return run, alone


def scan():
    torch_function = inspect.unwrap(modeling_mamba2.mamba2_chunk_scan)
    fixed = {"chunk_size": 16, "dt_softplus": True, "dt_limit": (0.1, 2.0)}

    def run(docs, x, dt, B, C, A, D, bias):
        return mamba2_scan(
            torch_function,
            docs,
            x,
            dt,
            A,
            B,
            C,
            D=D,
            dt_bias=bias,
            **fixed,
        )

    def alone(x, dt, B, C, A, D, bias):
        return torch_function(x, dt, A, B, C, D=D, dt_bias=bias, **fixed)

    return run, alone


def of_tokens(per_key=False, T=T):
    q, k, v = (randn(1, T, h, d, seed=i) for i, (h, d) in enumerate([(H, K), (H, K), (HV, V)]))
    if per_key:
        v = v[:, :, :H]
    g = -randn(*v.shape[:3], *([K] if per_key else []), seed=3).abs()
    return [q, k, v, g, randn(*v.shape[:3], seed=4).sigmoid()]


def chunk_offsets(cu_seqlens, size):
    return pad(((cu_seqlens.diff() + size - 1) // size).cumsum(0), (1, 0))


def stand_in_for_fla(patch):
    """The function of fla that finds where the chunks of slots start; none of its kernels."""
    index = ModuleType("fla.ops.utils.index")
    index.prepare_chunk_offsets = chunk_offsets
    for module in (*map(ModuleType, ("fla", "fla.ops", "fla.ops.utils")), index):
        patch.setitem(sys.modules, module.__name__, module)


CASES = {
    # how it runs, the document alone, tensors by token, other tensors
    "convolution": lambda T=T: (
        *(convolution, convolution_alone),
        *([randn(1, T, 6)], [randn(6, 4, seed=1), randn(6, seed=2)]),
    ),
    "gated_delta": lambda T=T: (
        *delta_rule(modeling_qwen3_5, "torch_chunk_gated_delta_rule"),
        *(of_tokens(T=T), []),
    ),
    "kimi_delta": lambda T=T: (
        *delta_rule(modeling_kimi_linear, "chunk_kimi_delta_attention"),
        *(of_tokens(per_key=True, T=T), []),
    ),
    "mamba2": lambda T=T: (
        *scan(),
        [randn(1, T, HV, V), randn(1, T, HV, seed=1)] + [randn(1, T, H, K, seed=i) for i in (2, 3)],
        [-randn(HV, seed=4).abs(), randn(HV, seed=5), randn(HV, seed=6)],
    ),
}


ROWS = {"documents": documents, "trees": branches}


def run_case(name, docs, device="cpu", dtype=torch.float64, *, halved=False):
    """Output and gradients, of the same rounded inputs in every dtype.

    Args:
        halved: the tokens of the third document, or segment, which is a leaf, are half as large.
    """
    run, _, by_token, shared = CASES[name]()
    leaves = [x.bfloat16().to(device, dtype) for x in (*by_token, *shared)]
    for x in leaves[: len(by_token)]:
        x[:, THIRD] *= 0.5 if halved else 1.0
    leaves = [x.requires_grad_() for x in leaves]
    ordered = [docs.tokens.enter(x) for x in leaves[: len(by_token)]]
    out = docs.tokens.leave(run(docs, *ordered, *leaves[len(by_token) :]))
    grad = randn(*out.shape, seed=9).bfloat16().to(device, dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def check_bits_of_others(name, row, docs, **where):
    """They do not change with the third document's tokens; in a tree what is above it learns."""
    kept = 1 + len(CASES[name]()[2])  # gradients of weights are of all tokens
    before, after = (run_case(name, docs, **where, halved=x)[:kept] for x in (False, True))
    others = torch.ones(T, dtype=torch.bool)
    others[THIRD] = False
    assert torch.equal(before[0][:, others], after[0][:, others])
    learns = THIRD
    if row == "trees":
        learns = slice(0, 6)
        others[learns] = False
    for x, y in zip(before[1:], after[1:], strict=True):
        assert torch.equal(x[:, others], y[:, others])
    pairs = zip(before, after, strict=True)
    assert any(not torch.equal(x[:, learns], y[:, learns]) for x, y in pairs)
