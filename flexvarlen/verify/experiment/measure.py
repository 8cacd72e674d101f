"""Check every variant of a case, then time the right ones in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from flexvarlen.measure import (
    Timing,
    memory_meaning,
    peak_memory_mib,
    summarize,
    time_interleaved,
    watch_compilation,
)
from flexvarlen.measure.timing import wall_seconds
from flexvarlen.runner.each import measure_each
from flexvarlen.runner.failures import is_lost, status_of
from flexvarlen.runner.suite import Finding, Options
from flexvarlen.verify.experiment.step import free

# Variants of one class share their code objects, and Dynamo's limits go by code object.
LIMITS = {"recompile_limit": 256, "accumulated_recompile_limit": 4096}
FEWEST_REPEATS, MOST_REPEATS = 3, 15
SLOW_S = 2.0
"""A call that takes longer is not timed again: the seconds of its second run stand, if nothing was
compiled in them. A shorter one is timed after another of its own, as a hot GPU's clocks follow the
power that the last half second drew."""

Measures = dict[str, Any]
T = TypeVar("T")


@dataclass
class CheckedVariant:
    """A variant after its first run.

    Attributes:
        call: what is timed.
        measures: what is known so far.
        wrong: what is wrong with its numbers, or None; then it is not timed.
        conclude: the median in ms -> more measures.
        afterwards: run once all is timed; gives more measures, and what was wrong, or None.
        took_s: seconds of the second run; None where something was compiled in it.
    """

    call: Callable[[], object]
    measures: Measures
    wrong: str | None = None
    conclude: Callable[[float], Measures] = lambda ms: {}
    afterwards: Callable[[], tuple[Measures, str | None]] = lambda: ({}, None)
    took_s: float | None = None


def first_run(call: Callable[[], T]) -> tuple[T, Measures]:
    """A variant's first run: what it gives, its seconds, and what was compiled in them."""
    begin = time.perf_counter()
    with watch_compilation() as stats:
        found = call()
    return found, {
        "first_step_s": time.perf_counter() - begin,
        "compile_s": stats.compile_s,
        "graphs": stats.compilations,
        "graph_breaks": stats.graph_breaks,
    }


def measure_variants(
    variants: Sequence[str],
    check: Callable[[str], CheckedVariant],
    options: Options,
    *,
    most_repeats: int = MOST_REPEATS,
    slow_s: float = SLOW_S,
    lead_in: int = 1,
) -> list[Finding]:
    """A finding of each variant.

    Args:
        variants: names.
        check: a variant's first run, compared with the reference; raises what the variant raises.
        options: of the run; a variant is timed for about `options.seconds`.
        most_repeats: timed calls of a variant at most.
        slow_s: calls that take longer are timed once.
        lead_in: untimed calls before each timed one; 0 where all variants draw like power.

    Raises:
        DeviceLost: nothing can be measured any more in this process.
    """
    right: dict[str, CheckedVariant] = {}

    def first_runs(variant: str) -> Finding:
        checked = check(variant)
        if checked.wrong is not None:
            finding = Finding(variant, "wrong", checked.wrong, checked.measures)
        else:
            _run_again(checked, options)
            right[variant] = checked
            finding = Finding(variant, "ok")
        options.say(f"{variant}: {'right' if variant in right else 'wrong'}")
        return finding

    torch._dynamo.reset()  # what another case compiled, and the models it holds
    with torch._dynamo.config.patch(LIMITS):
        found = measure_each("its first runs", variants, first_runs, options.device)
        findings = [finding for finding in found if finding.variant not in right]
        for variant, timing in _time(right, options, most_repeats, slow_s, lead_in).items():
            checked = right[variant]
            if isinstance(timing, Finding):
                reason = f"not timed: {timing.reason}"
                findings.append(Finding(variant, timing.status, reason, checked.measures))
                continue
            more, wrong = checked.afterwards()
            free(options.device)
            measures = checked.measures | asdict(timing) | checked.conclude(timing.ms_p50) | more
            findings.append(Finding(variant, "wrong" if wrong else "ok", wrong, measures))
    torch._dynamo.reset()
    free(options.device)
    return findings


def _run_again(checked: CheckedVariant, options: Options) -> None:
    """The second run, for its time and its peak of memory."""

    def timed() -> None:
        checked.took_s = wall_seconds(checked.call, options.device)

    with watch_compilation() as stats:
        peak_mib = peak_memory_mib(timed, options.device)
    if stats.compilations:
        checked.took_s = None
    checked.measures |= {"peak_mib": peak_mib, "peak_meaning": memory_meaning(options.device)}


def _time(
    right: dict[str, CheckedVariant],
    options: Options,
    most_repeats: int,
    slow_s: float,
    lead_in: int,
) -> dict[str, Timing | Finding]:
    """Timings of all variants, in turns; of those that are slow, their second run's."""
    slow = {x: c.took_s for x, c in right.items() if c.took_s is not None and c.took_s > slow_s}
    fast = {x: c for x, c in right.items() if x not in slow}
    found: dict[str, Timing | Finding] = dict(
        time_in_turns(
            {name: checked.call for name, checked in fast.items()},
            {name: checked.took_s or slow_s for name, checked in fast.items()},
            options.device,
            seconds=options.seconds,
            most_repeats=most_repeats,
            warmup=0,  # each ran twice
            lead_in=lead_in,
        )
    )
    found |= {name: summarize([took * 1e3]) for name, took in slow.items()}
    return {name: found[name] for name in right}


def time_in_turns(
    calls: Mapping[str, Callable[[], object]],
    took_s: Mapping[str, float],
    device: torch.device,
    *,
    seconds: float,
    most_repeats: int = MOST_REPEATS,
    warmup: int = 1,
    lead_in: int = 0,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Timing | Finding]:
    """Timings of all variants' calls, interleaved.

    One that raises, as of memory, is timed no further: its finding says why.

    Args:
        calls: by variant.
        took_s: seconds of one call; one that is not there runs first.
        seconds: that a variant is timed for, about.
        most_repeats: timed calls of a variant at most.
        warmup, lead_in, progress: as in `time_interleaved`.

    Raises:
        RuntimeError: the device is lost.
    """
    raised: dict[str, Finding] = {}

    def guarded(name: str) -> None:
        if name in raised:
            return
        try:
            calls[name]()
        except Exception as error:  # kernels and compilers raise types of their own
            if is_lost(error, device):
                raise
            raised[name] = Finding(name, *status_of(error))
            free(device)

    guarded_calls = {name: partial(guarded, name) for name in calls}
    first_s = {
        name: wall_seconds(call, device)
        for name, call in guarded_calls.items()
        if name not in took_s
    }
    timings = time_interleaved(
        guarded_calls,
        device=device,
        warmup=warmup,
        repeats={
            name: max(FEWEST_REPEATS, min(most_repeats, int(seconds / took)))
            for name, took in (first_s | dict(took_s)).items()
        },
        flush_l2=False,  # a model's step evicts it by itself
        lead_in=lead_in,
        progress=progress,
    )
    return timings | raised
