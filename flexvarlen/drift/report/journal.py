"""`Journal`: the file that a run's rows go to as they come, so that none is lost with the run."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from flexvarlen.drift.report.files import ROWS, DriftReport
from flexvarlen.measure import environment
from flexvarlen.rows import Row, append_row, read_rows, require_folder

_TRY_AGAIN = ("failed", "oom")


class Journal:
    """Of one folder.

    Attributes:
        note: what became of rows that were there, as a sentence; None if there were none.
    """

    def __init__(self, folder: Path, device: torch.device, *, resume: bool) -> None:
        """Open it; nothing is written before the first row.

        Args:
            folder: made when the first row comes.
            device: that measures; rows of another kind of device, or of another torch, are kept
                and measured again here.
            resume: keep the rows that are there; else they are replaced with the first row.

        Raises:
            ValueError: the folder cannot be made or written to.
        """
        require_folder(folder)
        self._path = folder / ROWS
        there = self._path.exists()
        kept = read_rows([self._path]) if there and resume else []
        self._machine = _machine_of(environment(device))
        self._old = self._here(kept)
        self._replace = there and not resume
        self.note: str | None = None
        if there:
            self.note = (
                f"{len(kept)} rows of an earlier run are kept, {len(self._old)} of them of this "
                "kind of device and this torch; what is complete of these is not run."
                if resume
                else "rows of an earlier run are replaced; --resume would keep them."
            )

    def append(self, row: Row) -> None:
        """Write a row."""
        if self._replace:
            self._path.unlink()
            self._replace = False
        append_row(self._path, row)

    def every(self, suite: str, **case: Any) -> list[Row]:
        """Of an earlier run on such a machine, those whose case has these entries."""
        return [
            row
            for row in self._old
            if row.suite == suite and all(row.case.get(name) == case[name] for name in case)
        ]

    def rows(self, suite: str, **case: Any) -> list[Row]:
        """Of these, those that need no second try."""
        return [row for row in self.every(suite, **case) if row.status not in _TRY_AGAIN]

    def has(self, suite: str, **case: Any) -> bool:
        """Whether there is such a row."""
        return bool(self.rows(suite, **case))

    def report(self) -> DriftReport:
        """All rows of the file; of equal suite, case and GPU the last."""
        kept = self._path.exists() and not self._replace
        return DriftReport(tuple(read_rows([self._path]) if kept else ()))

    def measured_here(self) -> DriftReport:
        """Of these, those of such a machine: what a run on it is judged by."""
        return DriftReport(tuple(self._here(self.report().rows)))

    def _here(self, rows: Iterable[Row]) -> list[Row]:
        return [row for row in rows if _machine_of(row.environment) == self._machine]


def _machine_of(found: dict[str, Any]) -> tuple[Any, ...]:
    """What numbers of one case may depend on, beside the code."""
    return tuple(found.get(name) for name in ("device", "gpu", "torch"))
