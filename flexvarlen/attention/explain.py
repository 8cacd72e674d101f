"""`explain`: which backend "auto" chooses for a kind of call, and why; measured if needed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flexvarlen.attention.auto.decide import CANDIDATES, Decision, candidates
from flexvarlen.attention.auto.decoder_layer import Layer
from flexvarlen.attention.auto.keys import describe, sizes
from flexvarlen.attention.backends.registry import BACKENDS, refusal
from flexvarlen.attention.call import AttentionCall, is_past_int32
from flexvarlen.attention.check_arguments import check_heads, check_numbers
from flexvarlen.attention.choose import decision_for
from flexvarlen.env import BATCH_INVARIANT, DETERMINISTIC, resolve_flag
from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.mask.document_mask import DocumentMask
from flexvarlen.measure import HostAndDevice, Timing


@dataclass(frozen=True)
class Candidate:
    """A backend as "auto" sees it for one kind of call.

    Attributes:
        name: of the backend.
        timing: of a call, on the host and on the device, or None if it was not timed.
        reason: one sentence why it was not timed, or None if it was.
        can: whether it can serve the call.
    """

    name: str
    timing: HostAndDevice | None
    reason: str | None
    can: bool


@dataclass(frozen=True)
class Explanation:
    """What "auto" takes for a kind of call, and why; `str()` is a table.

    Attributes:
        call: the kind of call in words.
        layout: the documents in words.
        chosen: the backend that "auto" takes for eager calls.
        compiled: for calls inside a compiled graph.
        why: "measured", "from the cache file ...", "static order, because ...", and the like.
        candidates: every backend: first those that were timed, by device time.
        layer: approximate host and device ms of the rest of a decoder layer of this width,
            used to compare candidates in eager calls; None if it was not timed.
    """

    call: str
    layout: str
    chosen: str
    compiled: str
    why: str
    candidates: tuple[Candidate, ...]
    layer: Layer | None = None

    def __str__(self) -> str:
        lines = [f"{self.call}; {self.layout}", self.sentence()]
        width = max(len(candidate.name) for candidate in self.candidates)
        for candidate in self.candidates:
            mark = "*" if candidate.name in (self.chosen, self.compiled) else " "
            text = candidate.reason
            if (timing := candidate.timing) is not None:
                parts = (milliseconds(timing.device), milliseconds(timing.host))
                text = "{} ms on the device, {} on the host".format(*parts)
            lines.append(f"{mark} {candidate.name:{width}}  {text}")
        if self.layer is not None:
            lines.append(
                "In eager mode the slower of host and device counts. The rest of a layer as wide "
                f"as these heads took {self.layer.device_ms:.3f} ms on the device and "
                f"{self.layer.host_ms:.3f} ms on the host."
            )
        return "\n".join(lines)

    def sentence(self) -> str:
        """What "auto" takes, and why."""
        taken = self.chosen
        if self.compiled != self.chosen:
            taken += f", and {self.compiled} in a compiled graph"
        return f"auto takes {taken}: {self.why}."


def milliseconds(timing: Timing) -> str:
    """Median and, in parentheses, 20th and 80th percentile."""
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
    measure: bool = True,
) -> Explanation:
    """Explain what `backend="auto"` chooses: the time of each candidate, or why it has none.

    Also used to measure before a compiled run: nothing is timed inside a compiled graph, so
    the first compilation uses the static order unless the choice is cached. Call this first,
    with a layout of the run's total_tokens, capacity and max_seqlen_bound (a choice holds for
    their powers of two), once for training and once with `needs_grad=False`. If only the graph
    sees the documents of a long row (position_ids, document ids), call `fix_launch_sizes()`
    on the layout first, as kernels are then launched with its bounds. In a run of
    several ranks call it on every rank, as rank 0 decides for all.

    Args:
        layout: the documents, on the device of the calls.
        dtype, num_heads, num_kv_heads, head_dim, sinks: of the calls' tensors.
        causal, window, chunk, softcap, return_lse, deterministic, batch_invariant: as in
            `packed_attention`; calls with a prefix or `layout_k` are measured only at their first
            eager call.
        needs_grad: whether a backward follows and is timed too.
        measure: False uses a cached choice or the static order, and times nothing.

    Returns:
        An `Explanation`: print it, or read its fields.

    Raises:
        ValueError: a bad window, chunk, softcap or number of heads.
        NotImplementedError: no backend can serve the call.

    The first call of a kind takes a second or two, plus the time to load and compile each
    candidate; it syncs. It may raise torch's peak memory statistics. Nothing is timed on the CPU,
    nor with the environment variable FLEXVARLEN_AUTO=static.

    >>> layout = PackedLayout.from_lengths([3, 2])
    >>> heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    >>> explain(layout, dtype=torch.float32, **heads).chosen
    'sdpa'
    """
    mask = DocumentMask.of(layout, causal=causal, window=window, chunk=chunk)
    check_numbers(softcap)
    check_heads(num_heads, num_kv_heads)
    call = AttentionCall(
        device=layout.device,
        dtype=dtype,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        spec=mask.spec,
        softcap=softcap,
        sinks=sinks,
        needs_grad=needs_grad,
        deterministic=resolve_flag(DETERMINISTIC, deterministic),
        batch_invariant=resolve_flag(BATCH_INVARIANT, batch_invariant),
        return_lse=return_lse,
        past_int32=is_past_int32(layout, layout, num_heads, head_dim),
    )
    to_time = mask if measure else None
    decision = decision_for(
        call, sizes(mask), to_time, "measure=False was asked for", read_only=not measure
    )
    timings = decision.timings
    found = [_candidate(name, call, decision) for name in BACKENDS]
    found.sort(key=lambda c: (c.timing is None, timings[c.name].compiled_ms if c.timing else 0.0))
    return Explanation(
        call=describe(call),
        layout=repr(layout),
        chosen=decision.backend,
        compiled=decision.compiled,
        why=decision.why,
        candidates=tuple(found),
        layer=decision.layer,
    )


def _candidate(name: str, call: AttentionCall, decision: Decision) -> Candidate:
    reason = refusal(name, call)
    timing = decision.timings.get(name)
    can = reason is None
    if reason is None and timing is None:
        if name in decision.failed:
            reason = f"failed: {decision.failed[name]}"
        elif call.device.type in CANDIDATES and name not in candidates(call):
            reason = "supported, but slow by design: never timed."
        else:
            reason = "supported; not timed."
    return Candidate(name, timing, reason, can)
