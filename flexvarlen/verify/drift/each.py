"""What the suites of drift share: checked names, and records without a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from flexvarlen.report.records import Record, read_records, run_environment
from flexvarlen.runner.run import record_case
from flexvarlen.runner.suite import Options, Suite
from flexvarlen.verify.drift.training.verdict import ROUNDING
from flexvarlen.verify.variants import variant_names


def checked_names(what: str, names: Sequence[str], known: Sequence[str]) -> list[str]:
    """The names once each, in the order of `known`; "all" is every one.

    Raises:
        ValueError: an unknown name; the message starts with `what`.
    """
    for name in names:
        if name not in (*known, "all"):
            raise ValueError(
                f"{what} must be all, or of {', '.join(known)}, got {name!r}; choose among these."
            )
    return [name for name in known if name in names or "all" in names]


def check_baseline(name: str) -> None:
    """Raise a ValueError for the name of no backend."""
    try:
        variant_names([name], torch.device("cpu"))  # the device matters for "all" alone
    except ValueError as error:
        raise ValueError(str(error).replace("backends", "baseline", 1)) from error


def records_of(suite: Suite, options: Options) -> list[Record]:
    """Measure all cases of a suite, for callers in Python; `run_suite` without a file."""
    environment = run_environment(options.device, None)
    records = []
    for case in suite.cases(options):
        names = options.variants or suite.variants(case, options)
        for finding in suite.measure(case, names, options):
            found = (finding.status, finding.reason, dict(finding.measures), environment)
            records.append(Record(suite.name, record_case(case, finding), *found))
    return records


def records_in(path: Path, suite: Suite, options: Options) -> tuple[Record, ...]:
    """A file's records of a suite's cases and variants on this machine, of whatever run."""
    gpu = run_environment(options.device, None)["gpu"]
    cases = [case.data() for case in suite.cases(options)]

    def is_own(record: Record) -> bool:
        case = {name: value for name, value in record.case.items() if name != "variant"}
        if case not in cases or record.environment.get("gpu") != gpu:
            return False
        always = (case.get("baseline"), ROUNDING)  # a training's own
        return options.variants is None or record.case["variant"] in (*options.variants, *always)

    return tuple(record for record in read_records([path]) if is_own(record))
