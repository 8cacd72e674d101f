"""The tables of a drift in short, for a terminal and for the page; from rows alone."""

from __future__ import annotations

from collections.abc import Sequence

from flexvarlen.drift.grid import NOTHING, Grid, number
from flexvarlen.drift.model.tables import attribution_grids, batch_grids
from flexvarlen.drift.report.verdicts import BACKWARD, FORWARD, RATIOS, groups, largest, suite_rows
from flexvarlen.drift.training.tables import training_grids
from flexvarlen.rows import Row

_OP = ("batch-serial", "run-run", "place", "eager-compiled", "backend-backend")


def grids(rows: Sequence[Row]) -> list[Grid]:
    """Of every suite that has rows; what cannot run here is in the report's notes alone."""
    rows = [row for row in rows if row.status != "unsupported"]
    of_models = [*batch_grids(rows), *attribution_grids(rows)]
    return [*_operators(rows), *of_models, *training_grids(rows)]


# ---- operators ----


def _operators(rows: Sequence[Row]) -> list[Grid]:
    """A row a backend: its largest relative difference over all cases, of each comparison."""
    made = []
    for (dtype,), of_dtype in groups(suite_rows(rows, "drift-op"), "dtype").items():
        shown = [c for c in _OP if any(row.case["comparison"] == c for row in of_dtype)]
        header = ["backend", "verdict", "share of allowed error"]
        header += [f"{c} {part}" for c in shown for part in ("fwd", "bwd")]
        lines: list[tuple[str, ...]] = []
        bad: set[int] = set()
        for (backend,), own in groups(of_dtype, "backend").items():
            verdict = _verdict(own)
            if verdict in ("wrong", "failed"):
                bad.add(len(lines))
            ratio = largest(own, RATIOS)
            cells = [str(backend), verdict, NOTHING if ratio is None else f"{ratio[0]:.0%}"]
            for comparison in shown:
                compared = [row for row in own if row.case["comparison"] == comparison]
                cells += [_farthest(compared, FORWARD), _farthest(compared, BACKWARD)]
            lines.append(tuple(cells))
        cases = len(groups(of_dtype, "name"))
        title = f"Attention alone, {dtype}: largest relative difference over the cases ({cases})"
        made.append(Grid(title, tuple(header), tuple(lines), frozenset(bad)))
    return made


def _verdict(rows: Sequence[Row]) -> str:
    """The worst status of its rows; "ok" if it ran at all and nothing is wrong."""
    found = {row.status for row in rows}
    order = ("wrong", "failed", "ok", "oom")
    return next((status for status in order if status in found), "skipped")


def _farthest(rows: Sequence[Row], parts: Sequence[str]) -> str:
    worst = largest(rows, [f"{part}_relative" for part in parts])
    return number(None if worst is None else worst[0])
