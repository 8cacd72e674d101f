"""Runs of suites, small and on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from flexvarlen.bench import report
from flexvarlen.report.records import Record, read_records
from flexvarlen.runner.run import RunRequest, run_suite
from flexvarlen.runner.suite import Options, Suite

CPU = torch.device("cpu")
QUICK = Options(CPU, quick=True, seconds=0.02, say=lambda line: None)
ON_A_GPU = Options(torch.device("cuda"))
RESULTS = Path(report.__file__).parent / "results"


def records_of(
    suite: Suite,
    folder: Path,
    *variants: str,
    cases: str | None = None,
    options: Options = QUICK,
) -> list[Record]:
    """What a run of a suite writes into a folder; default: all variants of all cases."""
    out = folder / "records.jsonl"
    run_suite(suite, replace(options, variants=variants or None), RunRequest(out, cases=cases))
    return read_records([out])


def committed(name: str) -> Sequence[Record]:
    """Records of the files of bench/results whose names begin so."""
    return read_records(sorted(RESULTS.glob(f"{name}*.jsonl")))
