"""Honest measurements: interleaved timings, compilation counts, peak memory, environment.

Every benchmark row and every comparison of the project takes its numbers from here, so that two of
them mean the same thing. Nothing here knows about attention.

Imports: torch; the standard library. Never transformers, never a kernel package.
"""

from __future__ import annotations

import ctypes
import gc
import math
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from flexvarlen.environment import environment, without_paths

__all__ = [
    "CompileStats",
    "HostAndDevice",
    "Timing",
    "environment",
    "memory_meaning",
    "peak_memory_mib",
    "summarize",
    "time_host_and_device",
    "time_interleaved",
    "watch_compilation",
]

# The largest L2 of a GPU we know of is 126 MB (B200): writing twice that leaves no input in it.
_L2_FLUSH_BYTES = 256 * 2**20

BUSY_MS = 2.2
"""What `time_host_and_device` puts before each timed call on CUDA, about, unless told."""

# Dynamo keeps the last 64 compilations by default; one model with 44 graph breaks makes more.
_METRICS_LIMIT = 65_536


# --- time ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timing:
    """Percentiles of `repeats` timed calls, in milliseconds."""

    ms_p20: float
    ms_p50: float
    ms_p80: float
    repeats: int


def summarize(samples_ms: Sequence[float]) -> Timing:
    """The percentiles of raw samples (linear interpolation between neighbours).

    >>> summarize([3.0, 1.0, 2.0]).ms_p50
    2.0
    """
    if not samples_ms:
        raise ValueError("samples_ms must hold at least one measurement, got none; raise repeats")
    ordered = sorted(samples_ms)

    def percentile(fraction: float) -> float:
        position = fraction * (len(ordered) - 1)
        low = math.floor(position)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (position - low) * (ordered[high] - ordered[low])

    return Timing(percentile(0.2), percentile(0.5), percentile(0.8), len(ordered))


@dataclass(frozen=True)
class HostAndDevice:
    """A call's two times.

    Attributes:
        host: until the call returns: Python, launches, guards.
        device: of the work that it leaves to the device, back to back.
    """

    host: Timing
    device: Timing

    @property
    def eager_ms(self) -> float:
        """Milliseconds, median, of such calls one after another, not compiled.

        The host runs ahead of the device: the slower of the two decides.
        """
        return max(self.host.ms_p50, self.device.ms_p50)

    @property
    def compiled_ms(self) -> float:
        """The same in a compiled graph or a captured one, where Python costs nothing."""
        return self.device.ms_p50


def time_interleaved(
    variants: Mapping[str, Callable[[], object]],
    *,
    device: torch.device | str,
    warmup: int = 3,
    repeats: int | Mapping[str, int] = 20,
    flush_l2: bool = True,
    lead_in: int = 0,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Timing]:
    """Time several variants of one computation against each other, fairly.

    Rounds: each calls every variant once, in a random order of its own, so that clocks, heat and
    neighbours fall on all alike. Every timed call starts on an idle device
    and is timed to the end of its device work, so its own host time (launches, guards, host syncs)
    counts as far as it is not hidden behind that work. On CUDA: events, after a write that evicts
    the L2 cache. On the CPU: a wall clock.

    Args:
        variants: name -> a call without arguments; what it returns is dropped.
        device: where the variants run; decides the clock.
        warmup: untimed calls of each variant first (compile before: this is for caches and clocks).
        repeats: timed calls of each variant, or of each by name; a variant with fewer joins evenly
            spaced rounds.
        flush_l2: on CUDA, evict the L2 cache before each timed call.
        lead_in: untimed calls right before each timed one: a hot GPU's clocks follow the power that
            the last half second drew, so that a step after a lighter variant runs faster.
        progress: called with a variant's name before each of its timed calls.

    Returns:
        One `Timing` a variant, in the order given. Synchronizes the device.

    Raises:
        ValueError: repeats below 1. What a variant raises passes through.
    """
    device = torch.device(device)
    clock = _wall if device.type != "cuda" else _Events(device, writes=1 if flush_l2 else 0)
    samples = _interleaved(variants, clock, warmup, repeats, lead_in, progress)
    return {name: summarize([ms for _, ms in found]) for name, found in samples.items()}


def time_host_and_device(
    variants: Mapping[str, Callable[[], object]],
    *,
    device: torch.device | str,
    warmup: int = 3,
    repeats: int | Mapping[str, int] = 20,
    lead_in: int = 0,
    progress: Callable[[str], None] | None = None,
    busy_ms: float = BUSY_MS,
) -> dict[str, HostAndDevice]:
    """Time the host's part and the device's part of short calls apart.

    As `time_interleaved`, but on CUDA the stream is kept busy for `busy_ms` before each timed call
    (which also evicts the L2 cache): host time below that falls into no gap of the device, and no
    device time into the host's. Of a call whose host time is not below it, "device" holds gaps in
    which the device waited. On the CPU both are the wall clock's.

    `progress` is called before a variant's warm-up too, and the device is synchronized after both:
    what a call does to the device shows before another is named.
    """
    device = torch.device(device)
    clock = _wall if device.type != "cuda" else _Events.busy(device, busy_ms)
    wait = (lambda: None) if device.type != "cuda" else partial(torch.cuda.synchronize, device)
    samples = _interleaved(variants, clock, warmup, repeats, lead_in, progress, wait)
    return {
        name: HostAndDevice(*(summarize(ms) for ms in zip(*found, strict=True)))
        for name, found in samples.items()
    }


_Clock = Callable[[Callable[[], object]], tuple[float, float]]
"""Runs a call and gives its milliseconds on the host and on the device."""


def _interleaved(
    variants: Mapping[str, Callable[[], object]],
    clock: _Clock,
    warmup: int,
    repeats: int | Mapping[str, int],
    lead_in: int,
    progress: Callable[[str], None] | None = None,
    wait: Callable[[], None] | None = None,
) -> dict[str, list[tuple[float, float]]]:
    """`wait`: ends each variant's warm-up, which `progress` then names too."""
    wanted = {n: repeats if isinstance(repeats, int) else repeats[n] for n in variants}
    for name, count in wanted.items():
        if count < 1:
            raise ValueError(f"repeats of {name!r} must be at least 1, got {count}; raise it")
    for name, call in variants.items():
        if wait is not None and progress is not None:
            progress(name)
        for _ in range(warmup):
            call()
        if wait is not None:
            wait()
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    rounds = max(wanted.values(), default=0)
    order = random.Random(0)
    for index in range(rounds):
        for name in order.sample(list(variants), len(variants)):
            # Evenly spaced: a variant joins where its share of the rounds passes a whole number.
            if (index + 1) * wanted[name] // rounds == index * wanted[name] // rounds:
                continue
            if progress is not None:
                progress(name)
            for _ in range(lead_in):
                variants[name]()
            samples[name].append(clock(variants[name]))
    return samples


def _wall(call: Callable[[], object]) -> tuple[float, float]:
    begin = time.perf_counter()
    call()
    spent_ms = (time.perf_counter() - begin) * 1e3
    return spent_ms, spent_ms


class _Events:
    """CUDA events around a call, behind so many writes of 256 MiB on an idle device.

    While the stream is busy with them the first event does not wait for the host.
    """

    def __init__(self, device: torch.device, writes: int) -> None:
        self.device, self.writes = device, writes
        elements = _L2_FLUSH_BYTES // 4 if writes else 1
        self.scratch = torch.empty(elements, dtype=torch.int32, device=device)

    @classmethod
    def busy(cls, device: torch.device, busy_ms: float) -> _Events:
        """Behind writes that take about `busy_ms` on this device: one takes 0.06 ms on an H200."""
        events = cls(device, writes=1)
        write_ms = min(events(events.scratch.zero_)[1] for _ in range(3))
        events.writes = math.ceil(busy_ms / write_ms)
        return events

    def __call__(self, call: Callable[[], object]) -> tuple[float, float]:
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(self.device)
        for _ in range(max(1, self.writes)):
            self.scratch.zero_()
        stream = torch.cuda.current_stream(self.device)  # another device's may be current
        begin.record(stream)
        called = time.perf_counter()
        call()
        host_s = time.perf_counter() - called
        end.record(stream)
        torch.cuda.synchronize(self.device)
        return host_s * 1e3, float(begin.elapsed_time(end))


# --- compilation ---------------------------------------------------------------------------------


@dataclass
class CompileStats:
    """What torch.compile did inside a `watch_compilation` block; filled in when the block ends."""

    graph_breaks: int = 0
    """Breaks met while tracing (0 under fullgraph=True, which raises instead)."""
    compilations: int = 0
    """Graphs compiled; a break makes two of one function, a recompilation one more."""
    recompilations: int = 0
    """Frames compiled again because a guard failed."""
    compile_s: float = 0.0
    """Wall seconds in which something was being compiled, backward graphs included."""
    reasons: list[str] = field(default_factory=list)
    """Why frames were compiled again, one sentence each, where this torch says so."""
    break_reasons: dict[str, int] = field(default_factory=dict)
    """First line of each graph break's explanation -> how often it was met."""

    def first_reasons(self) -> tuple[str, ...]:
        """The first three `reasons`, as a row keeps them: short, and without paths."""
        return tuple(without_paths(" ".join(why.split()))[:200] for why in self.reasons[:3])


@contextmanager
def watch_compilation() -> Iterator[CompileStats]:
    """Count graph breaks, compilations and recompilations inside the block.

    Reads torch's own counters (`torch._dynamo.utils.counters`, `get_compilation_metrics`), by
    difference, so blocks can follow one another and code that reads the counters elsewhere is not
    disturbed. Do not clear the counters inside the block; `torch._dynamo.reset()` is harmless.
    Verified on torch 2.13, by its source on 2.11; what a version lacks stays 0 or empty.

    Dynamo keeps its cache by code object, so the first compilation of a second model of the same
    class counts as a recompilation: reset before, or watch a block in which only other inputs come.

    >>> with watch_compilation() as stats:
    ...     _ = torch.compile(torch.sin, backend="eager")(torch.zeros(3))
    >>> stats.graph_breaks, stats.recompilations
    (0, 0)
    """
    from torch._dynamo import utils as dynamo_utils

    set_limit = getattr(dynamo_utils, "set_compilation_metrics_limit", None)
    if set_limit is not None:
        set_limit(_METRICS_LIMIT)
    breaks_before = dict(dynamo_utils.counters["graph_break"])
    graphs_before = dynamo_utils.counters["stats"]["unique_graphs"]
    metrics_before = {id(entry) for entry in dynamo_utils.get_compilation_metrics()}
    stats = CompileStats()
    try:
        yield stats
    finally:
        for reason, count in dict(dynamo_utils.counters["graph_break"]).items():
            new = count - breaks_before.get(reason, 0)
            if new > 0:
                line = without_paths(str(reason).partition("\n")[0])
                stats.break_reasons[line] = stats.break_reasons.get(line, 0) + new
        stats.graph_breaks = sum(stats.break_reasons.values())
        stats.compilations = dynamo_utils.counters["stats"]["unique_graphs"] - graphs_before
        entries = [
            entry
            for entry in dynamo_utils.get_compilation_metrics()
            if id(entry) not in metrics_before
        ]
        again = [entry for entry in entries if _is_recompilation(entry)]
        stats.recompilations = len(again)
        found = (getattr(entry, "recompile_reason", None) for entry in again)
        stats.reasons = [str(why) for why in found if why]
        stats.compile_s = _union_seconds(entries)


def _is_recompilation(entry: object) -> bool:
    """Whether a metric is of a frame compiled again (its id, "frame/attempt", has attempt > 0)."""
    if getattr(entry, "is_forward", True) is False or getattr(entry, "is_runtime", False):
        return False  # a backward graph, or run-time autotuning, of a frame that has its own entry
    identity = str(getattr(entry, "compile_id", None) or "")
    attempt = identity.rpartition("/")[2].partition("_")[0]
    return attempt.isdigit() and int(attempt) > 0


def _union_seconds(entries: Sequence[object]) -> float:
    """Seconds covered by the entries' spans; a backward compiled within a forward counts once."""
    spans = []
    for entry in entries:
        begin, end = getattr(entry, "start_time_us", None), getattr(entry, "end_time_us", None)
        if begin is not None and end is not None:
            spans.append((begin, end))
    total_us, covered_to = 0, 0
    for begin, end in sorted(spans):
        total_us += max(0, end - max(begin, covered_to))
        covered_to = max(covered_to, end)
    return total_us / 1e6


# --- memory --------------------------------------------------------------------------------------


def peak_memory_mib(call: Callable[[], object], device: torch.device | str) -> float | None:
    """Run `call` once and give its peak memory in MiB; `memory_meaning` says of what.

    CUDA: the most that torch's allocator held at once during the call, weights and all else that
    was alive before included. CPU: how far the process's peak resident memory rose above its
    resident memory before the call. What the C allocator holds free is given back first where it
    can be (glibc); what stays is reused without a trace, so this is a lower bound. None where the
    system cannot say (not Linux, or the peak cannot be reset).
    """
    device = torch.device(device)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) / 2**20
    _give_back_free_memory()
    before = _resident_kib("VmRSS") if _reset_peak_resident() else None
    call()
    peak = _resident_kib("VmHWM")
    return None if before is None or peak is None else max(0, peak - before) / 2**10


def memory_meaning(device: torch.device | str) -> str:
    """What `peak_memory_mib` measures on this device, for the heading of a table.

    >>> memory_meaning("cuda")
    'peak allocated by torch, weights included'
    """
    if torch.device(device).type == "cuda":
        return "peak allocated by torch, weights included"
    return "growth of peak resident memory (lower bound)"


def _give_back_free_memory() -> None:
    """Have glibc hand free pages back to the system; elsewhere nothing happens."""
    with suppress(OSError, AttributeError, TypeError):  # no C library by that name, or not glibc
        ctypes.CDLL(None).malloc_trim(0)


def _reset_peak_resident() -> bool:
    """Set VmHWM to VmRSS (Linux: writing 5 to clear_refs); False where that is not possible."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    hwm, rss = _resident_kib("VmHWM"), _resident_kib("VmRSS")
    # Some sandboxes accept the write and ignore it. 1 MiB: what may come and go between two reads.
    return hwm is not None and rss is not None and hwm - rss <= 1024


def _resident_kib(key: str) -> int | None:
    status = Path("/proc/self/status")
    if not status.is_file():
        return None
    match = re.search(rf"^{key}:\s*(\d+) kB$", status.read_text(), re.MULTILINE)
    return int(match[1]) if match else None
