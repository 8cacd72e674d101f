"""The suite "clock-check": the clock of all suites beside an independent trace of the same calls.

    flexvarlen bench clock-check --out bench/results/clock-check-h200.jsonl

Six cases of attention by raw kernels, one of them in a call a document. The clock is
`flexvarlen.measure.time_host_and_device`: CUDA events around a call, behind work that keeps the
device busy. The trace is torch.profiler's (CUPTI's records of each kernel): the sum of the
durations of a call's kernels, and their span, from the first's start to the last's end. Both in
turns, round by round, on the same busy device; they agree
if the medians of clock and span are within 5%: gaps between kernels are a call's time too, the sum
is told beside. Clocks are compared here, not kernels: answers are checked elsewhere.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch._functorch.config

from flexvarlen.bench.attention.kernels_cells import document_lengths
from flexvarlen.bench.attention.raw_kernels import RAW, Inputs, serial
from flexvarlen.bench.clock_check_tables import WITHIN, clock_section
from flexvarlen.bench.device_trace import DeviceEvent, device_events
from flexvarlen.bench.suite import Case, DeviceLost, Finding, Options, Suite
from flexvarlen.drift.op.failures import is_lost, status_of
from flexvarlen.equivalence.variants import Unsupported
from flexvarlen.measure import summarize, time_host_and_device
from flexvarlen.rows import Row, one_line

ROUNDS, CALLS = 5, 10  # rounds; calls of a round by each clock
PREFIX = "raw:"  # of variants, as in the other suites
VARIANTS = ("varlen", "fa2", "fa3", "fa4", "flex", "flex_fa4", "nested")


class Unreadable(Exception):
    """A trace that cannot be told apart by calls; the message says why."""


@dataclass(frozen=True)
class ClockCase:
    """One pass of attention over one packed row; `serial`: in a call a document."""

    title: str
    lengths: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    causal: bool
    backward: bool = False
    head_dim: int = 128
    serial: bool = False

    @property
    def name(self) -> str:
        return self.title

    def data(self) -> dict[str, Any]:
        shape = {name: value for name, value in asdict(self).items() if name != "lengths"}
        return shape | {"tokens": sum(self.lengths), "num_docs": len(self.lengths)}


def _cell(tokens: int, **more: Any) -> ClockCase:
    pass_ = "backward" if more else "forward"
    lengths = document_lengths(tokens, "log-normal", 2048, 6)  # as in the suite kernels
    return ClockCase(f"t{tokens}-causal-{pass_}", lengths, 32, 8, True, **more)


def clock_cases() -> tuple[ClockCase, ...]:
    """Three of the suite varlen-study, three of kernels."""
    return (
        ClockCase("4160", (4160,), 24, 24, False),
        ClockCase("4160x8", (4160,) * 8, 24, 24, False),
        ClockCase("4160x8-serial", (4160,) * 8, 24, 24, False, serial=True),
        _cell(8192),
        _cell(32_768),
        _cell(32_768, backward=True),
    )


def why_not(options: Options) -> str | None:
    """Why there is no second clock here, or None."""
    if options.on_gpu:
        return None
    return "a CPU has no device clock beside the wall's; the trace is of work on CUDA"


class ClockCheck(Suite):
    """Is the clock right? Rows hold both times; "wrong" where they disagree."""

    name: ClassVar[str] = "clock-check"

    def cases(self, options: Options) -> Sequence[Case]:
        return clock_cases()

    def variants(self, case: Case, options: Options) -> Sequence[str]:
        return [PREFIX + name for name in VARIANTS]

    def measure(self, case: Case, variants: Sequence[str], options: Options) -> Sequence[Finding]:
        assert isinstance(case, ClockCase)
        pass_ = "backward" if case.backward else "forward"
        refusal = why_not(options)
        if refusal is not None:
            return [Finding(name, "unsupported", refusal, {}, pass_) for name in variants]
        dtype = torch.bfloat16 if options.on_gpu else torch.float32
        heads = (case.num_heads, case.num_kv_heads)
        try:
            inputs = Inputs.random(
                case.lengths, heads, case.head_dim, dtype, options.device, case.causal
            )
        except torch.OutOfMemoryError as error:
            return [Finding(name, "oom", one_line(error), {}, pass_) for name in variants]
        check = _Check(inputs, case, options.device)
        # A backward that is timed again and again keeps its buffers.
        with torch._functorch.config.patch(donated_buffer=False):
            return check.findings(variants)

    def section(self, rows: Sequence[Row]) -> str:
        return clock_section(rows)


class _Check:
    """One case's variants by both clocks."""

    def __init__(self, inputs: Inputs, case: ClockCase, device: torch.device) -> None:
        self.inputs, self.device = inputs, device
        self.backward, self.serial = case.backward, case.serial
        self.pass_ = "backward" if case.backward else "forward"
        self.found: list[Finding] = []

    def findings(self, variants: Sequence[str]) -> list[Finding]:
        calls: dict[str, Callable[[], object]] = {}
        for name in variants:
            call = self.attempt(name, partial(self.prepared, name))
            if call is not None:
                calls[name] = call
        if not calls:
            return self.found
        try:
            writes = self.writes()
        except Exception as error:  # the profiler's, which no variant is to blame for
            status, reason = status_of(error)
            for name in calls:
                self.say(name, status, f"an empty call cannot be traced: {reason}")
            if is_lost(error, self.device):
                raise DeviceLost("the profiler lost the device; run again", self.found) from error
            return self.found
        measures = {name: _Times() for name in calls}
        order = random.Random(0)
        for _ in range(ROUNDS):
            for name in order.sample(list(calls), len(calls)):
                if not measures[name].failed:
                    work = partial(self.round, calls[name], writes, measures[name])
                    measures[name].failed = self.attempt(name, work) is None
        for name, times in measures.items():
            if not times.failed:
                self.found.append(times.finding(name, self.pass_))
        return self.found

    def writes(self) -> int:
        """How many writes stand before a call: of an empty one the trace holds nothing else."""
        self.trace(lambda: None, 1)  # the first of a process sets the profiler up
        found, rest = divmod(len(self.trace(lambda: None, CALLS)), CALLS)
        return 0 if rest else found

    def prepared(self, name: str) -> Callable[[], object]:
        """The call of a variant, which has run once."""
        kernel = name.removeprefix(PREFIX)
        if kernel not in RAW:
            raise Unsupported(f"no raw kernel is known for {kernel}; there are {', '.join(RAW)}")
        prepare = serial(RAW[kernel]) if self.serial else RAW[kernel]
        ready = prepare(self.inputs, self.backward)
        out = ready.forward()
        return partial(ready.backward, out) if self.backward else ready.forward

    def round(self, call: Callable[[], object], writes: int, times: _Times) -> bool:
        """Some calls by each clock."""
        timed = time_host_and_device({"": call}, device=self.device, warmup=1, repeats=CALLS)
        times.device_ms.append(timed[""].device.ms_p50)
        traced = calls_of(self.trace(call, CALLS), CALLS, writes)
        times.trace_ms.append(
            summarize([sum(e.duration_us for e in x) / 1e3 for x in traced]).ms_p50
        )
        spans = [(max(e.end_us for e in x) - x[0].start_us) / 1e3 for x in traced]
        times.span_ms.append(summarize(spans).ms_p50)
        times.kernels = len(traced[0])
        return True

    def trace(self, call: Callable[[], object], repeats: int) -> list[DeviceEvent]:
        """The events of the clock's own calls: the writes that keep it busy, then the call's."""
        clock = partial(
            time_host_and_device, {"": call}, device=self.device, warmup=0, repeats=repeats
        )
        return device_events(clock, self.device)

    def attempt(self, name: str, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except Unsupported as error:
            self.say(name, "unsupported", str(error))
        except Unreadable as error:
            self.say(name, "failed", str(error))
        except Exception as error:  # compilers of kernels raise types of their own
            lost = is_lost(error, self.device)
            status, reason = status_of(error)
            self.say(name, "failed" if lost else status, reason, {"fatal": True} if lost else {})
            if lost:
                raise DeviceLost(f"{name} killed the device; run again", self.found) from error
        return None

    def say(self, name: str, status: Any, reason: str, measures: Mapping[str, Any] = {}) -> None:
        self.found.append(Finding(name, status, reason, measures, self.pass_))


class _Times:
    """Medians of each round, in milliseconds."""

    def __init__(self) -> None:
        self.device_ms: list[float] = []
        self.trace_ms: list[float] = []
        self.span_ms: list[float] = []
        self.kernels = 0
        self.failed = False

    def finding(self, name: str, pass_: str) -> Finding:
        measures: dict[str, Any] = {"kernels": self.kernels, "calls": ROUNDS * CALLS}
        for clock in ("device_ms", "trace_ms", "span_ms"):
            timing = summarize(getattr(self, clock))
            for percent in ("p20", "p50", "p80"):
                measures[f"{clock}_{percent}"] = getattr(timing, f"ms_{percent}")
        clock_ms, span_ms = measures["device_ms_p50"], measures["span_ms_p50"]
        measures["ratio"] = ratio = clock_ms / span_ms
        measures["ratio_of_sum"] = clock_ms / measures["trace_ms_p50"]
        if abs(ratio - 1) <= WITHIN:
            return Finding(name, "ok", None, measures, pass_)
        reason = (
            f"the clock says {clock_ms:.4g} ms, the trace {span_ms:.4g} ms, more than "
            f"{WITHIN:.0%} apart"
        )
        return Finding(name, "wrong", reason, measures, pass_)


def calls_of(events: Sequence[DeviceEvent], calls: int, writes: int) -> list[Sequence[DeviceEvent]]:
    """The events of each call, without the writes that stand before each.

    Raises:
        Unreadable: the trace is empty, or calls differ in what they ran.
    """
    if not events or not writes:
        raise Unreadable("the profiler did not see the work on the device, or not all of it")
    each, rest = divmod(len(events), calls)
    if rest or each <= writes:
        raise Unreadable(
            f"the trace holds {len(events)} events of {calls} calls, each behind {writes} writes: "
            "no whole number a call"
        )
    found = [events[i * each + writes : (i + 1) * each] for i in range(calls)]
    names = [event.name for event in found[0]]
    if any([event.name for event in one] != names for one in found):
        raise Unreadable("the calls of a trace ran different kernels")
    return found


SUITE = ClockCheck()
