"""What a drift's tables in short leave out, as Markdown, a text a suite."""

from __future__ import annotations

from collections.abc import Sequence

from flexvarlen.drift.model.tables import NOTE_ON_SHARES, detail_grids
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
    grids = detail_grids(rows)
    if grids:
        tables = "\n\n".join(grid.markdown() for grid in grids)
        made.append(f"## A whole model: layers, documents\n\n{tables}")
    if suite_rows(rows, "drift-attribution"):
        made.append(f"## Whose drift it is: the rule\n\n{NOTE_ON_SHARES}")
    if comparisons(rows):
        made.append(f"## The verdict on training\n\n{RULE}")
    return made
