"""`run_suite`: measure a suite's cases one after another and append their records; resumable.

A case is done when every requested variant has a record from the same GPU. Records of other
versions or another commit count; the run reports them. All records of a case are written at once,
when it ends: a run killed at any moment loses the case in flight only.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexvarlen.report.records import Record, append_records, read_records, run_environment
from flexvarlen.runner.failures import is_lost, status_of
from flexvarlen.runner.suite import Case, DeviceLost, Finding, Options, Suite, UnknownVariant

Progress = Callable[[int, int, str], None]
"""(cases done, cases of this run, description of the current measurement) -> None."""


@dataclass(frozen=True)
class RunRequest:
    """Which part of a suite to run, and where to write its records.

    Attributes:
        out: file of records, read first and appended to.
        cases: a regular expression that the names of cases must match.
        until_s: seconds of the run after which no case begins.
        again: whether to measure cases that the file already has.
        commit: the commit to record instead of git's.
    """

    out: Path
    cases: str | None = None
    until_s: float = float("inf")
    again: bool = False
    commit: str | None = None


@dataclass(frozen=True)
class RunSummary:
    """How a run ended: cases measured now, done before, and left because time was up."""

    measured: int
    done_before: int
    left: int

    @property
    def counts(self) -> str:
        """The counts as a sentence, for the end of a command."""
        left = f", {self.left} left as time was up: run again to continue" if self.left else ""
        return f"{self.measured} cases measured, {self.done_before} done before{left}"


def chosen_cases(
    suites: Sequence[Suite[Any]], options: Options, pattern: str | None
) -> dict[Suite[Any], list[Case]]:
    """The suites that have cases whose names match a regular expression, with these cases.

    Raises:
        ValueError: the expression is invalid, or matches no case.
    """
    try:
        wanted = re.compile(pattern or "")
    except re.error as error:
        raise ValueError(
            f"cases must be a regular expression, got {pattern!r}: {error}; escape metacharacters."
        ) from error
    every = {suite: list(suite.cases(options)) for suite in suites}
    found = {
        suite: chosen
        for suite, cases in every.items()
        if (chosen := [case for case in cases if wanted.search(case.name)])
    }
    if not found:
        names = ", ".join(case.name for cases in every.values() for case in cases)
        raise ValueError(f"cases must match a case, got {pattern!r}; there are {names}.")
    return found


def run_suite(
    suite: Suite[Any],
    options: Options,
    run: RunRequest,
    progress: Progress = lambda done, of, what: None,
) -> RunSummary:
    """Measure cases that the file lacks; records of a case are appended when it ends.

    Raises:
        ValueError: no case is chosen, or the file has lines that are not records.
        DeviceLost: the device died; results so far are written, and another run continues.
    """
    cases = chosen_cases([suite], options, run.cases)[suite]
    begin = time.perf_counter()
    environment = run_environment(options.device, run.commit)
    before = _RecordedCases(records_held(suite, options, run), run.again, environment)
    todo = [
        (case, wanted)
        for case in cases
        if (wanted := before.left_of(case, *_variants(suite, case, options)))
    ]
    if before.others and len(todo) < len(cases):
        options.say(
            f"{run.out} has records of {', '.join(sorted(before.others))}, which are not "
            "measured again; to do so, run with --again or write to another file."
        )

    def keep(case: Case, findings: Sequence[Finding]) -> None:
        append_records(run.out, _records(suite, case, findings, environment))

    for done, (case, variants) in enumerate(todo):
        if time.perf_counter() - begin > run.until_s:
            return RunSummary(done, len(cases) - len(todo), len(todo) - done)
        progress(done, len(todo), case.name)
        fatal_variants = before.fatal_variants(case)
        alive = [name for name in variants if name not in fatal_variants]
        findings = [finding for name in variants for finding in fatal_variants.get(name, ())]
        try:
            findings += suite.measure(case, alive, options) if alive else ()
        except DeviceLost as error:
            findings += error.findings
            keep(case, findings)
            raise
        except UnknownVariant:
            raise
        except Exception as error:  # concerns this case: the others can still be measured
            status, reason = status_of(error)
            if is_lost(error, options.device):
                # The responsible variant is unknown: a record would permanently fail innocent ones.
                raise DeviceLost(f"{case.name} lost the device: {reason}", []) from error
            findings += [Finding(name, status, reason) for name in alive]
        keep(case, findings)
        unknown = set(variants) - {finding.variant for finding in findings}
        assert not unknown, f"{suite.name} has no finding of {sorted(unknown)} on {case.name}"
        for finding in findings:
            if finding.status in ("wrong", "failed"):
                passes = f" {finding.pass_}" if finding.pass_ else ""
                options.say(
                    f"{case.name}: {finding.variant}{passes} {finding.status}, {finding.reason}"
                )
    progress(len(todo), len(todo), "")
    return RunSummary(len(todo), len(cases) - len(todo), 0)


def records_held(suite: Suite[Any], options: Options, run: RunRequest) -> list[Record]:
    """The file's records of a suite on this GPU."""
    gpu = run_environment(options.device, None)["gpu"]
    return [
        record
        for record in (read_records([run.out]) if run.out.exists() else ())
        if record.suite == suite.name and record.environment.get("gpu") == gpu
    ]


def records_of_run(suite: Suite[Any], options: Options, run: RunRequest) -> list[Record]:
    """The file's records of a run's cases and variants on this GPU, measured now or before."""
    cases = {_key(case.data()) for case in chosen_cases([suite], options, run.cases)[suite]}
    return [
        record
        for record in records_held(suite, options, run)
        if _key_of(record) in cases
        and (options.variants is None or record.case["variant"] in options.variants)
    ]


def records_of(suite: Suite[Any], options: Options) -> list[Record]:
    """Measure all cases of a suite, for callers in Python: `run_suite` without a file.

    Raises:
        DeviceLost: the device died.
    """
    environment = run_environment(options.device, None)
    records = []
    for case in suite.cases(options):
        names, _ = _variants(suite, case, options)
        records += _records(suite, case, suite.measure(case, names, options), environment)
    return records


def _variants(suite: Suite[Any], case: Case, options: Options) -> tuple[list[str], list[str]]:
    """The requested variants, and the suite's own."""
    own = list(suite.variants(case, options))
    return (own if options.variants is None else list(options.variants)), own


def record_case(case: Case, finding: Finding) -> dict[str, Any]:
    """The case of a finding's record."""
    data = case.data() | {"variant": finding.variant}
    return data | {"pass": finding.pass_} if finding.pass_ else data


def _records(
    suite: Suite[Any], case: Case, findings: Sequence[Finding], environment: dict[str, Any]
) -> list[Record]:
    records = []
    for finding in findings:
        found = (finding.status, finding.reason, dict(finding.measures), environment)
        records.append(Record(suite.name, record_case(case, finding), *found))
    return records


def _made_by(environment: Mapping[str, Any]) -> str:
    versions = (f"{name} {environment.get(name)}" for name in ("flexvarlen", "transformers"))
    changes = " with uncommitted changes" if environment.get("git_dirty") else ""
    return (
        f"torch {environment.get('torch')}, {', '.join(versions)} at commit "
        f"{environment.get('git_commit')}{changes}"
    )


class _RecordedCases:
    """The file's records of this suite and this GPU.

    Attributes:
        others: versions and commits of records that this run's versions, commit or uncommitted
            changes did not make.
    """

    def __init__(
        self, records: Sequence[Record], again: bool, environment: Mapping[str, Any]
    ) -> None:
        self.again = again
        self.findings: dict[str, dict[str, list[Finding]]] = {}
        self.others: set[str] = set()
        for record in records:
            variant, pass_ = record.case["variant"], record.case.get("pass", "")
            finding = Finding(variant, record.status, record.reason, record.measures, pass_)
            key = _key_of(record)
            made_by, is_dirty = _made_by(record.environment), record.environment.get("git_dirty")
            if made_by != _made_by(environment) or is_dirty:  # changes may differ from changes
                self.others.add(made_by)
            self.findings.setdefault(key, {}).setdefault(variant, []).append(finding)

    def _of(self, case: Case) -> dict[str, list[Finding]]:
        return self.findings.get(_key(case.data()), {})

    def left_of(self, case: Case, variants: Sequence[str], known: Sequence[str]) -> list[str]:
        """All variants of a case if one is missing, as they are measured interleaved.

        Includes variants that the file has besides the named ones, if the suite knows them
        (`known`), as tables show the last run of a case. Records of cases that ran out of time do
        not count. A variant that lacks a pass of another was written incompletely.
        """
        found = self._of(case)
        passes = {finding.pass_ for findings in found.values() for finding in findings}
        done = all(
            name in found
            and {finding.pass_ for finding in found[name]} == passes
            and all(finding.status != "skipped" for finding in found[name])
            for name in variants
        )
        if done and not self.again:
            return []
        beside = [name for name in known if name in found and name not in variants]
        return [*variants, *beside]

    def fatal_variants(self, case: Case) -> dict[str, list[Finding]]:
        """Variants that left the device unusable on this case, with their findings.

        A run with `again` gives them another chance.
        """
        return (
            {}
            if self.again
            else {
                name: findings
                for name, findings in self._of(case).items()
                if any(finding.measures.get("fatal") for finding in findings)
            }
        )


def _key_of(record: Record) -> str:
    return _key({k: v for k, v in record.case.items() if k not in ("variant", "pass")})


def _key(case: Mapping[str, Any]) -> str:
    return json.dumps(dict(case), sort_keys=True)
