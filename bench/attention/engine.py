"""`measure_attention`: variants of one attention checked, then timed against one another.

For every suite that compares attention on tensors. Each variant is prepared and called for the
first time (`first_call_s`: compilation), then held against fp64 on sampled documents and against
the others on the whole row. What is right is timed, forward and backward apart, interleaved; what
is wrong, refused, failing or too large is a finding that says so.

Variants are prepared one after another and timed together. Those that are too large for that are
put to sleep (all that they hold is dropped) and timed alone, which their rows say.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch._dynamo.config
import torch._functorch.config

import flexvarlen as fv
from flexvarlen.bench.attention.check import Checker, Live, why
from flexvarlen.bench.attention.clock import MAX_REPEATS, host_bound, time_calls
from flexvarlen.bench.attention.raw_kernels import (
    Inputs,
    Prepare,
    Prepared,
    Unsupported,
    forget_compiled,
)
from flexvarlen.bench.attention.ways import RAW_PREFIX, ours, raw, synchronize, ways_of
from flexvarlen.bench.suite import DeviceLost, Finding, Options
from flexvarlen.drift.op.failures import is_lost
from flexvarlen.mask.document_mask import DocumentMask
from flexvarlen.rows import Status, one_line

__all__ = [
    "PASSES",
    "RAW_PREFIX",
    "Inputs",
    "Prepare",
    "Prepared",
    "Unsupported",
    "findings_of_all",
    "measure_attention",
    "ours",
    "raw",
    "ways_of",
]

PASSES = ("forward", "backward")


def measure_attention(
    inputs: Inputs,
    ways: Mapping[str, Prepare],
    options: Options,
    *,
    passes: Sequence[str] = PASSES,
    peak: bool = False,
    exact: bool = True,
    bits: bool = False,
    repeats: int = MAX_REPEATS,
) -> list[Finding]:
    """Check, then time, each variant's forward and backward on the same tensors.

    What was compiled before is forgotten: else the kernel that is timed would depend on the cases
    before (Dynamo makes the first shape static, those after it dynamic).

    Args:
        inputs: q `[T, H, D]`, k and v `[T, Hkv, D]`, cotangent, documents; on `options.device`.
        ways: variant -> what prepares its call; of the inputs, and whether a backward follows.
        passes: which to time; without "backward", nothing requires gradients.
        peak: measure `peak_mib` too: how far torch's allocator grows in one call of the pass (what
            the forward keeps for the backward counts as the forward's); None on the CPU.
        exact: hold the answers against fp64 and against one another; else nothing is checked.
        bits: measure `bits_equal` too: whether backwards of one graph give the same bits. Of a
            `Prepared.deterministic` it is measured in any case, and decides whether it is wrong.
        repeats: timed calls of each, at most, as far as time allows (`time_calls`).

    Returns:
        A finding a variant and pass, in the order of `ways`. Names in `measures` of what was timed:
        as `time_calls` has them; `tflops` of unmasked work, from `device_ms_p50`, unless that is
        `host_bound`; `error_*`, `peer_error_*`, `difference_*`, `first_call_s`, `num_docs`,
        `longest`; `timed_alone` (True) of what did not fit beside the others; and what a
        `Prepared` says of itself.

    Raises:
        DeviceLost: an error killed the device; with the findings so far.
    """
    forget_compiled()
    # Dynamo's limits go by code object; a backward that is timed again and again keeps its buffers.
    limits = {"recompile_limit": 256, "accumulated_recompile_limit": 4096}
    keep = torch._functorch.config.patch(donated_buffer=False)
    with torch._dynamo.config.patch(limits), keep:
        try:
            checker = Checker(inputs, tuple(passes), options, peak=peak, exact=exact, bits=bits)
        # Torch's own attention, of all documents: cuDNN and compilers raise what they like.
        except Exception as error:
            status, reason = why(error)
            said = "there is no room for the" if status == "oom" else "there are no"
            found = findings_of_all(ways, passes, status, f"{said} exact answers: {reason}")
            if is_lost(error, options.device):
                message = f"the exact answers killed the device: {reason}"
                raise DeviceLost(message, found) from error
            return found
        return _Measured(checker, repeats).run(ways)


def findings_of_all(
    variants: Iterable[str], passes: Sequence[str], status: Status, reason: str
) -> list[Finding]:
    """The same of every variant and pass: inputs that do not fit in memory, say."""
    return [
        Finding(variant, status, reason, pass_=pass_) for variant in variants for pass_ in passes
    ]


class _Measured:
    """One set of inputs: variants alive, and what became of the others."""

    def __init__(self, checker: Checker, repeats: int = MAX_REPEATS) -> None:
        self.checker, self.repeats = checker, repeats
        self.options, self.passes = checker.options, checker.passes
        self.lives: list[Live] = []
        self.found: dict[tuple[str, str], Finding] = {}

    def run(self, ways: Mapping[str, Prepare]) -> list[Finding]:
        # "auto" last: the kernels that it times are compiled by then.
        for variant in sorted(ways, key=lambda name: name == "auto"):
            self.attempt(variant, ways[variant])
        self.checker.oracle = None  # it holds a whole answer
        self.time_all()
        return [self.found[variant, pass_] for variant in ways for pass_ in self.passes]

    def give_up(
        self, variant: str, status: Status, reason: str, measures: Mapping[str, Any] | None = None
    ) -> None:
        """The finding of every pass that has none yet."""
        for pass_ in self.passes:
            finding = Finding(variant, status, reason, measures or {}, pass_)
            self.found.setdefault((variant, pass_), finding)

    # --- one variant -----------------------------------------------------------------------------

    def attempt(self, variant: str, prepare: Prepare) -> None:
        """Prepare and check; once more with all others asleep if it does not fit beside them."""
        crowded = any(live.calls is not None for live in self.lives)
        failure = self.failure_of(variant, prepare, crowded)
        if failure is not None and failure[0] == "oom" and crowded:
            self.put_to_sleep(self.lives)
            failure = self.failure_of(variant, prepare, crowded=False)
        if failure is not None:
            self.give_up(variant, *failure)
            if failure[0] != "unsupported":
                self.put_to_sleep(())

    def failure_of(
        self, variant: str, prepare: Prepare, crowded: bool
    ) -> tuple[Status, str] | None:
        """Check it; why it does not go on, or None if it does or its findings say why."""
        try:
            live, findings = self.checker.check(variant, prepare, crowded=crowded)
        # Kernel packages assert, and raise types of their own.
        except Exception as error:
            self.stop_if_lost(error, variant, f"{variant} killed the device")
            return why(error)
        self.found |= {(variant, finding.pass_): finding for finding in findings}
        if live is not None:
            self.lives.append(live)
        return None

    def stop_if_lost(self, error: Exception, culprit: str, what: str) -> None:
        """Raise `DeviceLost`, if that is what the error means, with the culprit marked.

        Those that were not timed yet have no finding: a run that goes on measures them.
        """
        if not is_lost(error, self.options.device):
            return
        reason = f"{what}: {one_line(error)}"
        self.give_up(culprit, "failed", reason, {"fatal": True})
        raise DeviceLost(f"{reason}; run again to go on", list(self.found.values())) from error

    def put_to_sleep(self, lives: Iterable[Live]) -> None:
        """Drop all that these hold, and what else is free."""
        for live in lives:
            live.calls = None
        gc.collect()
        if self.options.on_gpu:
            torch.cuda.empty_cache()

    # --- timing ----------------------------------------------------------------------------------

    def time_all(self) -> None:
        """Together; if that does not fit, without the largest, and so on; each is timed once."""
        waiting = [list(self.lives)] if self.lives else []
        while waiting:
            group = waiting.pop(0)
            failure = self.time(group)
            self.put_to_sleep(group)
            if failure is None:
                continue
            if len(group) == 1:
                self.give_up(group[0].variant, *failure)
            elif failure[0] == "oom":
                largest = max(group, key=lambda live: live.held)
                waiting += [[live for live in group if live is not largest], [largest]]
            else:  # which of them it was is not known
                waiting += [[live] for live in group]

    def time(self, group: Sequence[Live]) -> tuple[Status, str] | None:
        """Time a group interleaved and note its findings; or why that cannot be."""
        running = [group[0].variant]  # the last is on the device, and no other
        try:
            calls, seconds, owner = {}, {}, {}
            for live in group:
                running.append(live.variant)
                for pass_, call in live.wake().items():
                    name = f"{live.variant} {pass_}"
                    calls[name], seconds[name] = call, live.seconds[pass_]
                    owner[name] = live.variant
                synchronize(self.options.device)

            def progress(name: str) -> None:
                running.append(owner[name])

            timings = time_calls(calls, seconds, self.options, most=self.repeats, progress=progress)
        except Exception as error:  # as in `failure_of`
            what = f"timing killed the device in a call of {running[-1]}"
            self.stop_if_lost(error, running[-1], what)
            return why(error)
        alone = {"timed_alone": True} if len(group) == 1 < len(self.lives) else {}
        work = self.work()
        for live in group:
            for pass_, measures in live.measures.items():
                timed = timings[f"{live.variant} {pass_}"]
                if not host_bound(timed):
                    timed["tflops"] = work[pass_] / (timed["device_ms_p50"] * 1e9)
                finding = Finding(live.variant, "ok", None, measures | timed | alone, pass_)
                self.found[live.variant, pass_] = finding
        return None

    def work(self) -> dict[str, float]:
        """FLOPs of unmasked work, by pass."""
        inputs = self.checker.inputs
        layout = fv.PackedLayout.from_lengths(inputs.lengths, device=inputs.q.device)
        mask = DocumentMask.of(layout, causal=inputs.causal)
        _, heads, head_dim = inputs.q.shape
        return {
            pass_: mask.flops(head_dim, heads, backward=pass_ == "backward")
            for pass_ in self.passes
        }
