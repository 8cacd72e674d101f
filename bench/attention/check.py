"""`Checker`: a variant's first call, its verdict, and what a second call takes.

What is right comes back as a `Live`, ready for the clock; what is not, as findings.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flexvarlen.bench.attention.accuracy import Oracle
from flexvarlen.bench.attention.inputs import Inputs, Prepare, Prepared
from flexvarlen.bench.attention.ways import synchronize
from flexvarlen.bench.mask_build.accuracy import NAMES, Answer
from flexvarlen.bench.suite import Finding, Options
from flexvarlen.drift.op.failures import is_lost, status_of
from flexvarlen.equivalence.variants import Unsupported
from flexvarlen.rows import Status, one_line

REFUSALS = (Unsupported, NotImplementedError, ImportError)
BACKWARDS_HELD_TOGETHER = 4  # of the same graph, where their bits matter

Measures = dict[str, Any]
Calls = dict[str, Callable[[], object]]


@dataclass
class Live:
    """A variant that was right, on its way to the clock.

    Attributes:
        prepare: prepares it again, without compilation.
        measures: by the passes that are to be timed.
        seconds: of a call, by those passes.
        held: bytes that it keeps while awake, and takes in a call at most.
        calls: by pass, while it is awake; they hold its graph.
    """

    variant: str
    prepare: Callable[[], Prepared]
    measures: dict[str, Measures] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    held: int = 0
    calls: Calls | None = None

    def wake(self) -> Calls:
        """The calls, prepared again if they were dropped."""
        if self.calls is None:
            self.calls = calls_of(self.prepare(), self.measures)
        return self.calls


def calls_of(prepared: Prepared, passes: Iterable[str]) -> Calls:
    """A call of each pass; a graph is kept for backwards."""
    calls: Calls = {}
    if "forward" in passes:
        calls["forward"] = prepared.forward
    if "backward" in passes:
        out = prepared.forward()
        calls["backward"] = lambda: prepared.backward(out)
    return calls


class Checker:
    """Checks variants on one set of inputs; arguments as in `measure_attention`.

    Raises:
        OutOfMemoryError: there is no room for the exact answers.
    """

    def __init__(
        self,
        inputs: Inputs,
        passes: tuple[str, ...],
        options: Options,
        *,
        peak: bool,
        exact: bool,
        bits: bool,
    ) -> None:
        self.inputs, self.passes, self.options = inputs, passes, options
        self.peak, self.bits = peak, bits
        self.oracle: Oracle | None = None
        if exact:
            qkv = (inputs.q, inputs.k, inputs.v)
            self.oracle = Oracle(
                qkv,
                inputs.cotangent,
                inputs.lengths,
                inputs.causal,
                "backward" if "backward" in passes else "forward",
            )

    def check(
        self, variant: str, prepare: Prepare, *, crowded: bool
    ) -> tuple[Live | None, list[Finding]]:
        """The variant as far as it is right, and findings of the passes that are not.

        Args:
            crowded: others take memory too: if a backward does not fit, that is no finding yet.

        Raises:
            What a kernel raises in its forward; in its backward where that kills the device.
        """
        before = allocated(self.options)
        begin = time.perf_counter()
        prepared, again, no_backward = self.prepared(prepare)
        out = prepared.forward()
        gradients: tuple[Tensor, ...] = ()
        if no_backward is None and "backward" in self.passes:
            gradients, no_backward = self.gradients(prepared, out, crowded)
        synchronize(self.options.device)
        common = {
            "num_docs": len(self.inputs.lengths),
            "longest": self.inputs.longest,
            **prepared.measures,
            "first_call_s": time.perf_counter() - begin,
        }
        by_pass, wrong = self.judge(variant, prepared, out, gradients, common)
        findings = {finding.pass_: finding for finding in wrong}
        if "backward" in by_pass:
            reason = self.other_bits(prepared, out, gradients, by_pass["backward"])
            if reason is not None:
                measures = by_pass.pop("backward")
                findings["backward"] = Finding(variant, "wrong", reason, measures, "backward")
        if no_backward is not None:
            finding = Finding(variant, *no_backward, pass_="backward")
            findings.setdefault("backward", finding)
        if not by_pass:
            return None, list(findings.values())
        del out, gradients
        live = Live(variant, again, by_pass, calls=calls_of(prepared, by_pass))
        self.try_out(live)
        live.held += max(0, allocated(self.options) - before)
        return live, list(findings.values())

    def prepared(
        self, prepare: Prepare
    ) -> tuple[Prepared, Callable[[], Prepared], tuple[Status, str] | None]:
        """The call, what prepares it again, and why it has no backward though that is wanted."""
        if "backward" not in self.passes:
            return prepare(self.inputs, False), lambda: prepare(self.inputs, False), None
        try:
            return prepare(self.inputs, True), lambda: prepare(self.inputs, True), None
        except REFUSALS as error:
            if "forward" not in self.passes:
                raise
            reason = why(error)
        prepared = prepare(self.inputs, False)
        return prepared, lambda: prepare(self.inputs, False), reason

    def gradients(
        self, prepared: Prepared, out: Any, crowded: bool
    ) -> tuple[tuple[Tensor, ...], tuple[Status, str] | None]:
        """Those of the leaves; or why there are none though the forward ran."""
        try:
            gradients = prepared.backward(out)
            synchronize(self.options.device)
            return gradients, None
        # Kernel packages assert, and raise types of their own.
        except Exception as error:
            no_room = crowded and isinstance(error, torch.OutOfMemoryError)
            if no_room or is_lost(error, self.options.device):
                raise
            return (), why(error)

    def judge(
        self,
        variant: str,
        prepared: Prepared,
        out: Any,
        gradients: tuple[Tensor, ...],
        common: Measures,
    ) -> tuple[dict[str, Measures], list[Finding]]:
        """Measures of the passes that are right; findings of those that are wrong."""
        ran = [pass_ for pass_ in self.passes if pass_ == "forward" or gradients]
        if self.oracle is None:
            return {pass_: dict(common) for pass_ in ran}, []
        answer = Answer(prepared.answer(out, gradients))
        errors, reason = self.oracle.judge(answer)
        by_pass = {pass_: common | of_pass(pass_, errors) for pass_ in ran}
        if reason is None:
            return by_pass, []
        passes: Sequence[str] = self.passes
        if gradients and self.oracle.judge(Answer(answer.tensors[:1]))[1] is None:
            passes = ("backward",) if "backward" in self.passes else ()
        return by_pass, [
            Finding(variant, "wrong", reason, by_pass.pop(pass_, common), pass_) for pass_ in passes
        ]

    def other_bits(
        self, prepared: Prepared, out: Any, gradients: tuple[Tensor, ...], measures: Measures
    ) -> str | None:
        """Measure whether further backwards give the same bits; a sentence if they had to."""
        if not (self.bits or prepared.deterministic):
            return None
        equal = all(
            torch.equal(x, y)
            for _ in range(BACKWARDS_HELD_TOGETHER - 1)
            for x, y in zip(gradients, prepared.backward(out), strict=True)
        )
        measures["bits_equal"] = equal
        if equal or not prepared.deterministic:
            return None
        return f"{BACKWARDS_HELD_TOGETHER} deterministic backwards did not all give the same bits"

    def try_out(self, live: Live) -> None:
        """Wall seconds of a second call of each pass, to the end of its work; its memory."""
        device, on_gpu = self.options.device, self.options.on_gpu
        for pass_, call in live.wake().items():
            synchronize(device)
            before = allocated(self.options)
            if on_gpu:
                torch.cuda.reset_peak_memory_stats(device)
            begin = time.perf_counter()
            call()
            synchronize(device)
            live.seconds[pass_] = time.perf_counter() - begin
            grown = torch.cuda.max_memory_allocated(device) - before if on_gpu else 0
            live.held = max(live.held, grown)
            if self.peak:
                live.measures[pass_]["peak_mib"] = grown / 2**20 if on_gpu else None


def allocated(options: Options) -> int:
    """Bytes that torch's allocator gave out on the device; 0 on the CPU."""
    return torch.cuda.memory_allocated(options.device) if options.on_gpu else 0


def why(error: Exception) -> tuple[Status, str]:
    """Status and reason of what a kernel, or what prepares it, raised."""
    if isinstance(error, Unsupported):
        return "unsupported", str(error)
    if "can't allocate memory" in str(error):  # what the CPU's allocator says, a RuntimeError
        return "oom", one_line(error)
    return status_of(error)


def of_pass(pass_: str, measures: Measures) -> Measures:
    """The measures without the errors of what the other pass gives.

    >>> of_pass("forward", {"error_out": 1.0, "error_dq": 2.0})
    {'error_out': 1.0}
    """
    others = NAMES[1:] if pass_ == "forward" else NAMES[:1]
    ends = tuple(f"_{name}" for name in others)
    return {name: value for name, value in measures.items() if not name.endswith(ends)}
