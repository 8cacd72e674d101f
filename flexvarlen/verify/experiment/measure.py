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
from flexvarlen.runner.suite import DeviceLost, Finding, Options
from flexvarlen.verify.experiment.step import free

# Variants of one class share their code objects, and Dynamo's limits go by code object.
LIMITS = {"recompile_limit": 256, "accumulated_recompile_limit": 4096}
MOST_REPEATS = 15
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
    **timing: Any,
) -> list[Finding]:
    """A finding of each variant, as `check_and_time` makes them; Dynamo is reset before and after.

    Before: what another case compiled goes, with the models that it holds.

    Args:
        timing: options of `check_and_time`; `lead_in` is 1 by default.
    """
    torch._dynamo.reset()
    with torch._dynamo.config.patch(LIMITS):
        found = check_and_time(variants, check, options, **{"lead_in": 1, **timing})
    torch._dynamo.reset()
    free(options.device)
    return found


def check_and_time(
    variants: Sequence[str],
    check: Callable[[str], CheckedVariant],
    options: Options,
    *,
    most_repeats: int = MOST_REPEATS,
    slow_s: float = SLOW_S,
    lead_in: int = 0,
    after_checks: Callable[[], object] | None = None,
) -> list[Finding]:
    """Check every variant, run the right ones again, for their memory, and time them in turns.

    Args:
        variants: names.
        check: a variant's first run, compared with the reference; raises what the variant raises.
        options: of the run; a variant is timed for about `options.seconds`.
        most_repeats: timed calls of a variant at most.
        slow_s: calls that take longer are timed once.
        lead_in: untimed calls before each timed one; 0 where all variants draw like power.
        after_checks: called when no variant is checked any more; the second runs come after it.
            Without it each follows its first: a peak then holds the variants checked before it.

    Returns:
        Of each variant. One that raises once it is checked keeps its measures.

    Raises:
        DeviceLost: nothing can be measured any more in this process.
    """
    right: dict[str, CheckedVariant] = {}

    def first(variant: str) -> Finding:
        checked = check(variant)
        options.say(f"{variant}: {'right' if checked.wrong is None else 'wrong'}")
        if checked.wrong is not None:
            return Finding(variant, "wrong", checked.wrong, checked.measures)
        right[variant] = checked
        return Finding(variant, "ok") if after_checks is not None else second(variant)

    def second(variant: str) -> Finding:
        _run_again(right[variant], options)
        return Finding(variant, "ok")

    try:
        found = measure_each("its first run", variants, first, options.device)
        if after_checks is not None:
            after_checks()
            found += measure_each("its second run", list(right), second, options.device)
    except DeviceLost as lost:  # those that are right are not measured yet
        raise DeviceLost(str(lost), [x for x in lost.findings if x.status != "ok"]) from lost
    outcomes: dict[str, Finding | Timing] = {x.variant: x for x in found if x.status != "ok"}
    timed = {name: checked for name, checked in right.items() if name not in outcomes}
    outcomes |= _time(timed, options, most_repeats, slow_s, lead_in)
    return [_concluded(name, outcomes[name], right.get(name), options) for name in variants]


def _concluded(
    name: str, outcome: Finding | Timing, checked: CheckedVariant | None, options: Options
) -> Finding:
    """The finding of a variant, of its timing or of what became of it before."""
    if checked is None:
        assert isinstance(outcome, Finding)
        return outcome
    if isinstance(outcome, Finding):
        reason = f"not timed: {outcome.reason}"
        return Finding(name, outcome.status, reason, checked.measures)
    more, wrong = checked.afterwards()
    free(options.device)
    measures = checked.measures | asdict(outcome) | checked.conclude(outcome.ms_p50) | more
    return Finding(name, "wrong" if wrong else "ok", wrong, measures)


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
    right: Mapping[str, CheckedVariant],
    options: Options,
    most_repeats: int,
    slow_s: float,
    lead_in: int,
) -> dict[str, Timing | Finding]:
    """Timings of all variants, in turns; of those that are slow, their second run's.

    One that raises, as of memory, is timed no further: its finding says why.
    """
    slow = {x: c.took_s for x, c in right.items() if c.took_s is not None and c.took_s > slow_s}
    fast = {x: c for x, c in right.items() if x not in slow}
    raised: dict[str, Finding] = {}

    def call(name: str) -> None:
        if name in raised:
            return
        try:
            fast[name].call()
        except Exception as error:  # kernels and compilers raise types of their own
            if is_lost(error, options.device):
                raise
            raised[name] = Finding(name, *status_of(error))
            free(options.device)

    found = time_interleaved(
        {name: partial(call, name) for name in fast},
        device=options.device,
        warmup=0,  # each ran twice
        repeats={
            name: max(3, min(most_repeats, int(options.seconds / (checked.took_s or slow_s))))
            for name, checked in fast.items()
        },
        flush_l2=False,  # a model's step evicts it by itself
        lead_in=lead_in,
    )
    return found | {name: summarize([took * 1e3]) for name, took in slow.items()} | raised
