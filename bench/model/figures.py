"""Figures of the suite `model`: tokens a second, a panel a way of batching."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flexvarlen.bench.model.cases import BATCHINGS, split_variant
from flexvarlen.bench.model.tables import groups_of, title_of, where_measured
from flexvarlen.bench.series import Measured
from flexvarlen.bench.series_figure import Panel, Point, figure_path, save_dots, save_lines
from flexvarlen.rows import Row

TITLES = {
    "packed": "packed in one row",
    "padded": "padded batches",
    "padded-sorted": "padded batches, sorted by length",
    "serial": "one document at a time",
}


def figures(rows: Sequence[Row], folder: Path) -> list[Path]:
    """A figure of each group of training cases.

    A variant after whose name an "@" stands, the same kernel told its documents otherwise, is in
    the tables alone.
    """
    return [_drawn(group, folder) for group in groups_of(rows) if group[0].case["task"] == "train"]


def _drawn(group: Sequence[Measured], folder: Path) -> Path:
    case = group[0].case
    words = ("model", case["geometry"], case["mode"], case["documents"])
    path = figure_path(folder, "-".join(words), list(group[0].rows.values()))
    panels = [
        Panel(TITLES[batching], "tokens a second", points)
        for batching in BATCHINGS
        if (points := _points(group, batching))
    ]
    title = f"{title_of(group)}\n{where_measured(group)}"
    sizes = {each.case["tokens"] for each in group}
    if len(sizes) > 1:
        return save_lines([panels], path, title=title, xlabel="documents' tokens")
    title = f"{title_of(group)}; {sizes.pop():,} tokens, band p20–p80\n{where_measured(group)}"
    return save_dots([panels], path, title=title, xlabel="tokens a second")


def _points(group: Sequence[Measured], batching: str) -> list[Point]:
    found = []
    for each in group:
        tokens = each.case["tokens"]
        for (variant, _), row in each.rows.items():
            own, attention = split_variant(variant)
            if own != batching or "@" in attention:
                continue
            if row.status != "ok":
                found.append(Point(attention, tokens, status=row.status))
                continue
            # The slowest step has the fewest tokens a second.
            rates = {at: tokens / (row.measures[f"ms_{at}"] / 1e3) for at in ("p20", "p50", "p80")}
            point = Point(attention, tokens, rates["p50"], rates["p80"], rates["p20"])
            found.append(point)
    return found
