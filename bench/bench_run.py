"""`BenchRun`: what a run of any suite has: arguments, device, environment, clock, file of rows."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch

from flexvarlen.rows import Row, Status, append_row, run_environment


class BenchRun:
    """One run of a suite, which begins now.

    Args:
        suite: the name that its rows bear.
        args: at least `device`, `commit` and `out`.
    """

    def __init__(self, suite: str, args: argparse.Namespace) -> None:
        self.suite, self.args = suite, args
        self.begin = time.perf_counter()
        self.device = torch.device(args.device)
        self.environment = run_environment(self.device, args.commit)

    def seconds_since_begin(self) -> float:
        return time.perf_counter() - self.begin

    def say(self, text: str) -> None:
        """A line of the log, with the time."""
        print(f"{self.seconds_since_begin():6.1f} s  {text}", file=sys.stderr, flush=True)

    def append(
        self, case: dict[str, Any], status: Status, reason: str | None, measures: dict[str, Any]
    ) -> None:
        """A row of the file, if there is one."""
        if self.args.out is not None:
            row = Row(self.suite, case, status, reason, measures, self.environment)
            append_row(self.args.out, row)
