"""The picture of a comparison: speed against error, a panel a model, drawn from rows alone."""

from __future__ import annotations

import math
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexvarlen.equivalence.report import PEER, Report, Row, display_name
from flexvarlen.plotstyle import UNSUPPORTED, style_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

PANEL_INCHES = (5.4, 4.3)
TITLE_INCHES, LEGEND_INCHES, NOTE_INCHES, MARGIN_INCHES = 0.6, 0.25, 0.17, 0.12
NOTE_CHARACTERS = 92  # that fit under a panel
INK, PALE, GRID = "#222222", "#6B6B6B", "#E4E4E4"
BAND, BAND_INK, LEAK = "#E3F1E6", "#3F7A4C", "#B3261E"


def draw(report: Report, file: Path) -> None:
    """Write the PNG."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    models = report.models()
    count = len(models)
    notes = _notes(report, count)
    handles = _handles(report)
    in_a_row = 3 * count
    head = TITLE_INCHES + LEGEND_INCHES * math.ceil(len(handles) / in_a_row)
    foot = NOTE_INCHES * len(notes) + MARGIN_INCHES
    width, height = PANEL_INCHES[0] * count, PANEL_INCHES[1] + head + foot
    settings: Any = {"font.size": 9, "axes.edgecolor": "#A0A0A0", "axes.linewidth": 0.8}
    with mpl.rc_context(settings):
        figure = Figure(figsize=(width, height))
        FigureCanvasAgg(figure)
        figure.set_layout_engine(
            "constrained",
            w_pad=MARGIN_INCHES,
            rect=(0, foot / height, 1, 1 - (head + foot) / height),
        )
        panels = figure.subplots(1, count, squeeze=False, sharey=True)[0]
        for axes, (model, rows) in zip(panels, models.items(), strict=True):
            _panel(axes, model, rows)
        _speed_axis(panels[0], report)
        left, top = MARGIN_INCHES / width, 1 - MARGIN_INCHES / height
        figure.text(left, top, _title(report.rows), fontsize=11, color=INK, va="top")
        figure.legend(
            handles=handles,
            loc="upper left",
            bbox_to_anchor=(left, 1 - TITLE_INCHES / height),
            ncols=in_a_row,
            borderaxespad=0,
            borderpad=0,
            handletextpad=0.3,
            frameon=False,
        )
        bottom = MARGIN_INCHES / height
        figure.text(left, bottom, "\n".join(notes), fontsize=8, color=PALE, linespacing=1.35)
        figure.savefig(file, dpi=170, facecolor="white")


def _title(rows: tuple[Row, ...]) -> str:
    row = rows[0]
    machine = row.environment.get("gpu") or f"CPU, {row.environment.get('cpu_threads')} threads"
    mode = "torch.compile" if any(row.compiled for row in rows) else "eager"
    return f"Packed rows: speed against error\n{row.dtype} · {row.passes} · {mode} · {machine}"


def _panel(axes: Axes, model: str, rows: list[Row]) -> None:
    drawn = [row for row in rows if row.tokens_per_s is not None and _error(row) is not None]
    axes.set_title(
        f"{model}   {rows[0].tokens:,} tokens, {rows[0].documents} documents",
        fontsize=9.5,
        loc="left",
    )
    axes.set_xlabel("largest error of the logits, against each document alone in fp64")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.grid(True, color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    _error_axis(axes, rows, drawn)
    for row in drawn:
        _point(axes, row)


def _error(row: Row) -> float | None:
    """A finite positive error, or None: nothing else has a place on a log axis."""
    error = row.logits_max
    return error if error is not None and math.isfinite(error) and error > 0 else None


def _speed_axis(axes: Axes, report: Report) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_ylabel("tokens per second")
    speeds = [row.tokens_per_s for row in report.rows if row.tokens_per_s]
    if speeds:
        axes.set_ylim(min(speeds) / 1.6, max(speeds) * 1.6)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=12))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.yaxis.set_minor_locator(NullLocator())


def _error_axis(axes: Axes, rows: list[Row], drawn: list[Row]) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    limit = next((row.logits_limit for row in rows if row.logits_limit), None)
    errors = [error for row in drawn if (error := _error(row)) is not None]
    errors += [limit] if limit else []
    if errors:
        axes.set_xlim(min(errors) / 8, max(errors) * 8)
    axes.xaxis.set_major_locator(LogLocator(numticks=9))
    axes.xaxis.set_minor_locator(NullLocator())
    if limit:
        axes.axvspan(axes.get_xlim()[0], limit, color=BAND, zorder=0)
        axes.annotate(
            "right: within 2 ×\nthe error of each\ndocument alone",
            (limit, 0.0),
            xycoords=axes.get_xaxis_transform(),
            xytext=(5, 5),
            textcoords="offset points",
            va="bottom",
            fontsize=8,
            color=BAND_INK,
        )


def _point(axes: Axes, row: Row) -> None:
    x, speed = _error(row), row.tokens_per_s
    assert x is not None
    assert speed is not None
    if row.ms_p20 and row.ms_p80:
        spread = [row.tokens / row.ms_p80 * 1e3, row.tokens / row.ms_p20 * 1e3]
        axes.plot([x, x], spread, color=style_of(row.backend).color, linewidth=1.4, zorder=2)
    axes.plot([x], [speed], zorder=3, markersize=9, markeredgewidth=1.5, **_look(row.backend))
    text, color = "", PALE
    if row.verdict in ("leaks", "wrong"):
        color = LEAK
        text = (
            f"leaks: {row.leaked_documents} of {row.documents}"
            if row.verdict == "leaks"
            else "wrong"
        )
    elif row.status == "forward only":
        text = "forward only"
    if text:
        far_right = x > math.sqrt(axes.get_xlim()[0] * axes.get_xlim()[1])
        axes.annotate(
            text,
            (x, speed),
            xytext=(-9 if far_right else 9, 0),
            textcoords="offset points",
            ha="right" if far_right else "left",
            va="center",
            fontsize=7,
            color=color,
        )


def _look(backend: str) -> dict[str, Any]:
    """Marker only: a point is no line."""
    return style_of(backend).line() | {"linestyle": "none"}


def _notes(report: Report, panels: int) -> list[str]:
    """What has no point, and why; once for all models that share the reason."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in report.rows:
        if row.tokens_per_s is None or _error(row) is None:
            why = row.reason or row.why or "its error has no place on this axis."
            found.setdefault((display_name(row.backend), why), []).append(row.model)
    lines = []
    for (name, why), models in found.items():
        where = "" if len(models) == len(report.models()) else f" ({', '.join(models)})"
        lines += textwrap.wrap(
            f"×  {name}{where}: {why.removeprefix(name).strip()}",
            NOTE_CHARACTERS * panels,
            subsequent_indent="    ",
            max_lines=2,
            placeholder=" …",
        )
    return lines


def _handles(report: Report) -> list[Line2D]:
    from matplotlib.lines import Line2D

    ran = {row.backend for row in report.rows if row.tokens_per_s is not None}
    handles = []
    for name in dict.fromkeys(row.backend for row in report.rows):
        look = _look(name) if name in ran else UNSUPPORTED.line()
        label = display_name(name)
        label += "" if name in ran else ": not here"
        handles.append(Line2D([], [], markersize=7, markeredgewidth=1.4, label=label, **look))
    # The peer's own row comes first, as in the tables.
    return sorted(handles, key=lambda handle: handle.get_label() != display_name(PEER))
