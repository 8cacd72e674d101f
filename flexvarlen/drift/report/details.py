"""The long tables of a drift as Markdown, a text a suite."""

from __future__ import annotations

from collections.abc import Sequence

from flexvarlen.drift.model.tables import attribution_markdown, model_markdown
from flexvarlen.drift.op.tables import exact_table, stability_table, study_tables
from flexvarlen.drift.report.verdicts import suite_rows
from flexvarlen.drift.training.tables import RULE, comparisons
from flexvarlen.rows import Row


def detailed_tables(rows: Sequence[Row]) -> list[str]:
    """Each begins with a heading; suites without rows have none."""
    made = []
    if suite_rows(rows, "drift-op"):
        made += [
            f"## Attention alone: time, batch and serial, backends\n\n{study_tables(rows)}",
            f"## Attention alone: errors against fp64\n\n{exact_table(rows)}",
            f"## Attention alone: what should make no difference\n\n{stability_table(rows)}",
        ]
    if suite_rows(rows, "drift-model"):
        made.append(f"## A whole model: batch, layers, documents\n\n{model_markdown(rows)}")
    if suite_rows(rows, "drift-attribution"):
        made.append(f"## Whose drift it is\n\n{attribution_markdown(rows)}")
    if comparisons(rows):
        made.append(f"## The verdict on training\n\n{RULE}")
    return made
