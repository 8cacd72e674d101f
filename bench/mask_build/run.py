"""What the parts of the mask-build benchmark share: findings, packed rows, the clock of builds."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

import flexvarlen as fv
from flexvarlen.bench.device_trace import device_events
from flexvarlen.bench.model.geometries import log_normal_lengths
from flexvarlen.bench.suite import DeviceLost, Finding, Options
from flexvarlen.drift.op.failures import is_lost, status_of
from flexvarlen.equivalence.variants import Unsupported
from flexvarlen.layout.boundaries import round_up_to_power_of_two
from flexvarlen.measure import summarize
from flexvarlen.rows import Status

SIGMA, SEED = 1.0, 0
TIMED_BUILDS = 200  # at most, of each builder
PROFILED_BUILDS = 20
UNTIMED_BUILDS = 5
SLOW_BUILD_S = 0.2  # slower ones are timed few times, without untimed calls before each

Result = TypeVar("Result")
Build = Callable[[], object]


class Wrong(Exception):
    """The numbers are false; the message says how. Carries what was measured."""

    def __init__(self, reason: str, measures: dict[str, Any] | None = None) -> None:
        super().__init__(reason)
        self.measures = measures or {}


class TooLarge(Exception):
    """Not tried, as it cannot fit in memory; the message says what it would take."""


class TooSlow(Exception):
    """Right, but not timed, as that would take too long; the message says how long."""


@dataclass(frozen=True)
class PackedRow:
    """One packed row of log-normal documents, on the device of the run.

    Attributes:
        cu_seqlens: int32 `[num_docs + 1]`, without the spare slots of `layout`.
    """

    tokens: int
    mean_doc: int
    lengths: list[int]
    layout: fv.PackedLayout
    cu_seqlens: Tensor

    @classmethod
    def of(cls, tokens: int, mean_doc: int, device: torch.device) -> PackedRow:
        lengths = log_normal_lengths(tokens, mean_doc, SIGMA, SEED)
        layout = fv.PackedLayout.from_lengths(lengths, device=device)
        ends = layout.cu_seqlens[: len(lengths) + 1].clone()
        return cls(tokens, mean_doc, lengths, layout, ends)

    def measures(self) -> dict[str, Any]:
        """What of the documents is worth a record."""
        return {
            "num_docs": len(self.lengths),
            "longest": max(self.lengths),
            "max_seqlen_bound": self.layout.max_seqlen_bound,
        }


class Run:
    """What was asked for, and the findings of one case so far."""

    def __init__(self, options: Options) -> None:
        self.device, self.on_gpu, self.quick = options.device, options.on_gpu, options.quick
        self.dtype = torch.bfloat16 if self.on_gpu else torch.float32
        self.build_seconds = min(options.seconds, 0.1) if self.quick else options.seconds
        self.findings: list[Finding] = []

    def row(self, tokens: int, mean_doc: int) -> PackedRow:
        return PackedRow.of(tokens, mean_doc, self.device)

    def write(
        self,
        variant: str,
        status: Status,
        reason: str | None = None,
        measures: Mapping[str, Any] | None = None,
    ) -> None:
        self.findings.append(Finding(variant, status, reason, measures or {}))

    def attempt(
        self,
        variant: str,
        work: Callable[[], Result],
        measures: Mapping[str, Any] | None = None,
    ) -> Result | None:
        """What `work` returns; None once a finding says why it gave nothing.

        Args:
            measures: what is known of the variant before.

        Raises:
            DeviceLost: it killed the device.
        """
        known = dict(measures or {})
        try:
            return work()
        except Wrong as error:
            self.write(variant, "wrong", str(error), known | error.measures)
        except TooLarge as error:
            self.write(variant, "oom", str(error), known)
        except (TooSlow, Unsupported) as error:
            self.write(variant, "unsupported", str(error), known)
        except Exception as error:  # compilers of kernels raise types of their own
            self.failed({variant: known}, error, variant)
        self.clean()
        return None

    def failed(
        self, variants: Mapping[str, Mapping[str, Any]], error: Exception, running: str
    ) -> None:
        """Findings of variants that an error stopped.

        Args:
            variants: with what is known of each.
            running: that of them which was on the device.

        Raises:
            DeviceLost: the device serves no more. Then `running` alone is marked, and the others
                have no finding: a run that goes on measures them.
        """
        status, reason = status_of(error)
        if is_lost(error, self.device):
            self.write(running, "failed", reason, {**variants[running], "fatal": True})
            message = f"{running} killed the device; run again to go on without it"
            raise DeviceLost(message, self.findings) from error
        for variant, measures in variants.items():
            self.write(variant, status, reason, measures)

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def clean(self) -> None:
        """Give memory back, where it is scarce."""
        if self.on_gpu:
            gc.collect()
            torch.cuda.empty_cache()

    # --- measures of a build ---------------------------------------------------------------------

    def seconds(self, call: Build) -> float:
        """Wall seconds of one call, to the end of its device work."""
        self.synchronize()
        begin = time.perf_counter()
        call()
        self.synchronize()
        return time.perf_counter() - begin

    def time_builds(
        self, builds: Mapping[str, Build], progress: Callable[[str], None] = lambda name: None
    ) -> dict[str, dict[str, Any]]:
        """`wall_us_*` (to the end of the device work) and `host_us_p50` (the call) of each.

        Each timed call starts on an idle device, right after `UNTIMED_BUILDS` of the same (the
        others' have driven its code out of the host's caches), in rounds of random order; the
        garbage collector is off.

        Args:
            progress: called with a name before its calls; the device is idle then.
        """

        def first_seconds(name: str) -> float:
            progress(name)
            return self.seconds(builds[name])

        wall: dict[str, list[float]] = {name: [] for name in builds}
        host: dict[str, list[float]] = {name: [] for name in builds}
        took = {name: first_seconds(name) for name in builds}
        share_s = self.build_seconds / len(builds)
        repeats = {name: _repeats(seconds, share_s) for name, seconds in took.items()}
        untimed = {name: UNTIMED_BUILDS * (took[name] < SLOW_BUILD_S) for name in builds}
        rounds, order = max(repeats.values()), random.Random(SEED)
        if self.on_gpu:
            gc.collect()
        gc.disable()
        try:
            for index in range(rounds):
                for name in order.sample(list(builds), len(builds)):
                    # Evenly spaced, as in flexvarlen.measure.time_interleaved.
                    if (index + 1) * repeats[name] // rounds == index * repeats[name] // rounds:
                        continue
                    progress(name)
                    build = builds[name]
                    for _ in range(untimed[name]):
                        build()
                    self.synchronize()
                    begin = time.perf_counter()
                    kept = build()
                    returned = time.perf_counter()
                    self.synchronize()
                    end = time.perf_counter()
                    del kept  # freed outside the measured time
                    wall[name].append((end - begin) * 1e6)
                    host[name].append((returned - begin) * 1e6)
        finally:
            gc.enable()
        return {
            name: _percentiles(wall[name], host[name]) | {"untimed_builds": untimed[name]}
            for name in builds
        }

    def gpu_work(self, build: Build) -> dict[str, Any]:
        """`gpu_us`, the sum of what ran on the device, and `kernels`, how many, a build."""
        if not self.on_gpu:
            return {"gpu_us": None, "kernels": None}
        builds = PROFILED_BUILDS if self.seconds(build) < SLOW_BUILD_S else 2

        def work() -> None:
            for _ in range(builds):
                build()

        events = device_events(work, self.device)
        if not events:  # the profiler saw nothing: that is no measurement of nothing
            return {"gpu_us": None, "kernels": None}
        total = sum(event.duration_us for event in events)
        return {"gpu_us": total / builds, "kernels": len(events) / builds}

    def peak(self, build: Build) -> dict[str, Any]:
        """`peak_mib`: how far a build raises what torch's allocator holds; None on the CPU."""
        if not self.on_gpu:
            return {"peak_mib": None}
        gc.collect()
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        kept = build()
        torch.cuda.synchronize(self.device)
        growth = torch.cuda.max_memory_allocated(self.device) - before
        del kept
        return {"peak_mib": growth / 2**20}


def _repeats(seconds: float, share_s: float) -> int:
    return max(3, min(TIMED_BUILDS, int(share_s / ((UNTIMED_BUILDS + 1) * seconds))))


def _percentiles(wall_us: list[float], host_us: list[float]) -> dict[str, Any]:
    wall, host = summarize(wall_us), summarize(host_us)  # percentiles; the unit is the samples'
    return {
        "wall_us_p20": wall.ms_p20,
        "wall_us_p50": wall.ms_p50,
        "wall_us_p80": wall.ms_p80,
        "host_us_p50": host.ms_p50,
        "repeats": wall.repeats,
    }


def bound_of(lengths: list[int], tokens: int) -> int:
    """The `max_seqlen_bound` that a user would give for documents like these."""
    return min(round_up_to_power_of_two(max(lengths)), tokens)
