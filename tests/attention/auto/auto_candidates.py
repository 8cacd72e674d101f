"""Stand-ins for kernels, which make `backend="auto"` measure on the CPU."""

from __future__ import annotations

import json
import multiprocessing
import time

import pytest
import torch
from torch._dynamo.utils import counters

import flexvarlen as fv
from flexvarlen import env as switches
from flexvarlen.attention import choose
from flexvarlen.attention import explain as explain_module
from flexvarlen.attention.auto import cache_file, timing
from flexvarlen.attention.auto import decide as auto
from flexvarlen.attention.backends import registry as backends
from flexvarlen.attention.backends.sdpa import SdpaBackend
from flexvarlen.attention.call import AttentionCall

HEADS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
SLOW_S, FAST_S = 0.02, 0.0
BY_SLOW, BY_FAST = 1.002, 1.003
"""What a stand-in multiplies a result by: it tells who gave it, and is near enough to be taken."""

TOKENS, CAPACITY, BOUND = 64, 8, 64


class StandIn(SdpaBackend):
    """sdpa's result times `factor`, after `seconds`."""

    def __init__(self, name, seconds, factor=1.0, *, refuses=None, fails=None):
        self.name, self.seconds, self.factor = name, seconds, factor
        self.refuses, self.fails = refuses, fails
        self.calls, self.grad_modes = 0, set()

    def why_not(self, call):
        if self.refuses is not None:
            return self.refuses(call)
        return None

    def plan(self, mask, *, batch_invariant=False):
        return super().plan(mask)

    def attend(self, *args):
        out, lse = super().attend(*args)
        if not torch.compiler.is_compiling():
            self.calls += 1
            self.grad_modes.add(torch.is_grad_enabled())
            time.sleep(self.seconds)
            if self.fails is not None:
                raise self.fails
        return out * self.factor, lse


def set_up(patch, folder, *stand_ins):
    """Make the stand-ins the candidates on the CPU, with sdpa as the static order's choice."""
    registry = {**backends._REGISTRY, **{backend.name: backend for backend in stand_ins}}
    patch.setattr(backends, "_REGISTRY", registry)
    for module in (auto, explain_module):
        patch.setattr(module, "BACKENDS", tuple(registry))
    patch.setattr(auto, "CANDIDATES", {"cpu": tuple(backend.name for backend in stand_ins)})
    patch.setattr(timing, "BUDGET_S", 0.1)
    patch.setenv(switches.CACHE, str(folder))
    choose.clear_cache()


@pytest.fixture
def candidates(monkeypatch, tmp_path):
    """A function that makes its arguments the candidates, and gives them back."""

    def make(*stand_ins):
        set_up(monkeypatch, tmp_path / "cache", *stand_ins)
        return stand_ins

    yield make
    monkeypatch.undo()
    choose.clear_cache()


@pytest.fixture
def two(candidates):
    """The slow one first in every order."""
    return candidates(StandIn("slow", SLOW_S, BY_SLOW), StandIn("fast", FAST_S, BY_FAST))


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


def taken(mask, needs_grad=False):
    """What "auto" takes for calls in fp32."""
    call = AttentionCall(mask.layout.device, torch.float32, *HEADS.values(), mask.spec)
    return choose.choose("auto", call._replace(needs_grad=needs_grad), mask)


def entries():
    return json.loads(cache_file.cache_path().read_text())["entries"]


def in_processes(target, arguments):
    """What processes of their own put into the queue each is given last, in their order.

    Forked from a server that has imported what they need, which takes seconds, and run nothing.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*{target.__module__, "tests.attention.auto.auto_candidates"}])
    queues = [context.Queue() for _ in arguments]
    processes = [
        context.Process(target=target, args=(*given, queue))
        for given, queue in zip(arguments, queues, strict=True)
    ]
    for process in processes:
        process.start()
    try:
        return [queue.get(timeout=120) for queue in queues]
    finally:
        for process in processes:
            process.join(timeout=60)
            if process.is_alive():
                process.terminate()


@pytest.fixture
def _fresh_dynamo():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
