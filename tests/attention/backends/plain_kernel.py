"""A stand-in for FlashAttention's kernels over cu_seqlens that runs anywhere."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from flexvarlen.attention.backends.cu_seqlens.backend import CuSeqlensBackend
from flexvarlen.attention.backends.cu_seqlens.kernel import KERNELS, CallBoundaries
from flexvarlen.attention.call import AttentionCall
from tests.attention.backends.hub_kernels import attention


class Given(NamedTuple):
    boundaries: CallBoundaries
    call: AttentionCall


class PlainBackend(CuSeqlensBackend):
    """As FlashAttention behaves: tails unwritten, +inf where nothing is seen, sinks unknown.

    Attributes:
        given: what each pass of the kernel got, forward and backward, in order.
    """

    name = "plain"

    def __init__(self):
        super().__init__()
        self.given = []

    def _arguments(self, boundaries, call):
        """Those of `attention`, of documents that are as long as the kernel was launched for."""
        self.given.append(Given(boundaries, call))
        cu_q, cu_k = boundaries.cu_seqlens_q, boundaries.cu_seqlens_k
        assert cu_q.diff().max() <= boundaries.max_seqlen_q
        assert cu_k.diff().max() <= boundaries.max_seqlen_k
        return cu_q, cu_k, call.scale, False, call.spec.left, call.spec.right, None

    def forward(self, q, k, v, boundaries, call):
        out, lse = attention.forward(q, k, v, *self._arguments(boundaries, call))
        return out, lse.masked_fill(lse.isneginf(), float("inf"))

    def backward(self, grad, q, k, v, out, lse, boundaries, call):
        given = self._arguments(boundaries, call)
        return attention.backward(grad, q, k, v, out, lse, *given)


@pytest.fixture
def backend():
    yield PlainBackend()
    del KERNELS["plain"]


def call_of(q, k, mask, **asked):
    """The call of these tensors, with a scale of 0.25."""
    heads = (q.shape[1], k.shape[1], q.shape[2])
    return AttentionCall(q.device, q.dtype, *heads, mask.spec, 0.25, **asked)


def attend(backend, q, k, v, mask, sinks=None, **asked):
    """Output and LSE of the plain kernel, called as `packed_attention` calls a backend."""
    call = call_of(q, k, mask, sinks=sinks is not None, **asked)
    plan = backend.plan(mask, batch_invariant=call.batch_invariant)
    return backend.attend(q, k, v, sinks, call, mask, plan)
