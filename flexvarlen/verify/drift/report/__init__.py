"""`DriftReport`: what the records of a drift say, as tables and sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flexvarlen.measure.machine import without_paths
from flexvarlen.report.records import Record
from flexvarlen.report.table import Table
from flexvarlen.verify.drift.report.tables import tables
from flexvarlen.verify.drift.report.thresholds import Measured, Threshold, broken_limits
from flexvarlen.verify.drift.report.verdicts import passed, record_name, sentences
from flexvarlen.verify.drift.training.verdict import ROUNDING


@dataclass(frozen=True)
class DriftReport:
    """Records of `operator_drift`, `model_drift` or a `records.jsonl`."""

    records: tuple[Record, ...]

    @property
    def passed(self) -> bool:
        """Whether no backend of flexvarlen is wrong or failed."""
        return passed(self.records)

    @property
    def compared(self) -> bool:
        """Whether a variant ran, beside the baseline of a training and its rounding twin."""
        return any(
            record.status in ("ok", "wrong")
            and record.case["variant"] not in (record.case.get("baseline"), ROUNDING)
            for record in self.records
        )

    def tables(self) -> list[Table]:
        """A table for each suite and machine."""
        return tables(self.records)

    def sentences(self) -> list[str]:
        """The findings; without one, a sentence for each suite."""
        return [without_paths(text) for text in sentences(self.records)]

    def broken_limits(self, limits: Sequence[Threshold]) -> list[str]:
        """A sentence for each limit that a record passes; the rounding twin has none."""
        ran = [r for r in self.records if r.status in ("ok", "wrong")]
        ran = [r for r in ran if r.case["variant"] != ROUNDING]
        return broken_limits(limits, [Measured(record_name(r), r.measures) for r in ran])

    def save(self, path: Path) -> None:
        """Write tables and sentences as Markdown."""
        parts = [table.markdown() for table in self.tables()]
        text = without_paths("\n\n".join(parts))
        path.write_text("\n\n".join([text, *self.sentences()]) + "\n", encoding="utf-8")


def section(records: Sequence[Record]) -> str:
    """The tables as Markdown."""
    return "\n\n".join(table.markdown() for table in tables(records))
