"""The plots of a drift, as SVG, from rows alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from flexvarlen.drift.grid import nan_last
from flexvarlen.drift.report.drawing import (
    BAND,
    BAND_INK,
    Picture,
    finite,
    finite_or_gap,
    log_axis,
    panel,
    style_for,
)
from flexvarlen.drift.report.verdicts import BACKWARD, FORWARD, IN_WORDS, groups, suite_rows
from flexvarlen.drift.training.figure import draw_losses, losses_alt, losses_title
from flexvarlen.drift.training.tables import comparisons
from flexvarlen.rows import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# As the comparisons of one backend are told apart.
_DASHES: dict[str, Any] = {
    "packed-alone": "-",
    "packed-padded": "--",
    "backend-backend": ":",
    "eager-compiled": "-.",
    "dtype": (0, (5, 1, 1, 1, 1, 1)),
}
_PARTS = {"attention": "#D55E00", "matmuls": "#0072B2", "norms": "#009E73"}


def pictures(rows: Sequence[Row]) -> list[Picture]:
    """All plots that the rows have numbers for."""
    return [*_errors(rows), *_layers(rows), *_histograms(rows), *_shares(rows), *_losses(rows)]


# ---- error against fp64 ----


def _errors(rows: Sequence[Row]) -> list[Picture]:
    """A panel a dtype: a point a backend and case, over the parts; the band is what is allowed."""
    made: list[Picture] = []
    exact = [row for row in suite_rows(rows, "drift-op") if row.case["comparison"] == "exact"]
    for (dtype,), own in groups(exact, "dtype").items():
        parts = [p for p in (*FORWARD, *BACKWARD) if any(f"ratio_{p}" in r.measures for r in own)]
        if not parts:
            continue
        title = f"Error against fp64, as a share of what is allowed, {dtype}"
        with panel(made, title, _errors_alt(dtype, own, parts)) as axes:
            values = [row.measures.get(f"ratio_{part}") for row in own for part in parts]
            place = log_axis(axes, [*values, 1.0])
            axes.axhspan(axes.get_ylim()[0], 1.0, color=BAND, zorder=0)
            axes.axhline(1.0, color=BAND_INK, linewidth=1)
            axes.annotate(
                "right: within 2 × plain attention's error in this dtype (3 × for gradients)",
                (0.01, 1.0),
                xycoords=axes.get_yaxis_transform(),
                xytext=(0, -3),
                textcoords="offset points",
                va="top",
                fontsize=8,
                color=BAND_INK,
            )
            _dodged(axes, own, parts, place)
            axes.set_xticks(range(len(parts)), parts)
            axes.set_ylabel("error / allowed error")
    return made


def _dodged(
    axes: Axes, rows: list[Row], parts: list[str], place: Callable[[float | None], float]
) -> None:
    backends = groups(rows, "backend")
    for number, ((backend,), own) in enumerate(backends.items()):
        shift = (number - (len(backends) - 1) / 2) * 0.7 / max(1, len(backends))
        points = [
            (index + shift, place(row.measures[f"ratio_{part}"]))
            for index, part in enumerate(parts)
            for row in own
            if f"ratio_{part}" in row.measures
        ]
        if points:
            look: dict[str, Any] = style_for(str(backend)).line() | {"linestyle": "none"}
            axes.plot(*zip(*points, strict=True), markersize=5, label=str(backend), **look)


def _errors_alt(dtype: str, rows: list[Row], parts: list[str]) -> str:
    each = []
    for (backend,), own in groups(rows, "backend").items():
        ratios = [
            row.measures[f"ratio_{p}"] for row in own for p in parts if f"ratio_{p}" in row.measures
        ]
        if ratios:
            each.append(f"{backend} at most {max(ratios, key=nan_last):.2g}")
    return f"Largest error over allowed error of each backend in {dtype}: {', '.join(each)}."


# ---- drift by layer ----


def _layers(rows: Sequence[Row]) -> list[Picture]:
    made: list[Picture] = []
    layers = [
        row
        for row in suite_rows(rows, "drift-model")
        if row.case["scope"] == "layer" and row.status == "ok"
    ]
    for (model, comparison), own in groups(layers, "model", "comparison").items():
        lines = groups(own, "backend", "other", "dtype")
        title = f"Drift by layer: {model}, {IN_WORDS.get(str(comparison), comparison)}"
        last = [f"{_line_name(key)} {_by_layer(line)[-1][1]:.1e}" for key, line in lines.items()]
        alt = f"Relative difference of hidden states after the last block: {', '.join(last)}."
        with panel(made, title, alt) as axes:
            place = log_axis(axes, [row.measures["hidden_relative"] for row in own])
            for key, line in lines.items():
                points = [(index, place(value)) for index, value in _by_layer(line)]
                look: dict[str, Any] = style_for(str(key[0])).line()
                look["linestyle"] = _DASHES.get(str(comparison), "-")
                axes.plot(*zip(*points, strict=True), markersize=4, label=_line_name(key), **look)
            axes.set_xlabel("block (-1: the embeddings)")
            axes.set_ylabel("relative difference of hidden states")
            axes.locator_params(axis="x", integer=True)
    return made


def _by_layer(rows: list[Row]) -> list[tuple[int, float]]:
    return sorted((row.case["index"], row.measures["hidden_relative"]) for row in rows)


def _line_name(key: tuple[Any, ...]) -> str:
    backend, other, dtype = key
    return f"{backend}, {dtype}" if other is None else f"{backend} / {other}, {dtype}"


# ---- log-probabilities ----


def _histograms(rows: Sequence[Row]) -> list[Picture]:
    made: list[Picture] = []
    whole = [
        row
        for row in suite_rows(rows, "drift-model")
        if row.case["scope"] == "batch" and "logprob_histogram" in row.measures
    ]
    for (model, comparison), own in groups(whole, "model", "comparison").items():
        title = f"Labels' log-probabilities: {model}, {IN_WORDS.get(str(comparison), comparison)}"
        said = [f"{row.case['backend']} {_zeros(row):.1%}" for row in own]
        alt = f"Histogram of signed differences; share of tokens exactly 0: {', '.join(said)}."
        with panel(made, title, alt) as axes:
            for row in own:
                _stairs(axes, row)
            edge = _smallest_edge(own)
            axes.set_xscale("symlog", linthresh=edge, linscale=0.5)
            powers = range(round(math.log10(edge)) + 2, 3, 3)  # the smallest would hide the 0
            axes.set_xticks([sign * 10.0**power for sign in (-1, 1) for power in powers] + [0])
            axes.set_xlabel("difference of log-probability (tokens at exactly 0 are in the legend)")
            axes.set_ylabel("share of tokens")
    return made


def _stairs(axes: Axes, row: Row) -> None:
    found = row.measures["logprob_histogram"]
    total = max(1, sum(found["counts"]) + found["zeros"])
    style = style_for(row.case["backend"])
    key = (row.case["backend"], row.case.get("other"), row.case["dtype"])
    axes.stairs(
        [count / total for count in found["counts"]],
        found["edges"],
        color=style.color,
        linestyle=style.linestyle,
        linewidth=1.4,
        label=f"{_line_name(key)}: {_zeros(row):.1%} exactly 0",
    )


def _zeros(row: Row) -> float:
    found = row.measures["logprob_histogram"]
    return float(found["zeros"] / max(1, sum(found["counts"]) + found["zeros"]))


def _smallest_edge(rows: list[Row]) -> float:
    edges = [edge for row in rows for edge in row.measures["logprob_histogram"]["edges"]]
    return min(finite(edges), default=1e-8)


# ---- attribution ----


def _shares(rows: Sequence[Row]) -> list[Picture]:
    made: list[Picture] = []
    shares = [
        row
        for row in suite_rows(rows, "drift-attribution")
        if row.case["what"] in _PARTS and row.measures.get("share") is not None
    ]
    for (model, dtype), own in groups(shares, "model", "dtype").items():
        backends = list(dict.fromkeys(row.case["backend"] for row in own))
        said = [f"{r.case['backend']} {r.case['what']} {r.measures['share']:.0%}" for r in own]
        title = f"Whose drift is it? {model}, {dtype}"
        with panel(made, title, f"Share of the logits' drift: {', '.join(said)}.") as axes:
            for number, (what, color) in enumerate(_PARTS.items()):
                bars = [row for row in own if row.case["what"] == what]
                places = [backends.index(r.case["backend"]) + (number - 1) * 0.27 for r in bars]
                heights = [finite_or_gap(row.measures["share"]) for row in bars]
                drawn = axes.bar(places, heights, 0.25, color=color, label=f"{what} alone")
                axes.bar_label(drawn, [f"{height:.0%}" for height in heights], fontsize=7)
            axes.set_xticks(range(len(backends)), backends)
            axes.set_ylabel("drift of logits, share of all")
    return made


# ---- training ----


def _losses(rows: Sequence[Row]) -> list[Picture]:
    made: list[Picture] = []
    for runs in comparisons(rows):
        with panel(made, losses_title(runs), losses_alt(runs)) as axes:
            draw_losses(axes, runs)
    return made
