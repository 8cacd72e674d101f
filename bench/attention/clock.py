"""`time_calls`: short calls timed against one another.

On CUDA by events, behind work that keeps the device busy; on the CPU by torch.utils.benchmark.
"""

from __future__ import annotations

import dataclasses
import gc
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.benchmark import Timer

from flexvarlen.bench.suite import Options
from flexvarlen.measure import BUSY_MS, summarize, time_host_and_device

MAX_REPEATS, MIN_REPEATS = 30, 5  # of a suite that asks for no more
LEAD_IN = 1  # an untimed call before a timed one: other variants' drove its code from caches
LEAD_IN_BELOW_S = 2e-3  # longer device work hides the host's time
UNTIMED_ON_CPU = 2  # what Timer.timeit runs before a timed call


def host_bound(measures: Mapping[str, Any]) -> bool:
    """Whether device times are no times of kernels: the device waited for the host meanwhile.

    Said by `host_bound`; of rows that were made before it was noted, by the host's time.

    >>> host_bound({"host_ms_p50": 9.1}), host_bound({"host_ms_p50": 0.1}), host_bound({})
    (True, False, False)
    """
    return bool(measures.get("host_bound")) or (measures.get("host_ms_p50") or 0.0) >= BUSY_MS


def time_calls(
    calls: Mapping[str, Callable[[], object]],
    seconds: Mapping[str, float],
    options: Options,
    *,
    most: int = MAX_REPEATS,
    progress: Callable[[str], None] | None = None,
) -> dict[str, dict[str, Any]]:
    """Time calls interleaved, for about `options.seconds`, each for as long as any other.

    So a quick one is repeated more often than a slow one; on the CPU all as often as the slowest.

    Args:
        calls: name -> what is to be timed, which ran before.
        seconds: of each, about, from which follows how often it is repeated.
        most: repetitions; above `MAX_REPEATS` the time grows by as much.
        progress: called with a name before its calls; the device is idle then.

    Returns:
        By name, `device_ms_p20`, `device_ms_p50`, `device_ms_p80`, `device_repeats` (what the
        kernels take, back to back; on the CPU the call's wall time), and on CUDA `host_ms_…` (until
        the call returns). `host_bound`, True, where the host took as long as the device was kept
        busy: `device_ms_…` then hold gaps. Synchronizes.

    Raises:
        What a call raises.
    """
    on_gpu = options.on_gpu
    lead_in = LEAD_IN if on_gpu and min(seconds.values()) < LEAD_IN_BELOW_S else 0
    untimed, busy_s = (lead_in, BUSY_MS / 1e3) if on_gpu else (UNTIMED_ON_CPU, 0.0)
    left_s = options.seconds * max(1.0, most / MAX_REPEATS)
    costs_s = {name: (untimed + 1) * seconds[name] + busy_s for name in calls}
    repeats: dict[str, int] = {}
    # The cheapest first: what one leaves of its share is the slower ones'.
    cheapest = sorted(calls, key=costs_s.__getitem__)
    for sharers, name in zip(range(len(calls), 0, -1), cheapest, strict=True):
        repeats[name] = max(MIN_REPEATS, min(most, int(left_s / sharers / costs_s[name])))
        left_s -= repeats[name] * costs_s[name]
    if not on_gpu:
        return _on_cpu(calls, min(repeats.values()), progress)
    with _no_collection():
        timings = time_host_and_device(
            calls,
            device=options.device,
            warmup=1,
            repeats=repeats,
            lead_in=lead_in,
            progress=progress,
        )
    found = {
        name: _named("device", both.device) | _named("host", both.host)
        for name, both in timings.items()
    }
    for measures in found.values():
        measures |= {"host_bound": True} if host_bound(measures) else {}
    return found


def _on_cpu(
    calls: Mapping[str, Callable[[], object]],
    repeats: int,
    progress: Callable[[str], None] | None,
) -> dict[str, dict[str, Any]]:
    threads = torch.get_num_threads()  # a Timer's default is one
    timers = {
        name: Timer("call()", globals={"call": call}, num_threads=threads)
        for name, call in calls.items()
    }
    samples: dict[str, list[float]] = {name: [] for name in calls}
    order = random.Random(0)
    for _ in range(repeats):
        for name in order.sample(list(calls), len(calls)):
            if progress is not None:
                progress(name)
            samples[name].append(timers[name].timeit(1).median * 1e3)
    return {name: _named("device", summarize(found)) for name, found in samples.items()}


def _named(clock: str, timing: Any) -> dict[str, Any]:
    return {f"{clock}_{key}": value for key, value in dataclasses.asdict(timing).items()}


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage collection inside a timed call."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
