"""Interleaved timings: several variants of one computation in turns, on one clock."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

# The largest L2 of a GPU we know of is 126 MB (B200): writing twice that leaves no input in it.
_L2_FLUSH_BYTES = 256 * 2**20

BUSY_MS = 2.2
"""How long `time_host_and_device` keeps the stream busy before each timed call on CUDA."""


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
        raise ValueError("samples_ms must contain at least one measurement; raise repeats")
    ordered = sorted(samples_ms)

    def percentile(fraction: float) -> float:
        position = fraction * (len(ordered) - 1)
        low = math.floor(position)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (position - low) * (ordered[high] - ordered[low])

    return Timing(percentile(0.2), percentile(0.5), percentile(0.8), len(ordered))


def synchronize(device: torch.device) -> None:
    """Wait for the work of a CUDA device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def wall_seconds(call: Callable[[], object], device: torch.device) -> float:
    """Wall time of one call, to the end of its device work."""
    synchronize(device)
    begin = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - begin


@dataclass(frozen=True)
class HostAndDevice:
    """A call's two times.

    Attributes:
        host: time until the call returns: Python, launches, guards.
        device: time of the device work that it launches, without gaps.
    """

    host: Timing
    device: Timing

    @property
    def eager_ms(self) -> float:
        """Median milliseconds of such calls one after another, not compiled.

        The host runs ahead of the device: the slower of the two decides.
        """
        return max(self.host.ms_p50, self.device.ms_p50)

    @property
    def compiled_ms(self) -> float:
        """As `eager_ms`, in a compiled or captured graph, where Python costs nothing."""
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

    Each round calls every variant once, in a new random order, so that clocks, heat and other
    processes affect all variants equally. Every timed call starts on an idle device and is timed to
    the end of its device work, so its host time (launches, guards, host syncs) counts unless it is
    hidden behind that work. On CUDA, events are used, after a write that evicts the L2 cache; on
    the CPU, a wall clock.

    Args:
        variants: name -> a call without arguments; what it returns is dropped.
        device: where the variants run; decides the clock.
        warmup: untimed calls of each variant first (compile before: this is for caches and clocks).
        repeats: timed calls of each variant, as one number or by name; a variant with fewer calls
            takes part in evenly spaced rounds.
        flush_l2: on CUDA, evict the L2 cache before each timed call.
        lead_in: untimed calls right before each timed one: a hot GPU's clocks follow the power
            drawn in the last half second, so a step after a lighter variant runs faster.
        progress: called with a variant's name before each of its timed calls.

    Returns:
        One `Timing` per variant, in the order given. Synchronizes the device.

    Raises:
        ValueError: `repeats` is below 1. Exceptions of variants propagate.
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
    """Time host and device separately for short calls.

    As `time_interleaved`, but on CUDA the stream is kept busy for `busy_ms` before each timed call
    (which also evicts the L2 cache): host time below that causes no gaps on the device, and device
    time does not count for the host. If a call's host time is longer, "device" includes gaps in
    which the device waited. On the CPU both are wall-clock times.

    `progress` is also called before a variant's warm-up, and the device is synchronized after both,
    so that a device error appears before another variant is named.
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
"""Runs a call and returns its milliseconds on the host and on the device."""


def _interleaved(
    variants: Mapping[str, Callable[[], object]],
    clock: _Clock,
    warmup: int,
    repeats: int | Mapping[str, int],
    lead_in: int,
    progress: Callable[[str], None] | None = None,
    wait: Callable[[], None] | None = None,
) -> dict[str, list[tuple[float, float]]]:
    """`wait` ends each variant's warm-up, for which `progress` is then called too."""
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
    """CUDA events around a call, after N writes of 256 MiB on an idle device.

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
        stream = torch.cuda.current_stream(self.device)  # another device may be current
        begin.record(stream)
        called = time.perf_counter()
        call()
        host_s = time.perf_counter() - called
        end.record(stream)
        torch.cuda.synchronize(self.device)
        return host_s * 1e3, float(begin.elapsed_time(end))
