"""The figure of trainings: losses in the band of the padded seeds, and tokens a second."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flexvarlen.bench.series_figure import figure_path, save_figure
from flexvarlen.bench.training.convergence_tables import (
    PADDED,
    UNPATCHED,
    Judged,
    groups_of,
    judged,
    title_of,
)
from flexvarlen.drift.training.verdict import BAND_SIGMAS
from flexvarlen.plotstyle import Style, style_of
from flexvarlen.rows import Row

SMOOTHED_STEPS = 10  # of the running mean: rows differ more than steps
OWN_STYLES = {
    PADDED: Style("#666666", "o", filled=False, linestyle="--"),
    UNPATCHED: Style("#BBBBBB", "x", filled=False, linestyle=":"),
}


def convergence_figures(rows: Sequence[Row], folder: Path) -> list[Path]:
    """A figure of each group that has a run."""
    import matplotlib as mpl

    mpl.use("Agg")
    drawn = []
    for group in groups_of(rows):
        found = [each for each in judged(group) if each.runs]
        if not found:
            continue
        case = group[0].case
        name = f"convergence-{case['steps']}-{case['dtype']}-{case['mode']}"
        drawn.append(figure_path(folder, name, group))
        _draw(found, title_of(group), drawn[-1])
    return drawn


def _draw(found: Sequence[Judged], title: str, path: Path) -> None:
    from matplotlib import pyplot

    figure, (losses, rates) = pyplot.subplots(
        1, 2, figsize=(12, 5), layout="constrained", width_ratios=(3, 2)
    )
    for depth, each in enumerate(found):
        curves = [running_mean(row.measures["losses"]) for row in each.runs.values()]
        means = [statistics.fmean(step) for step in zip(*curves, strict=True)]
        style = _style(each.variant)
        if each.variant == PADDED and len(curves) > 1:
            sigmas = [BAND_SIGMAS * _deviation(step) for step in zip(*curves, strict=True)]
            losses.fill_between(
                range(1, len(means) + 1),
                [mean - sigma for mean, sigma in zip(means, sigmas, strict=True)],
                [mean + sigma for mean, sigma in zip(means, sigmas, strict=True)],
                color="#DDDDDD",
                label=f"{PADDED}: mean ± {BAND_SIGMAS:g}σ, {len(curves)} seeds",
            )
        # Lines that lie on one another: the first is the widest.
        width = 1.2 + 0.8 * (len(found) - 1 - depth)
        line: dict[str, Any] = {**style.line(), "marker": "none", "linewidth": width}
        losses.plot(
            range(1, len(means) + 1), means, label=f"{each.variant}: {each.verdict}", **line
        )
    losses.set_xlabel("step")
    losses.set_ylabel(f"loss, mean over seeds and {SMOOTHED_STEPS} steps")
    losses.legend(fontsize=8, frameon=False)
    losses.grid(alpha=0.3)

    for height, each in enumerate(reversed(found)):
        values = [row.measures["tokens_per_s"] for row in each.runs.values()]
        middle, style = statistics.median(values), _style(each.variant)
        rates.barh(height, middle, color=style.color, alpha=0.8 if style.filled else 0.4)
        rates.hlines(height, min(values), max(values), color="black", linewidth=2)
        at = (max(values), height)
        rates.annotate(f"{middle:,.0f}", at, (5, -3), textcoords="offset points")
    rates.set_yticks(range(len(found)), [each.variant for each in reversed(found)])
    rates.set_xlabel("documents' tokens a second: median, and all seeds")
    rates.margins(x=0.2)
    rates.grid(axis="x", alpha=0.3)
    figure.suptitle(title.replace("; ", "\n", 1), fontsize=11)
    save_figure(figure, path)


def running_mean(losses: Sequence[float], count: int = SMOOTHED_STEPS) -> list[float]:
    """Of the last `count` values, fewer at the start.

    >>> running_mean([1.0, 3.0, 5.0], 2)
    [1.0, 2.0, 4.0]
    """
    return [
        statistics.fmean(losses[max(0, end - count) : end]) for end in range(1, len(losses) + 1)
    ]


def _style(variant: str) -> Style:
    return OWN_STYLES.get(variant) or style_of(variant)


def _deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if all(map(math.isfinite, values)) else math.nan
