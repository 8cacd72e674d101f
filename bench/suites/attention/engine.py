"""`measure_attention`: check each variant of one attention, then time those that are right.

A variant is prepared and called once (compilation), and its output and gradients are held to the
acceptance rule: on sampled documents against fp64, on the whole row against a plain computation in
the same dtype. What is right is timed, forward and backward apart, all variants in turns.
"""

from __future__ import annotations

import gc
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
import torch._dynamo.config
import torch._functorch.config

from flexvarlen.bench.suites.attention.inputs import (
    AttentionCase,
    Expected,
    Inputs,
    Prepare,
    Prepared,
)
from flexvarlen.bench.suites.attention.packed import forget_compiled
from flexvarlen.mask.document_mask import DocumentMask
from flexvarlen.measure.timing import BUSY_MS, synchronize, time_host_and_device, wall_seconds
from flexvarlen.reference.attention import Results
from flexvarlen.report.records import Status, one_line
from flexvarlen.runner.failures import Unsupported, is_lost, status_of
from flexvarlen.runner.suite import DeviceLost, Finding, Findings, Options, Suite, choose
from flexvarlen.verify.experiment.measure import LIMITS

PASSES = ("forward", "backward")
MOST_REPEATS, FEWEST_REPEATS = 30, 5
REFUSALS = (Unsupported, NotImplementedError, ImportError)
A = TypeVar("A", bound=AttentionCase)


def measure_attention(
    inputs: Inputs,
    calls: Mapping[str, Prepare],
    options: Options,
    *,
    repeats: int = MOST_REPEATS,
) -> list[Finding]:
    """Check, then time, each variant's forward and backward on the same tensors.

    Args:
        calls: what prepares each variant.
        repeats: timed calls of each, at most.

    Returns:
        A finding for each variant and pass. Measures of what was timed: `device_ms_p20`, `_p50`,
        `_p80`, `host_ms_…`, `host_bound` (the device waited for the host, so its time is none of
        kernels), `tflops` of unmasked work, `error_*` and `baseline_error_*`, `first_call_s`,
        `num_docs`, `longest`, and what a `Prepared` adds.

    Raises:
        DeviceLost: an error left the device unusable; with the findings so far.
    """
    forget_compiled()
    keep_buffers = torch._functorch.config.patch(donated_buffer=False)  # for repeated backwards
    with torch._dynamo.config.patch(LIMITS), keep_buffers:
        try:
            expected = Expected(inputs)
        except torch.OutOfMemoryError as error:
            return findings_of_all(calls, "oom", f"no room for the reference: {one_line(error)}")
        run = _CaseMeasurement(inputs, expected, options, repeats)
        # "auto" last: the kernels that it times are compiled by then.
        for variant in sorted(calls, key=lambda name: name == "auto"):
            run.check(variant, calls[variant])
        del expected, run.expected
        run.time()
        return [run.found[variant, pass_] for variant in calls for pass_ in PASSES]


class AttentionSuite(Suite[A]):
    """A suite of one attention, on cases that make its tensors."""

    repeats: ClassVar[int] = MOST_REPEATS

    @abstractmethod
    def calls(self, case: A) -> Mapping[str, Prepare]:
        """What prepares each variant that there is."""

    def measure(self, case: A, variants: Sequence[str], options: Options) -> Findings:
        calls = choose(variants, self.calls(case))
        try:
            inputs = case.inputs(options.device)
        except torch.OutOfMemoryError as error:
            return findings_of_all(variants, "oom", one_line(error))
        return measure_attention(inputs, calls, options, repeats=self.repeats)


def findings_of_all(variants: Iterable[str], status: Status, reason: str) -> list[Finding]:
    return [Finding(x, status, reason, pass_=pass_) for x in variants for pass_ in PASSES]


@dataclass
class _Checked:
    """A variant that is right; `seconds` of a call of each pass decide how often it is timed."""

    variant: str
    prepare: Callable[[], Prepared]
    measures: dict[str, dict[str, Any]]
    seconds: dict[str, float] = field(default_factory=dict)
    prepared: Prepared | None = None
    out: Any = None

    def call(self, pass_: str) -> Callable[[], object]:
        """The call of a pass; what it needs is made again if it was dropped."""
        if self.prepared is None:
            self.prepared = self.prepare()
        if pass_ == "forward":
            return self.prepared.forward
        if self.out is None:
            self.out = self.prepared.forward()
        return partial(self.prepared.backward, self.out)


class _CaseMeasurement:
    """Measures the variants of one case: those that are right, and the findings."""

    def __init__(self, inputs: Inputs, expected: Expected, options: Options, repeats: int) -> None:
        self.inputs, self.expected, self.options = inputs, expected, options
        self.repeats = repeats
        self.checked: list[_Checked] = []
        self.found: dict[tuple[str, str], Finding] = {}

    def record_failure(
        self,
        variant: str,
        status: Status,
        reason: str | None,
        measures: Mapping[str, Any] | None = None,
        passes: Iterable[str] = PASSES,
    ) -> None:
        """A finding for each of these passes that has none."""
        for pass_ in passes:
            finding = Finding(variant, status, reason, measures or {}, pass_)
            self.found.setdefault((variant, pass_), finding)

    def check(self, variant: str, prepare: Prepare) -> None:
        """Check it; if it does not fit in memory, with the others dropped, then its forward."""
        for attempt, needs_grad in enumerate((True, True, False)):
            try:
                with self.stops_if_lost([variant]):
                    self._check(variant, prepare, needs_grad)
                return
            except torch.OutOfMemoryError as error:
                self.release()
                if attempt > 0:
                    failed = ["backward"] if needs_grad else PASSES
                    self.record_failure(variant, "oom", one_line(error), passes=failed)
            except DeviceLost:
                raise
            except Exception as error:  # kernel packages assert and raise types of their own
                self.record_failure(variant, *status_of(error))
                return

    def _check(self, variant: str, prepare: Prepare, needs_grad: bool) -> None:
        begin = _now(self.options)
        try:
            prepared = prepare(self.inputs, needs_grad)
        except REFUSALS as error:  # of the backward, perhaps
            if not needs_grad:
                raise
            prepared = prepare(self.inputs, False)
            needs_grad = False
            self.record_failure(variant, *status_of(error), passes=["backward"])
        out = prepared.forward()
        gradients = prepared.backward(out) if needs_grad else ()
        first_call_s = _now(self.options) - begin
        results = prepared.results(out, gradients)
        errors = self.expected.errors(results)
        layout = self.inputs.layout()
        common = {
            "num_docs": layout.num_docs,
            "longest": layout.max_seqlen,
            "first_call_s": first_call_s,
            **prepared.measures,
        }
        reason = self.expected.why_wrong(results)
        right = [pass_ for pass_ in PASSES if pass_ == "forward" or needs_grad]
        if reason is not None:
            alone = Results(results.out)
            right = ["forward"] if needs_grad and self.expected.why_wrong(alone) is None else []
            wrong = [pass_ for pass_ in PASSES if pass_ not in right]
            self.record_failure(variant, "wrong", reason, common | errors, wrong)
        measures = {pass_: common | _of_pass(pass_, errors) for pass_ in right}
        del out, gradients, results
        if right:
            one = _Checked(variant, lambda: prepare(self.inputs, needs_grad), measures)
            device = self.options.device
            one.seconds = {x: wall_seconds(one.call(x), device) for x in measures}
            self.checked.append(one)

    def time(self) -> None:
        """Time the passes of all variants in turns; one that raises is timed no further."""
        passes = {f"{x.variant} {pass_}": (x, pass_) for x in self.checked for pass_ in x.measures}
        running: list[str] = []

        def call(one: _Checked, pass_: str) -> None:
            if (one.variant, pass_) in self.found:
                return
            try:
                one.call(pass_)()
            except Exception as error:  # kernel packages assert and raise types of their own
                if is_lost(error, self.options.device):
                    raise
                self.record_failure(one.variant, *status_of(error), passes=[pass_])

        calls = {name: partial(call, *each) for name, each in passes.items()}
        seconds = {name: x.seconds[pass_] for name, (x, pass_) in passes.items()}
        with self.stops_if_lost(running):
            times = _timed(
                calls,
                seconds,
                self.options,
                self.repeats,
                lambda name: running.append(passes[name][0].variant),
            )
        for name, (x, pass_) in passes.items():
            if (x.variant, pass_) in self.found:
                continue
            measures = x.measures[pass_] | times[name]
            if not measures.get("host_bound"):
                measures["tflops"] = self.flops(pass_) / (measures["device_ms_p50"] * 1e9)
            self.found[x.variant, pass_] = Finding(x.variant, "ok", None, measures, pass_)

    def flops(self, pass_: str) -> float:
        """Floating-point operations of unmasked work."""
        mask = DocumentMask.of(self.inputs.layout(), causal=self.inputs.causal)
        _, heads, head_dim = self.inputs.q.shape
        return mask.flops(head_dim, heads, backward=pass_ == "backward")

    def release(self) -> None:
        """Drop what the checked variants hold."""
        for one in self.checked:
            one.prepared = one.out = None
        gc.collect()
        if self.options.on_gpu:
            torch.cuda.empty_cache()

    @contextmanager
    def stops_if_lost(self, running: Sequence[str]) -> Iterator[None]:
        """Raise `DeviceLost` for an error of the last variant that leaves the device unusable."""
        try:
            yield
            synchronize(self.options.device)
        except Exception as error:
            if not is_lost(error, self.options.device):
                raise
            reason = f"{running[-1]} lost the device: {one_line(error)}"
            self.record_failure(running[-1], "failed", reason, {"fatal": True})
            raise DeviceLost(
                f"{reason}; run again to continue", list(self.found.values())
            ) from error


def _now(options: Options) -> float:
    """Seconds, when the device has done all its work."""
    synchronize(options.device)
    return time.perf_counter()


def _of_pass(pass_: str, errors: Mapping[str, float]) -> dict[str, float]:
    """The errors of what a pass returns."""
    return {
        name: value
        for name, value in errors.items()
        if name.endswith("_out") == (pass_ == "forward")
    }


def _timed(
    calls: Mapping[str, Callable[[], object]],
    seconds: Mapping[str, float],
    options: Options,
    repeats: int,
    progress: Callable[[str], None],
) -> dict[str, dict[str, Any]]:
    """Device and host milliseconds of each call, in turns, for about `options.seconds` in all."""
    share = options.seconds * max(1.0, repeats / MOST_REPEATS) / max(1, len(calls))
    busy_s = BUSY_MS / 1e3 if options.on_gpu else 0.0
    wanted = {
        name: max(FEWEST_REPEATS, min(repeats, int(share / (2 * seconds[name] + busy_s + 1e-6))))
        for name in calls
    }
    gc.collect()
    gc.disable()
    try:
        timings = time_host_and_device(
            calls,
            device=options.device,
            warmup=1,
            repeats=wanted,
            lead_in=int(options.on_gpu),  # the variant before drove this one's code from caches
            progress=progress,
        )
    finally:
        gc.enable()
    found = {}
    for name, both in timings.items():
        device, host = asdict(both.device), asdict(both.host)
        found[name] = {f"device_{key}": value for key, value in device.items()}
        if options.on_gpu:
            found[name] |= {f"host_{key}": value for key, value in host.items()}
            if both.host.ms_p50 >= BUSY_MS:
                found[name]["host_bound"] = True
    return found
