"""One case: every backend, every comparison, as rows; see `op.py` for what they are."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any

import torch

from flexvarlen.drift.difference import Difference
from flexvarlen.drift.op.backend_run import Abilities, BackendRun
from flexvarlen.drift.op.blame import blame
from flexvarlen.drift.op.cases import Inputs, OpCase
from flexvarlen.drift.op.exact import Answer
from flexvarlen.drift.op.failures import LOST, REFUSED, DeviceLostError, is_lost, status_of
from flexvarlen.drift.op.judge import Truth, Verdict
from flexvarlen.measure import Timing, time_interleaved
from flexvarlen.rows import Row, Status, one_line

SUITE = "drift-op"


@dataclass(frozen=True)
class Settings:
    """The arguments of `operator_drift` that are the same for all cases of a dtype."""

    device: torch.device
    dtype: torch.dtype
    train: bool
    comparisons: tuple[str, ...]
    compile: tuple[str, ...]
    repeats: int
    seed: int


_Timed = dict[str, dict[str, Callable[[], object]]]
"""Backend -> kind -> call."""


@dataclass(frozen=True)
class _Result:
    measures: dict[str, Any]
    status: Status = "ok"
    reason: str | None = None


class CaseRun:
    """One case: every backend, every comparison.

    What a kernel raises becomes a row. `except Exception` stands at this border alone: compilers of
    kernels (Triton, CuTe DSL) raise classes of their own that derive from nothing else.
    """

    def __init__(
        self,
        case: OpCase,
        settings: Settings,
        environment: dict[str, Any],
        write: Callable[[Row], None],
        progress: Callable[[str], None],
    ) -> None:
        self.case, self.settings, self.environment = case, settings, environment
        self.write_row, self.progress = write, progress
        self.truth: Truth | None = None
        self.not_timed: dict[str, _Result] = {}
        self.lost: BaseException | None = None

    def run(self, backends: Sequence[str]) -> None:
        """Write the rows of all.

        Raises:
            DeviceLostError: after the row of a kernel that broke the device.
        """
        settings = self.settings
        try:
            self.inputs = Inputs.random(self.case, settings.dtype, settings.device, settings.seed)
        except torch.OutOfMemoryError as error:
            for backend in backends:
                self._give_up(backend, "oom", one_line(error))
            return
        alive = [run for backend in backends if (run := self._start(backend)) is not None]
        for run in alive:
            self._compare_one(run)
        self.truth = None
        if "backend-backend" in settings.comparisons:
            for one, other in combinations(alive, 2):
                self._attempt(one, "backend-backend", partial(_serial, one, other), other)
        if "runtime" in settings.comparisons:
            for run in alive:
                run.drop("serial")
            self._time(alive)
        self._clean()

    def _start(self, backend: str) -> BackendRun | None:
        settings = self.settings
        able = Abilities.of(backend, self.case, settings.dtype, settings.device)
        if able.refusal is not None:
            self._give_up(backend, "unsupported", able.refusal, {REFUSED: True})
            return None
        train = settings.train and able.no_backward is None
        return BackendRun(
            backend, self.case, self.inputs, lse=able.lse, train=train, seed=settings.seed
        )

    # --- comparisons -----------------------------------------------------------------------------

    def _compare_one(self, run: BackendRun) -> None:
        """All that needs no other backend. Untimed correctness comes along with "runtime"."""
        wanted = self.settings.comparisons
        if "exact" in wanted:
            self._attempt(run, "exact", lambda: self._checked(run))
        elif "runtime" in wanted:
            self._checked(run)
            self._end_if_lost(run)
        if "runtime" in wanted and "batch-serial" not in wanted:
            self._batch_serial(run)
            self._end_if_lost(run)
        works: dict[str, Callable[[], _Result]] = {
            "batch-serial": lambda: self._batch_serial(run),
            "run-run": lambda: _Result(_measures([(run.answer(run.inputs), run.batch)])),
            "place": lambda: _Result(_measures(run.pairs_of_places())),
            "eager-compiled": lambda: self._compiled(run),
        }
        for comparison, work in works.items():
            if comparison in wanted:
                self._attempt(run, comparison, work)
        run.drop("batch", *(() if "backend-backend" in wanted else ("serial",)))
        self._clean()

    def _end_if_lost(self, run: BackendRun) -> None:
        if self.lost is not None:
            self._calls(run)  # its row of times says so

    def _checked(self, run: BackendRun) -> _Result:
        """The batch held against fp64; what did not end ok there is not timed."""
        try:
            result = self._judged(run.batch)
        except Exception as error:
            result = self._failed(error)
        if result.status != "ok":
            unchecked = "" if result.status == "wrong" else "not checked, so not timed: "
            reason = f"{unchecked}{result.reason}"
            self.not_timed[run.backend] = _Result({}, result.status, reason)
        return result

    def _judged(self, answer: Answer) -> _Result:
        """An answer held against fp64."""
        truth = self._truth()
        verdict = Verdict.of(answer, truth)
        reason = verdict.reason()
        measures = verdict.measures() | {"blame": None}
        if reason is None:
            return _Result(measures)
        try:
            measures["blame"] = blame(truth, answer, verdict)
        except Exception as error:  # wrong it is, whether or not it can be said why
            failed = self._failed(error)
            return _Result(measures, "wrong", f"{reason} Why is not known: {failed.reason}")
        return _Result(measures, "wrong", f"{reason} {measures['blame']}")

    def _batch_serial(self, run: BackendRun) -> _Result:
        """The difference, and the serial answer held against fp64 as "exact" holds the batch's.

        Else a kernel that errs in both alike would be "the same bits", and no more be said. What is
        wrong, or could not be checked, is neither "ok" nor timed; the difference stands.
        """
        measures: dict[str, Any] = {}
        try:
            measures = _documents(run, run.batch, run.serial).measures
            judged = self._judged(run.serial)
        except Exception as error:
            return self._serial_unchecked(run, measures, self._failed(error))
        found = judged.measures.items()
        measures |= {f"serial_{name}": x for name, x in found if not name.startswith("peer_")}
        if judged.status == "ok":
            return _Result(measures)
        reason = f"one call a document: {judged.reason}"
        self.not_timed.setdefault(run.backend, _Result({}, judged.status, reason))
        return _Result(measures, judged.status, reason)

    def _serial_unchecked(
        self, run: BackendRun, measures: dict[str, Any], failed: _Result
    ) -> _Result:
        """What failed: the calls, if there are no measures yet, else the check (no room, say)."""
        reason = f"one call a document: not checked, so not timed: {failed.reason}"
        self.not_timed.setdefault(run.backend, _Result({}, failed.status, reason))
        if not measures:
            return failed
        reason = f"one call a document: not checked: {failed.reason}"
        return _Result(measures | {"why_serial_not_checked": failed.reason}, failed.status, reason)

    def _truth(self) -> Truth:
        if self.truth is None:
            self.progress(f"{self.case.name}: each document alone in fp64")
            self.truth = Truth.of(self.case, self.inputs, gradients=self.settings.train)
        return self.truth

    def _compiled(self, run: BackendRun) -> _Result:
        if run.backend not in self.settings.compile:
            reason = f"{run.backend} was not to be compiled; name it in compile=."
            return _Result({}, "skipped", reason)
        return _Result(_measures([(run.compiled(), run.batch)]))

    # --- time ------------------------------------------------------------------------------------

    def _time(self, runs: Sequence[BackendRun]) -> None:
        timed: _Timed = {}
        for run in runs:
            calls = self._calls(run)
            if calls is not None:
                timed[run.backend] = calls
        if not timed:
            return
        self.progress(f"{self.case.name}: timing {', '.join(timed)}")
        while timed:
            failed, culprits = self._time_together(timed)
            if failed is None:
                return
            for backend in culprits:
                del timed[backend]
                self._write(backend, "runtime", failed)
            self._clean()

    def _time_together(self, timed: _Timed) -> tuple[_Result | None, list[str]]:
        """Time and write the rows; or what failed, and whose call it was: all if nobody's."""
        device, repeats = self.settings.device, self.settings.repeats
        running: list[str] = []

        def watched(backend: str, call: Callable[[], object]) -> None:
            running[:] = [backend]
            call()

        variants = {
            f"{backend} {kind}": partial(watched, backend, call)
            for backend, calls in timed.items()
            for kind, call in calls.items()
        }
        try:
            timings = time_interleaved(variants, device=device, repeats=repeats)
        except Exception as error:  # each ran alone: together they do not fit, say
            return self._failed(error), running or list(timed)
        for backend in timed:
            self._write(backend, "runtime", _Result(_milliseconds(backend, timings)))
        return None, []

    def _calls(self, run: BackendRun) -> dict[str, Callable[[], object]] | None:
        """What is to be timed, each called once; None, and a row that says why, if nothing."""
        result = self.not_timed.get(run.backend)
        if result is None:
            try:
                calls = run.calls()
                for call in calls.values():
                    call()
                self._synchronize()  # what goes wrong on the device is this backend's
            except Exception as error:
                result = self._failed(error)
            else:
                return calls
        self._write(run.backend, "runtime", result)
        return None

    # --- rows ------------------------------------------------------------------------------------

    def _attempt(
        self,
        run: BackendRun,
        comparison: str,
        work: Callable[[], _Result],
        other: BackendRun | None = None,
    ) -> None:
        beside = "" if other is None else f" {other.backend}"
        self.progress(f"{self.case.name}: {run.backend}{beside} {comparison}")
        try:
            result = work()
        except Exception as error:
            result = self._failed(error)
        self._write(run.backend, comparison, result, None if other is None else other.backend)

    def _give_up(
        self, backend: str, status: Status, reason: str, measures: dict[str, Any] | None = None
    ) -> None:
        for comparison in self.settings.comparisons:
            if comparison != "backend-backend":
                self._write(backend, comparison, _Result(measures or {}, status, reason))

    def _write(
        self, backend: str, comparison: str, result: _Result, other: str | None = None
    ) -> None:
        settings = self.settings
        case = self.case.as_row_case(settings.dtype, train=settings.train, seed=settings.seed)
        case |= {"backend": backend, "comparison": comparison, "other": other}
        measures = result.measures if self.lost is None else result.measures | {LOST: True}
        self.write_row(Row(SUITE, case, result.status, result.reason, measures, self.environment))
        if self.lost is not None:
            where = f"{backend}, {comparison}, in {self.case.name}"
            raise DeviceLostError.after(where, self.lost) from self.lost

    def _failed(self, error: Exception) -> _Result:
        """What an exception makes of a row; `_write` raises after it if the device is lost."""
        if is_lost(error, self.settings.device):
            self.lost = error
        return _Result({}, *status_of(error))

    def _synchronize(self) -> None:
        if self.settings.device.type == "cuda":
            torch.cuda.synchronize(self.settings.device)

    def _clean(self) -> None:
        if self.settings.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()


def _milliseconds(backend: str, timings: Mapping[str, Timing]) -> dict[str, Any]:
    """A row's measures of the calls that were timed."""
    measures: dict[str, Any] = {}
    for kind, prefix in (("forward", ""), ("both", "both_")):
        found = timings.get(f"{backend} {kind}")
        if found is not None:
            named = {"p20": found.ms_p20, "p50": found.ms_p50, "p80": found.ms_p80}
            measures |= {f"{prefix}ms_{name}": value for name, value in named.items()}
    serial = timings[f"{backend} serial"]
    return measures | {"serial_ms_p50": serial.ms_p50, "repeats": serial.repeats}


def _serial(one: BackendRun, other: BackendRun) -> _Result:
    return _documents(one, one.serial, other.serial)


def _documents(run: BackendRun, found: Answer, truth: Answer) -> _Result:
    """Document by document, as one difference."""
    lengths = run.inputs.lengths
    pairs = list(zip(found.documents(lengths), truth.documents(lengths), strict=True))
    return _Result(_measures(pairs))


def _measures(pairs: Sequence[tuple[Answer, Answer]]) -> dict[str, Any]:
    """The differences of every part that both have."""
    measures: dict[str, Any] = {}
    common = set(pairs[0][0].parts()) & set(pairs[0][1].parts())
    for name in (name for name in pairs[0][0].parts() if name in common):
        of_part = [(a.parts()[name], b.parts()[name]) for a, b in pairs]
        measures |= Difference.over(of_part).measures(name)
    return measures
