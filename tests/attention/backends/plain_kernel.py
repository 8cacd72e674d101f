"""A stand-in for FlashAttention's kernels over cu_seqlens that runs anywhere."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from flexvarlen.attention.backends.cu_seqlens.backend import CuSeqlensBackend
from flexvarlen.attention.backends.cu_seqlens.kernel import KERNELS, CallBoundaries
from flexvarlen.attention.call import AttentionCall
from tests import oracle


class PlainBackend(CuSeqlensBackend):
    """As FlashAttention behaves: tails unwritten, +inf where nothing is seen, sinks unknown."""

    name = "plain"

    def __init__(self):
        super().__init__()
        self.forwards = 0

    def _documents(self, boundaries, call):
        spans_q, spans_k = (
            list(zip(cu.tolist(), cu.tolist()[1:], strict=False))
            for cu in (boundaries.cu_seqlens_q, boundaries.cu_seqlens_k)
        )
        for (a, b), (c, d) in zip(spans_q, spans_k, strict=True):
            assert b - a <= boundaries.max_seqlen_q
            assert d - c <= boundaries.max_seqlen_k
            window = (call.spec.left, call.spec.right)
            yield slice(a, b), slice(c, d), oracle.seen(b - a, d - c, causal=False, window=window)

    def _probabilities(self, q, k, seen, lse, call):
        scores = torch.einsum("qhd,khd->hqk", q, k) * call.scale
        scores = scores.masked_fill(~seen, float("-inf"))
        if lse is None:
            lse = scores.logsumexp(-1)
            lse = torch.where(lse.isneginf(), float("inf"), lse)
        return (scores - lse[..., None]).exp(), lse

    def forward(self, q, k, v, boundaries, call):
        self.forwards += 1
        repeats = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        out = torch.full_like(q, float("nan"))
        lse = q.new_full((q.shape[1], q.shape[0]), float("nan"))
        for rows, keys, seen in self._documents(boundaries, call):
            p, lse[:, rows] = self._probabilities(q[rows], k[keys], seen, None, call)
            out[rows] = torch.einsum("hqk,khd->qhd", p, v[keys])
        return out, lse

    def backward(self, grad, q, k, v, out, lse, boundaries, call):
        groups, repeats = k.shape[1], q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        dq, dk, dv = (torch.full_like(x, float("nan")) for x in (q, k, v))
        for rows, keys, seen in self._documents(boundaries, call):
            p, _ = self._probabilities(q[rows], k[keys], seen, lse[:, rows], call)
            dv[keys] = torch.einsum("hqk,qhd->khd", p, grad[rows])
            delta = (grad[rows] * out[rows]).sum(-1).T[..., None]
            ds = p * (torch.einsum("qhd,khd->hqk", grad[rows], v[keys]) - delta) * call.scale
            dq[rows] = torch.einsum("hqk,khd->qhd", ds, k[keys])
            dk[keys] = torch.einsum("hqk,qhd->khd", ds, q[rows])
        return dq, *(x.unflatten(1, (groups, repeats)).sum(2) for x in (dk, dv))


@pytest.fixture
def backend():
    yield PlainBackend()
    del KERNELS["plain"]


def call_of(q, k, mask, **asked):
    """The call of these tensors, with a scale of 0.25."""
    heads = (q.shape[1], k.shape[1], q.shape[2])
    return AttentionCall(q.device, q.dtype, *heads, mask.spec, 0.25, **asked)


class Given(NamedTuple):
    boundaries: CallBoundaries
    call: AttentionCall


@pytest.fixture
def given(backend):
    """The boundaries and the calls that the kernel gets, one by one."""
    kernel, calls = KERNELS["plain"], []
    forward, backward = kernel.forward, kernel.backward

    def noting_forward(*args):
        calls.append(Given(*args[-2:]))
        return forward(*args)

    def noting_backward(*args):
        calls.append(Given(*args[-2:]))
        return backward(*args)

    kernel.forward, kernel.backward = noting_forward, noting_backward
    return calls
