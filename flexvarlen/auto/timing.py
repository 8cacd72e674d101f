"""Time kernels against each other on random tensors, on a user's documents; leave no trace.

Shape legend: T = tokens of the query row, Tk = of the key row, H = num_heads, Hkv = num_kv_heads,
D = head_dim.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import NamedTuple

import torch
from torch import Tensor

from flexvarlen.auto.layer import NO_LAYER, Layer, time_layer
from flexvarlen.backends import AttentionOptions, AttentionRequest, get_backend
from flexvarlen.mask import DocumentMask
from flexvarlen.measure import BUSY_MS, HostAndDevice, time_host_and_device

BUDGET_S = 1.5
"""Timed calls of all candidates take about so long; loading and compiling them comes on top."""

_HEATS = ((1, math.inf), (3, 1.5), (5, 1.06))
"""Heats: fewest rounds, and how many times slower than the fastest of the heat before one may be to
take part. A third of the budget each."""

_MOST_ROUNDS = 100

Failure = str

OUT_OF_MEMORY: Failure = "out of memory"


class Race(NamedTuple):
    """What came of timing candidates.

    Attributes:
        timings: of each that ran, of the last heat that it took part in.
        finalists: those of the last heat; only their times are of the same minute.
        failed: why each other one failed.
        layer: what is around such a call; None if it could not be timed.
    """

    timings: dict[str, HostAndDevice]
    finalists: tuple[str, ...]
    failed: dict[str, Failure]
    layer: Layer | None


def time_candidates(request: AttentionRequest, mask: DocumentMask, names: Sequence[str]) -> Race:
    """Time each candidate once compiled: forward, and backward if the request needs it.

    Args:
        request: the kind of call.
        mask: the documents; q, k and v are random.
        names: candidates that can serve the request.

    Returns:
        The times of those that ran, interleaved, and why each other one failed.

    What the calling thread has set (grad mode, autocast, dispatch modes, hooks on saved tensors, as
    in gradient checkpointing) neither changes the times nor sees the calls: they run in a thread of
    their own, on the caller's stream; cuBLAS's workspaces of that thread and of the backward's
    stay. Random states are as before. Syncs; must not be called while a CUDA graph is captured, nor
    inside a backward, whose thread it would wait for.
    """
    device = request.device
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def work() -> Race:
        with ExitStack() as stack:
            if stream is not None:
                stack.enter_context(torch.cuda.device(device))
                stack.enter_context(torch.cuda.stream(stream))
            ours = [] if stream is None else [stream.device_index]
            stack.enter_context(torch.random.fork_rng(ours, device_type="cuda"))
            stack.enter_context(torch.set_grad_enabled(request.needs_grad))
            stack.enter_context(torch.autograd.set_detect_anomaly(False))  # of all threads
            return _time(request, mask, names)

    try:
        with ThreadPoolExecutor(1, thread_name_prefix="flexvarlen-auto") as thread:
            return thread.submit(work).result()
    except torch.OutOfMemoryError as error:  # of the random tensors themselves
        return Race({}, (), dict.fromkeys(names, _reason(error)), None)
    finally:
        if stream is not None:
            torch.cuda.empty_cache()  # what it used goes back to where the caller found it


def _time(request: AttentionRequest, mask: DocumentMask, names: Sequence[str]) -> Race:
    failed: dict[str, Failure] = {}

    def guarded(name: str, call: Callable[[], object]) -> Callable[[], object]:
        def run() -> None:
            if name in failed:
                return
            try:
                call()
            # Whatever a foreign kernel raises: it is reported, and the others are still timed.
            except Exception as error:
                failed[name] = _reason(error)

        return run

    layer: Layer | None = None
    try:
        layer = time_layer(request, mask.layout.total_tokens)
    except RuntimeError as error:  # of memory, of cuBLAS: not the kernels' failure
        warnings.warn(
            f"flexvarlen: auto could not time a decoder layer beside the kernels "
            f"({_reason(error)}), so it takes the kernel that is fastest by itself; free some of "
            "the GPU's memory before the first such call.",
            stacklevel=2,
        )
    tensors = _Tensors.random(request, mask)
    calls = {name: guarded(name, _Call(name, request, mask, tensors)) for name in names}
    for call in calls.values():
        call()  # loads, compiles, tunes
    timings: dict[str, HostAndDevice] = {}
    around = layer or NO_LAYER
    alive = list(calls)
    for least, slack in _HEATS:
        ran = {name: timings[name] for name in alive if name in timings and name not in failed}
        alive = [
            name for name in alive if name not in failed and _is_near(name, ran, slack, around)
        ]
        if len(alive) < 2 and ran:
            break
        round_s = sum(
            ran[name].eager_ms / 1e3 if name in ran else _seconds(calls[name], request.device)
            for name in alive
        )
        round_s += len(alive) * BUSY_MS / 1e3 if request.device.type == "cuda" else 1e-6
        rounds = max(least, min(_MOST_ROUNDS, int(BUDGET_S / len(_HEATS) / round_s)))
        timings |= time_host_and_device(
            {name: calls[name] for name in alive}, device=request.device, warmup=0, repeats=rounds
        )
    return Race(
        {name: timings[name] for name in timings if name not in failed},
        tuple(name for name in alive if name not in failed),
        failed,
        layer,
    )


def _is_near(name: str, timings: Mapping[str, HostAndDevice], slack: float, layer: Layer) -> bool:
    """Whether a candidate may still turn out the fastest, eagerly or in a compiled graph."""
    if not timings:
        return True
    mine = timings[name]
    return layer.added_by(mine) <= slack * min(
        layer.added_by(t) for t in timings.values()
    ) or mine.compiled_ms <= slack * min(t.compiled_ms for t in timings.values())


class _Tensors:
    """q `[T, H, D]`, k and v `[Tk, Hkv, D]`, sinks `[H]` or None, and the output's gradient."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, grad: Tensor) -> None:
        self.q_THD, self.k_THD, self.v_THD, self.sinks_H, self.grad_THD = q, k, v, sinks, grad
        self.inputs = [x for x in (q, k, v, sinks) if x is not None]

    @classmethod
    def random(cls, request: AttentionRequest, mask: DocumentMask) -> _Tensors:
        generator = torch.Generator(request.device).manual_seed(0)

        def random(*shape: int, requires_grad: bool = request.needs_grad) -> Tensor:
            values = torch.randn(
                shape, generator=generator, device=request.device, dtype=request.dtype
            )
            return values.requires_grad_(requires_grad)

        queries = (mask.layout.total_tokens, request.num_heads, request.head_dim)
        keys = (mask.layout_k.total_tokens, request.num_kv_heads, request.head_dim)
        return cls(
            random(*queries),
            random(*keys),
            random(*keys),
            random(request.num_heads) if request.sinks else None,
            random(*queries, requires_grad=False),
        )


class _Call:
    """One call of one candidate; its plan is made at the first, and is not timed."""

    def __init__(
        self, name: str, request: AttentionRequest, mask: DocumentMask, tensors: _Tensors
    ) -> None:
        self.backend = get_backend(name)
        self.request, self.mask, self.tensors = request, mask, tensors
        self.options = AttentionOptions(
            scale=request.head_dim**-0.5,
            softcap=request.softcap,
            sinks_H=tensors.sinks_H,
            deterministic=request.deterministic,
            batch_invariant=request.batch_invariant,
            return_lse=request.return_lse,
        )
        self.planned = False

    def __call__(self) -> None:
        if not self.planned:
            invariant = self.request.batch_invariant
            self.plan = self.backend.plan(self.mask, batch_invariant=invariant)
            self.planned = True
        x = self.tensors
        out_THD, _ = self.backend.attend(
            x.q_THD, x.k_THD, x.v_THD, self.mask, self.plan, self.options
        )
        if self.request.needs_grad:
            torch.autograd.grad(out_THD, x.inputs, x.grad_THD)


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def _reason(error: Exception) -> Failure:
    """One line: an error of a compiler may be a page."""
    if isinstance(error, torch.OutOfMemoryError):
        return OUT_OF_MEMORY
    line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {line[:300]}" if line else type(error).__name__
