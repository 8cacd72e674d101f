"""`explain`: which backend "auto" chooses for a kind of call, and why; measures on request."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flexvarlen.attention.auto.cache_keys import bucket, describe, sizes
from flexvarlen.attention.auto.decide import (
    CANDIDATES,
    Order,
    candidates,
    decide,
    known_failure,
    measure_kernels,
    order,
)
from flexvarlen.attention.backends.registry import BACKENDS, refusal
from flexvarlen.attention.call import AttentionCall, attention_call, is_past_int32
from flexvarlen.attention.choose import forget_decisions
from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.mask.document_mask import DocumentMask
from flexvarlen.measure import HostAndDevice, Timing


@dataclass(frozen=True)
class Candidate:
    """A backend as "auto" sees it for one kind of call.

    Attributes:
        name: name of the backend.
        timing: times of a call on the host and on the device, if measured on this machine.
        reason: why it cannot serve the call, also if only in a compiled graph, or was not measured,
            with its time in the nearest record; None if it can, and was measured.
        can: whether the backend can serve the eager call.
    """

    name: str
    timing: HostAndDevice | None
    reason: str | None
    can: bool


@dataclass(frozen=True)
class BackendReport:
    """What "auto" chooses for a kind of call, and why; `str()` is a table.

    Attributes:
        call: description of the kind of call.
        layout: description of the documents.
        chosen: the backend that "auto" chooses for eager calls.
        compiled: the backend that it chooses for calls inside a compiled graph.
        why: what decided: a measurement on this machine, the nearest record with its GPU, versions
            and commit, or the fixed order.
        candidates: all backends; first those with known times, ordered by device time.
    """

    call: str
    layout: str
    chosen: str
    compiled: str
    why: str
    candidates: tuple[Candidate, ...]

    def __str__(self) -> str:
        lines = [f"{self.call}; {self.layout}", self.sentence()]
        width = max(len(candidate.name) for candidate in self.candidates)
        for candidate in self.candidates:
            mark = "*" if candidate.name in (self.chosen, self.compiled) else " "
            texts = [] if candidate.reason is None else [candidate.reason]
            if (timing := candidate.timing) is not None:
                device, host = milliseconds(timing.device), milliseconds(timing.host)
                texts.insert(0, f"{device} ms on the device, {host} on the host")
            lines.append(f"{mark} {candidate.name:{width}}  {'; '.join(texts)}")
        return "\n".join(lines)

    def sentence(self) -> str:
        """A sentence that says what "auto" chooses, and why."""
        taken = self.chosen
        if self.compiled != self.chosen:
            taken += f", and {self.compiled} in a compiled graph"
        return f"auto takes {taken}: {self.why}."


def milliseconds(timing: Timing) -> str:
    """The median and, in parentheses, the 20th and 80th percentile."""
    return f"{timing.ms_p50:.3f} ({timing.ms_p20:.3f}–{timing.ms_p80:.3f})"


def explain(
    layout: PackedLayout,
    *,
    dtype: torch.dtype,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    causal: bool = True,
    window: int | tuple[int, int] | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    return_lse: bool = False,
    needs_grad: bool = True,
    deterministic: bool | None = None,
    batch_invariant: bool | None = None,
    measure: bool = False,
) -> BackendReport:
    """Explain what `backend="auto"` chooses: the times of the kernels, and which record decides.

    With `measure=True` the kernels are timed here first, on these documents. The times are kept in
    a file and come before the table that ships with the package, for calls of this kind with about
    the same total_tokens, capacity and max_seqlen_bound (the same powers of two), eager or
    compiled. Measure once for training and once with `needs_grad=False`.

    Args:
        layout: the documents, on the device of the calls.
        dtype, num_heads, num_kv_heads, head_dim, sinks: properties of the calls' tensors.
        causal, window, chunk, softcap, return_lse, deterministic, batch_invariant: as in
            `packed_attention`; calls with a prefix or `layout_k` cannot be measured.
        needs_grad: whether a backward follows and is timed too.
        measure: time every kernel that can serve the call, and check its results.

    Returns:
        A `BackendReport`, to print or to read its fields. Without `measure` no kernel runs, so the
        first call may reject the kernel that it names.

    Raises:
        ValueError: a window, chunk, softcap or number of heads is invalid.
        NotImplementedError: no backend can serve the call.
        RuntimeError: `measure` is used inside a backward or while a CUDA graph is captured.

    Measuring takes a few seconds, plus the time to load and compile each kernel; it syncs, and may
    raise torch's peak memory statistics. Nothing is timed on the CPU.

    >>> layout = PackedLayout.from_lengths([3, 2])
    >>> heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    >>> explain(layout, dtype=torch.float32, **heads).chosen
    'sdpa'
    """
    mask = DocumentMask.of(layout, causal=causal, window=window, chunk=chunk)
    call = attention_call(
        layout.device,
        dtype,
        num_heads,
        num_kv_heads,
        head_dim,
        mask.spec,
        softcap=softcap,
        sinks=sinks,
        needs_grad=needs_grad,
        deterministic=deterministic,
        batch_invariant=batch_invariant,
        return_lse=return_lse,
        past_int32=is_past_int32(layout, layout, num_heads, head_dim),
    )
    sizes_bucket = None if 0 in sizes(mask) else bucket(sizes(mask))
    if measure and sizes_bucket is not None:
        measure_kernels(call, sizes_bucket, mask)
        forget_decisions()
    in_graph = call.in_graph()
    eager, compiled = (decide(x, sizes_bucket, mask, check=False) for x in (call, in_graph))
    tried = order(in_graph, sizes_bucket)
    found = [_candidate(name, call, in_graph, tried) for name in BACKENDS]
    found.sort(
        key=lambda c: tried.times[c.name].device_ms if c.name in tried.times else float("inf")
    )
    return BackendReport(
        call=describe(call),
        layout=repr(layout),
        chosen=eager.backend,
        compiled=compiled.backend,
        why=eager.why,
        candidates=tuple(found),
    )


def _candidate(name: str, call: AttentionCall, in_graph: AttentionCall, tried: Order) -> Candidate:
    reason, failed = refusal(name, call), known_failure(name, call)
    if reason is not None:
        return Candidate(name, None, reason, can=False)
    timing = tried.timings.get(name)
    if failed is not None:
        reason = f"failed: {failed}"
    elif timing is None and name in tried.times:
        reason = f"supported; {tried.times[name].device_ms:.3f} ms on the device in the record."
    elif call.device.type in CANDIDATES and name not in candidates(call):
        reason = "supported, but slow by design: never timed."
    elif timing is None:
        reason = "supported; not timed."
    reasons = (reason, refusal(name, in_graph))
    return Candidate(name, timing, " ".join(x for x in reasons if x) or None, can=True)
