"""Stand-ins for kernels, among which `backend="auto"` chooses on the CPU."""

from __future__ import annotations

import json

import torch

import flexvarlen as fv
from flexvarlen.attention.auto import cache_file
from flexvarlen.attention.auto.table import Case
from flexvarlen.attention.backends.sdpa import SdpaBackend

HEADS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
BY_SLOW, BY_FAST = 1.002, 1.003
"""What a stand-in multiplies a result by: it tells who gave it, and is near enough to be taken."""

TOKENS, CAPACITY, BOUND = 64, 8, 64
SOURCE = {"gpu": "a GPU", "capability": [0, 0], "torch": "2.0", "commit": "abc1234"}


class Clock:
    """Instead of the module `time`: only the stand-ins take time, `seconds` each call."""

    seconds = 0.0

    def perf_counter(self):
        return self.seconds


CLOCK = Clock()


class StandIn(SdpaBackend):
    """sdpa's result times `factor`.

    Its times in the table: `ms` on the device, `host_ms` on the host, forward and backward alike.
    """

    def __init__(
        self,
        name,
        ms,
        factor=1.0,
        *,
        host_ms=1.0,
        seconds=0.0,
        refuses=None,
        fails=None,
        change=None,
    ):
        self.name, self.factor, self.seconds = name, factor, seconds
        self.ms = [ms, ms, host_ms, host_ms]
        self.refuses, self.fails, self.change = refuses, fails, change
        self.calls, self.asked = 0, 0

    def why_not(self, call):
        self.asked += 1
        return None if self.refuses is None else self.refuses(call)

    def plan(self, mask, *, batch_invariant=False):
        return super().plan(mask)

    def attend(self, *args):
        out, lse = super().attend(*args)
        if not torch.compiler.is_compiling():
            self.calls += 1
            CLOCK.seconds += self.seconds
            if self.fails is not None:
                raise self.fails
        return (out if self.change is None else self.change(out)) * self.factor, lse


def a_case(ms, **fields):
    known = {"source": SOURCE, "depth": 1, "causal": True, **HEADS, "ms": ms}
    return Case(**known | {"tokens": TOKENS, "capacity": CAPACITY, "longest": BOUND} | fields)


def a_layout(*lengths, tokens=TOKENS, capacity=CAPACITY, bound=BOUND):
    return fv.PackedLayout.from_lengths(
        lengths or (30, 34), total_tokens=tokens, capacity=capacity, max_seqlen_bound=bound
    )


def tensors(tokens=TOKENS, requires_grad=False):
    q = torch.randn(tokens, 4, 16, requires_grad=requires_grad)
    k = torch.randn(tokens, 2, 16, requires_grad=requires_grad)
    return q, k, k.detach().clone().requires_grad_(requires_grad)


def attend(layout=None, *, requires_grad=False, **options):
    layout = a_layout() if layout is None else layout
    qkv = tensors(layout.total_tokens, requires_grad)
    return fv.packed_attention(*qkv, layout, backend="auto", **options)


def explain(layout=None, **options):
    layout = a_layout() if layout is None else layout
    return fv.explain(layout, dtype=torch.float32, **HEADS, **options)


def entries():
    return json.loads(cache_file.cache_path().read_text())["entries"]


def run_inside_a_backward(function):
    class Runs(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            function()
            return grad

    Runs.apply(torch.ones(1, requires_grad=True)).sum().backward()
