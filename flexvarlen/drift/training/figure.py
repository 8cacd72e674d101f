"""The plot of a training drift: losses by step, in the band of the seed's noise."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flexvarlen.drift.report.drawing import BAND, finite_or_gap, style_for
from flexvarlen.drift.training.tables import verdict_of, what
from flexvarlen.drift.training.verdict import BAND_SIGMAS
from flexvarlen.rows import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def losses_title(runs: Sequence[Row]) -> str:
    """What is drawn."""
    return f"Training losses: {what(runs)}"


def losses_alt(runs: Sequence[Row]) -> str:
    """The numbers of the plot in words."""
    row = verdict_of(runs)
    found = {} if row is None else row.measures["variants"]
    each = [f"{name} {entry['verdict']}" for name, entry in found.items()]
    return f"Loss by step of each run, with the band over the baseline's seeds. {', '.join(each)}."


def draw_losses(axes: Axes, runs: Sequence[Row]) -> None:
    """The band of the baseline's seeds (mean and 2σ at each step), then a line a variant."""
    ran = [row for row in runs if "losses" in row.measures]
    if not ran:
        return
    baseline = ran[0].measures["baseline"]
    noise = [_losses(row) for row in ran if row.case["variant"] == baseline]
    if len(noise) > 1:
        means = [statistics.fmean(step) for step in zip(*noise, strict=True)]
        sigmas = [BAND_SIGMAS * _deviation(step) for step in zip(*noise, strict=True)]
        axes.fill_between(
            range(len(means)),
            [mean - sigma for mean, sigma in zip(means, sigmas, strict=True)],
            [mean + sigma for mean, sigma in zip(means, sigmas, strict=True)],
            color=BAND,
            label=f"{baseline}: mean ± {BAND_SIGMAS:g}σ, {len(noise)} seeds",
        )
    first = ran[0].case["seed"]
    shown = [row for row in ran if row.case["seed"] == first]
    for depth, row in enumerate(shown):  # lines that lie on one another: the first is the widest
        name = row.case["variant"]
        look: dict[str, Any] = style_for(name).line() | {"marker": "none"}
        width = 1.2 + 1.1 * (len(shown) - 1 - depth)
        axes.plot(_losses(row), linewidth=width, label=f"{name}, seed {first}", **look)
    axes.locator_params(axis="x", integer=True)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")


def _deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if all(map(math.isfinite, values)) else math.nan


def _losses(row: Row) -> list[float]:
    return [finite_or_gap(loss) for loss in row.measures["losses"]]
