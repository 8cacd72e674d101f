"""Operator drift in tests: small cases, kernels with bugs to order, and what a row must name.

Shape legend: T = tokens of the row, H = num_heads, Hkv = num_kv_heads, D = head_dim.
"""

from __future__ import annotations

import math

import pytest
import torch

from flexvarlen.attention.backends.reference import ReferenceBackend
from flexvarlen.drift.op.cases import OpCase
from flexvarlen.drift.op.comparisons import operator_drift

GROUPED = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
SMALL = OpCase("causal", (40, 1, 23), causal=True, **GROUPED)

LENGTHS = (40, 1, 24, 50, 21)
HEADS = {"num_heads": 8, "num_kv_heads": 4, "head_dim": 32}
CAUSAL = OpCase("causal", LENGTHS, causal=True, **HEADS)
BOTH_WAYS = OpCase("both ways", LENGTHS, **HEADS)
WINDOW = OpCase("window", LENGTHS, causal=True, window=16, **HEADS)
WINDOW_BOTH_WAYS = OpCase("window both ways", LENGTHS, window=16, **HEADS)
SCALE = 32**-0.5

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def drift(case=SMALL, backends=("reference",), **options):
    options = {"dtypes": [torch.float32], "repeats": 1} | options
    return operator_drift([case], list(backends), device="cpu", **options)


def only(rows):
    (row,) = rows
    return row


class Kernel:
    """Dense attention in fp32, with bugs to order; sums and softmax as a fused kernel's."""

    def __init__(self, **bugs):
        self.bugs = bugs

    def __call__(self, backend, q, k, v, sinks, call, mask, plan):
        bugs, dtype = self.bugs, q.dtype
        if "backward" in bugs:
            q, k, v = (
                change_backward(x, bugs["backward"].get(n))
                for n, x in zip("qkv", (q, k, v), strict=True)
            )
        repeats = q.shape[1] // k.shape[1]
        heads = torch.arange(q.shape[1])
        k_heads = bugs.get("k_heads", lambda h: h // repeats)(heads)
        v_heads = bugs.get("v_heads", lambda h: h // repeats)(heads)
        q, k, v = q.float(), k.float()[:, k_heads], v.float()[:, v_heads]
        scale = call.scale * bugs.get("scale", 1.0)
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        seen = self.seen(mask)
        scores = scores.masked_fill(~seen, -1e30)
        lse = scores.logsumexp(-1)
        p = (scores - lse[..., None]).exp() * seen
        out = bugs.get("product", lambda p, v: torch.einsum("hqk,khd->qhd", p, v))(p, v)
        lse = bugs.get("lse", lambda lse: lse)(lse)
        out = bugs.get("out", lambda out: out)(out)
        return out.to(dtype), lse if call.return_lse else None

    def seen(self, mask):
        lengths = self.bugs.get("lengths", lambda lengths: lengths)(mask.layout.lengths)
        document = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        place = torch.arange(len(document))
        behind = place[:, None] - place
        spec = mask.spec
        left = math.inf if spec.left < 0 else spec.left
        right = math.inf if spec.right < 0 else spec.right
        left, right = self.bugs.get("sides", lambda a, b: (a, b))(left, right)
        return (document[:, None] == document) & (behind <= left) & (-behind <= right)


class _Backward(torch.autograd.Function):
    """The identity, whose gradient is changed."""

    @staticmethod
    def forward(ctx, x, change):
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad if ctx.change is None else ctx.change(grad), None


def change_backward(x, change):
    """x, whose gradient is `change(gradient)`; None: as it is."""
    return _Backward.apply(x, change)


def put_kernel(monkeypatch, **bugs):
    """In the place of `reference`."""
    kernel = Kernel(**bugs)
    monkeypatch.setattr(ReferenceBackend, "attend", lambda self, *args: kernel(self, *args))


def exact(case, backend, dtype=torch.float32, *, train=True, device="cpu"):
    options = {"dtypes": [dtype], "comparisons": ["exact"], "train": train}
    return only(operator_drift([case], [backend], device=device, **options))


def named(row, *words):
    assert row.status == "wrong", (row.status, row.reason, row.measures)
    blame = row.measures["blame"]
    for word in words:
        assert word in blame, f"{word!r} not in {blame!r}"
    assert blame in row.reason
    assert "no hypothesis" not in blame
