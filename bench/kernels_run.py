"""One run of the kernel grid: its clock, its file, which cells are left, rows of what was found."""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import time
from collections.abc import Mapping
from typing import Any

import torch

from flexvarlen.bench.bench_run import BenchRun
from flexvarlen.bench.kernels_cell import PASSES, MeasuredCell, Outcome
from flexvarlen.bench.kernels_cells import Cell
from flexvarlen.rows import Row, read_rows

SUITE = "kernels"


class Run(BenchRun):
    """The shared state of one run: device, environment, clock, file, what is done already."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(SUITE, args)
        self.on_gpu = self.device.type == "cuda"
        self.variants: list[str] = args.variants
        self.before = {} if args.out is None else self._rows_of(args)

    def _rows_of(self, args: argparse.Namespace) -> dict[str, Row]:
        rows = read_rows([args.out]) if args.out.exists() else []
        gpu = self.environment["gpu"]
        own = (row for row in rows if row.suite == SUITE and row.environment.get("gpu") == gpu)
        return {_key(row.case): row for row in own}

    def is_done(self, cell: Cell) -> bool:
        """Whether every wanted variant has its rows, and they are not asked for again."""
        return not self.args.again and all(
            _key(case_of(cell, variant, pass_)) in self.before
            for variant in self.variants
            for pass_ in PASSES
        )

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def clean(self) -> None:
        gc.collect()
        if self.on_gpu:
            with contextlib.suppress(RuntimeError):  # of a device that an error has killed
                torch.cuda.empty_cache()

    # --- cells -----------------------------------------------------------------------------------

    def measure(self, cells: list[Cell]) -> None:
        """All cells that are not done, until time is up."""
        left = [cell for cell in cells if not self.is_done(cell)]
        self.say(f"{len(left)} cells to measure, {len(cells) - len(left)} done before")
        for index, cell in enumerate(left):
            if self.seconds_since_begin() > self.args.until:
                self.say(f"time is up: {len(left) - index} cells left; run again to go on")
                return
            self.measure_cell(cell)

    def measure_cell(self, cell: Cell) -> None:
        begin = time.perf_counter()
        measured = MeasuredCell(self, cell)
        try:
            measured.measure()
        finally:  # also of a cell that a dead device cuts short, so that the culprit is known
            for variant in self.variants:
                for pass_ in PASSES:
                    outcome = measured.outcomes.get((variant, pass_))
                    if outcome is not None:
                        self._write(cell, variant, pass_, outcome)
            seconds = time.perf_counter() - begin
            self.say(f"{cell.name}: {measured.summary()}, {seconds:.1f} s")
            del measured
            self.clean()

    def killed_by(self, cell: Cell, variant: str) -> Outcome | None:
        """What an earlier run says of a variant that ended it, so that none dies of it again."""
        row = self.before.get(_key(case_of(cell, variant, "forward")))
        if row is None or not row.measures.get("fatal"):
            return None
        return Outcome(row.status, row.reason, row.measures)

    def _write(self, cell: Cell, variant: str, pass_: str, outcome: Outcome) -> None:
        case, measures = case_of(cell, variant, pass_), _of_pass(pass_, outcome.measures)
        self.append(case, outcome.status, outcome.reason, measures)
        if outcome.status in ("wrong", "failed", "oom"):
            self.say(f"  {variant} {pass_}: {outcome.status}, {outcome.reason}")


def case_of(cell: Cell, variant: str, pass_: str) -> dict[str, Any]:
    """The case of a row."""
    return cell.data() | {"variant": variant, "pass": pass_}


def _of_pass(pass_: str, measures: Mapping[str, Any]) -> dict[str, Any]:
    """The measures without the errors of what the other pass gives."""
    others = ("_dq", "_dk", "_dv") if pass_ == "forward" else ("_out",)
    return {name: value for name, value in measures.items() if not name.endswith(others)}


def _key(case: Mapping[str, Any]) -> str:
    return json.dumps(dict(case), sort_keys=True)
