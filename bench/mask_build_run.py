"""What the parts of the mask-build benchmark share: the run, its rows, packed rows, its clock."""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

import flexvarlen as fv
from flexvarlen.bench.bench_run import BenchRun
from flexvarlen.bench.cases import log_normal_lengths
from flexvarlen.bench.variants import Unsupported
from flexvarlen.boundaries import round_up_to_power_of_two
from flexvarlen.mask import DEFAULT_BLOCK_SIZE
from flexvarlen.measure import summarize
from flexvarlen.rows import Status, one_line

SUITE = "mask-build"
SIGMA, SEED = 1.0, 0
PROFILED_BUILDS = 20
UNTIMED_BUILDS = 5
SLOW_BUILD_S = 0.2  # slower ones are timed few times, without untimed calls before each

# What kernels, compilers and transformers raise; anything else is a mistake of this script.
ERRORS = (RuntimeError, ValueError, TypeError, AttributeError, AssertionError)

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
    """Not tried, as it would take too long; the message says how long."""


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

    def case(self, part: str, **what: Any) -> dict[str, Any]:
        """The case of a row of the benchmark."""
        shape = {"tokens": self.tokens, "mean_doc": self.mean_doc, "sigma": SIGMA, "seed": SEED}
        return {"part": part, **what, **shape, "block_size": DEFAULT_BLOCK_SIZE}

    def measures(self) -> dict[str, Any]:
        """What of the documents is worth a record."""
        return {
            "num_docs": len(self.lengths),
            "longest": max(self.lengths),
            "max_seqlen_bound": self.layout.max_seqlen_bound,
        }


class Run(BenchRun):
    """The shared state of one run: device, environment, clock, file."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(SUITE, args)
        self.on_gpu = self.device.type == "cuda"
        self.dtype = torch.bfloat16 if self.on_gpu else torch.float32

    def row(self, tokens: int, mean_doc: int) -> PackedRow:
        return PackedRow.of(tokens, mean_doc, self.device)

    def write(
        self,
        case: dict[str, Any],
        status: Status,
        reason: str | None,
        measures: dict[str, Any] | None = None,
    ) -> None:
        same = ("sigma", "seed", "block_size")  # in every row
        named = ", ".join(f"{value}" for key, value in case.items() if key not in same)
        self.say(f"{named}: {status}{'' if reason is None else ', ' + reason}")
        self.append(case, status, reason, measures or {})

    def attempt(
        self, case: dict[str, Any], work: Callable[[], Result], *, begun: bool = False
    ) -> Result | None:
        """What `work` returns; None once a row says why it gave nothing.

        `begun` says that some of the case is measured already: then it is never too late.
        """
        if not begun and self.seconds_since_begin() > self.args.start_until:
            self.write(case, "skipped", f"not begun within {self.args.start_until:g} s of the run")
            return None
        try:
            return work()
        except Wrong as error:
            self.write(case, "wrong", str(error), error.measures)
        except TooLarge as error:
            self.write(case, "oom", str(error))
        except TooSlow as error:
            self.write(case, "skipped", str(error))
        except Unsupported as error:
            self.write(case, "unsupported", str(error))
        except (NotImplementedError, ImportError) as error:
            self.write(case, "unsupported", one_line(error))
        except torch.OutOfMemoryError as error:
            self.write(case, "oom", one_line(error))
        except ERRORS as error:
            self.write(case, "failed", one_line(error))
        self.clean()
        return None

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def clean(self) -> None:
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()

    # --- measures of a build ---------------------------------------------------------------------

    def seconds(self, call: Build) -> float:
        """Wall seconds of one call, to the end of its device work."""
        self.synchronize()
        begin = time.perf_counter()
        call()
        self.synchronize()
        return time.perf_counter() - begin

    def time_builds(self, builds: Mapping[str, Build]) -> dict[str, dict[str, Any]]:
        """`wall_us_*` (to the end of the device work) and `host_us_p50` (the call) of each.

        Each timed call starts on an idle device, right after `UNTIMED_BUILDS` of the same (the
        others' have driven its code out of the host's caches), in rounds of random order; the
        garbage collector is off.
        """
        wall: dict[str, list[float]] = {name: [] for name in builds}
        host: dict[str, list[float]] = {name: [] for name in builds}
        took = {name: self.seconds(build) for name, build in builds.items()}
        repeats = {name: self._repeats(seconds) for name, seconds in took.items()}
        untimed = {name: UNTIMED_BUILDS * (took[name] < SLOW_BUILD_S) for name in builds}
        rounds, order = max(repeats.values()), random.Random(SEED)
        gc.collect()
        gc.disable()
        try:
            for index in range(rounds):
                for name in order.sample(list(builds), len(builds)):
                    # Evenly spaced, as in flexvarlen.measure.time_interleaved.
                    if (index + 1) * repeats[name] // rounds == index * repeats[name] // rounds:
                        continue
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

    def _repeats(self, seconds: float) -> int:
        budget_s = 0.1 if self.args.quick else 2.0
        return max(3, min(self.args.repeats, int(budget_s / ((UNTIMED_BUILDS + 1) * seconds))))

    def gpu_work(self, build: Build) -> dict[str, Any]:
        """`gpu_us`, the sum of what ran on the device, and `kernels`, how many, a build."""
        if not self.on_gpu:
            return {"gpu_us": None, "kernels": None}
        builds = PROFILED_BUILDS if self.seconds(build) < SLOW_BUILD_S else 2
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            for _ in range(builds):
                build()
            self.synchronize()
        events = [
            event
            for event in profile.events()
            if event.device_type == torch.autograd.DeviceType.CUDA
            and not getattr(event, "is_user_annotation", False)
        ]
        if not events:  # the profiler saw nothing: that is no measurement of nothing
            return {"gpu_us": None, "kernels": None}
        total = sum(event.time_range.elapsed_us() for event in events)
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
