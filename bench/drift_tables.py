"""Drift's tables in short, for a page of the docs; the long ones stand in the run's own report."""

from __future__ import annotations

from collections.abc import Sequence

from flexvarlen.drift.report.files import DriftReport, described
from flexvarlen.rows import Row


def drift_section(rows: Sequence[Row]) -> str:
    """What was compared and where, the verdicts, a table each."""
    report = DriftReport(tuple(rows))
    told = [f"- {text}" for text in (*described(rows), *report.sentences())]
    return "\n\n".join(["\n".join(told), *(grid.markdown() for grid in report.grids())])
