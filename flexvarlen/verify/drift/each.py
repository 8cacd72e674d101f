"""What the suites of drift share: checked names, and records without a file."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flexvarlen.report.records import Record, run_environment
from flexvarlen.runner.run import record_case
from flexvarlen.runner.suite import Options, Suite
from flexvarlen.verify.experiment.variant import variant_names


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


def check_baseline(name: str) -> str:
    """The backend that is named; raises a ValueError for the name of none."""
    try:
        (found,) = variant_names([name], torch.device("cpu"))
    except ValueError as error:
        raise ValueError(str(error).replace("backends", "baseline", 1)) from error
    return found


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
