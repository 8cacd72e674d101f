"""`ResumableRun`: a run of one measure whose file says what is done, and a limit what is begun."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from flexvarlen.bench.bench_run import BenchRun
from flexvarlen.bench.model.step import outcome_of
from flexvarlen.drift.op.failures import DeviceLostError, is_lost
from flexvarlen.rows import Row, Status, read_rows

Measured = tuple[Status, str | None, dict[str, Any]]
"""A row's status, reason and measures."""


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that every measure of this folder has."""
    add = parser.add_argument
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--until", type=float, default=float("inf"), metavar="S", help="begin nothing later")
    add("--commit", help="recorded in place of what git finds here")
    add("--out", type=Path, help="JSON lines; what they hold is not measured again")


class ResumableRun(BenchRun):
    """Cases one after another, each row appended as it is known.

    A case is done when the file has a row of it on this GPU, whatever became of it.

    Args:
        suite: the name that the rows bear.
        args: those of `add_run_arguments`, at least.

    Attributes:
        rows: those of this run.
    """

    def __init__(self, suite: str, args: argparse.Namespace) -> None:
        super().__init__(suite, args)
        self.rows: list[Row] = []
        found = read_rows([args.out]) if args.out is not None and args.out.exists() else []
        self._held = {
            _key(row.case)
            for row in found
            if row.suite == suite and row.environment.get("gpu") == self.environment["gpu"]
        }

    def is_todo(self, case: dict[str, Any]) -> bool:
        """Whether the file lacks the case, and there is time to begin it."""
        return _key(case) not in self._held and self.seconds_since_begin() < self.args.until

    def measure(self, case: dict[str, Any], measured: Callable[[], Measured]) -> None:
        """A case's row, if it is to do; what it raises is a row too.

        Raises:
            DeviceLostError: nothing can be measured any more in this process; the row is written.
        """
        if not self.is_todo(case):
            return
        lost: Exception | None = None
        try:
            status, reason, measures = measured()
        except Exception as error:  # kernel packages assert, and raise types of their own
            status, reason = outcome_of(error)
            measures = {}
            lost = error if is_lost(error, self.device) else None
        self.write(case, status, reason, measures)
        if lost is not None:
            raise DeviceLostError.after(_name(case), lost) from lost

    def write(
        self, case: dict[str, Any], status: Status, reason: str | None, measures: dict[str, Any]
    ) -> None:
        """A row of the run, of the log and of the file."""
        self.say(f"{_name(case)}: {status}{'' if reason is None else ', ' + reason}")
        self.rows.append(Row(self.suite, case, status, reason, measures, self.environment))
        self.append(case, status, reason, measures)


def _key(case: dict[str, Any]) -> str:
    return json.dumps(case, sort_keys=True)


def _name(case: dict[str, Any]) -> str:
    return " ".join(
        str(case[key])
        for key in ("variant", "mode", "order", "ranks", "num_heads", "seed")
        if key in case
    )
