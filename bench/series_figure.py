"""Figures of variants over a size: a line each, its p20–p80 band; what has no time is marked.

And where any suite's figure is saved: `figure_path`, `save_figure`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import Any

from flexvarlen.bench.attention.kernels_tables import where_of
from flexvarlen.plotstyle import style_of
from flexvarlen.rows import Row

# Of the marks of what has no time, in heights of the axes: the lowest, from one to the next.
MARKS, MARK_STEP = 0.03, 0.045
NO_TIME = {"oom": "$\\mathrm{M}$"}  # markers by status; all others are crosses
CROSS, GREY = "x", "#666666"
NARROW = 4  # an axis whose one end is less than so many times the other
TITLE_CHARACTERS = 14  # an inch, in the titles' size


@dataclass(frozen=True)
class Point:
    """One variant at one size.

    Attributes:
        x, y: where it stands; y None: it has no time, and `status` says why.
        low, high: of its band.
    """

    variant: str
    x: float
    y: float | None = None
    low: float | None = None
    high: float | None = None
    status: str = "ok"


@dataclass(frozen=True)
class Panel:
    """Axes of a figure: the lines in it, its title and the label of y."""

    title: str
    ylabel: str
    points: Sequence[Point]

    def of(self, variant: str) -> list[Point]:
        return sorted((p for p in self.points if p.variant == variant), key=lambda p: p.x)


def machine_of(rows: Sequence[Row]) -> str:
    """The GPU's name, or the device's: for a title and a file."""
    where = rows[0].environment
    return str(where.get("gpu") or where.get("device") or "unknown")


def figure_path(folder: Path, name: str, rows: Sequence[Row]) -> Path:
    """The file of a machine's figure."""
    machine = machine_of(rows).lower().replace("/", " ").split()
    return folder / f"{'-'.join([name, *machine])}.png"


def save_figure(figure: Any, path: Path) -> Path:
    """Write a figure and close it; returns the file, a PNG."""
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path


def runs_of(rows: Iterable[Row]) -> str:
    """Machine, versions and commit of each run, a line each."""
    return "\n".join(dict.fromkeys(where_of(row) for row in rows))


def save_lines(grid: Sequence[Sequence[Panel]], path: Path, *, title: str, xlabel: str) -> Path:
    """Panels of lines over a log2 axis; y is log2 too, and shared by a line of panels.

    Args:
        grid: lines of panels, equally many each.
        title: what is shown, its dtype and machine.
        xlabel: of the tokens.

    Returns:
        The file, a PNG.
    """
    pyplot = _pyplot()
    figure, every = pyplot.subplots(
        len(grid),
        len(grid[0]),
        figsize=(4.2 * len(grid[0]) + 1, 3.1 * len(grid) + 1.6),
        sharex=True,
        sharey="row",
        squeeze=False,
        layout="constrained",
    )
    variants = variants_of(panel for line in grid for panel in line)
    for axes_line, panels in zip(every, grid, strict=True):
        for axes, panel in zip(axes_line, panels, strict=True):
            _draw(axes, panel, variants)
            if panels is grid[-1]:
                axes.set_xlabel(xlabel, fontsize=9)
        axes_line[0].set_ylabel(panels[0].ylabel, fontsize=9)
    _legend(figure, variants)
    _title(figure, title)
    return save_figure(figure, path)


def save_dots(grid: Sequence[Sequence[Panel]], path: Path, *, title: str, xlabel: str) -> Path:
    """Panels of one size: a line a variant, its median with p20 to p80 along a log2 axis.

    Args:
        grid: lines of panels, equally many each; of a `Point` y, low and high count.
        title, xlabel: as in `save_lines`.

    Returns:
        The file, a PNG.
    """
    pyplot = _pyplot()
    variants = variants_of(panel for line in grid for panel in line)
    figure, every = pyplot.subplots(
        len(grid),
        len(grid[0]),
        figsize=(3.2 * len(grid[0]) + 1.5, (0.24 * len(variants) + 0.8) * len(grid) + 1.4),
        sharex=True,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for axes_line, panels in zip(every, grid, strict=True):
        for axes, panel in zip(axes_line, panels, strict=True):
            _draw_dots(axes, panel, variants)
            axes.set_title(panel.title, fontsize=9)
            axes.tick_params(labelsize=8)
            if panels is grid[-1]:
                axes.set_xlabel(xlabel, fontsize=9)
    if any(point.y is not None for line in grid for panel in line for point in panel.points):
        _log2(every[0][0].xaxis, every[0][0].set_xscale)
    every[0][0].set_yticks(range(len(variants)), variants)
    every[0][0].set_ylim(len(variants) - 0.5, -0.5)
    _legend(figure, [])
    _title(figure, title)
    return save_figure(figure, path)


def _draw_dots(axes: Any, panel: Panel, variants: Sequence[str]) -> None:
    for place, name in enumerate(variants):
        line = style_of(name).line() | {"linestyle": "none"}
        for point in panel.of(name):
            if point.y is None:
                marker = NO_TIME.get(point.status, CROSS)
                mark = {"marker": marker, "color": line["color"], "linestyle": "none"}
                axes.plot([0.03], [place], transform=axes.get_yaxis_transform(), **mark)
            else:
                axes.plot([point.low, point.high], [place, place], color=line["color"])
                axes.plot([point.y], [place], markersize=6, **line)
    axes.margins(x=0.15)
    axes.grid(which="major", alpha=0.3)


def variants_of(panels: Iterable[Panel]) -> list[str]:
    """In the order of the points."""
    return list(dict.fromkeys(point.variant for panel in panels for point in panel.points))


def _pyplot() -> Any:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _draw(axes: Any, panel: Panel, variants: Sequence[str]) -> None:
    untimed = [name for name in variants if any(p.y is None for p in panel.of(name))]
    for name in variants:
        style, points = style_of(name), panel.of(name)
        done = [point for point in points if point.y is not None]
        if done:
            x = [point.x for point in done]
            axes.plot(x, [point.y for point in done], markersize=5, **style.line())
            banded = [p for p in done if p.low is not None and p.high is not None]
            low, high = [p.low for p in banded], [p.high for p in banded]
            at = [p.x for p in banded]
            axes.fill_between(at, low, high, color=style.color, alpha=0.2, linewidth=0)
        for point in points:
            if point.y is None:
                axes.plot(
                    [point.x],
                    [MARKS + MARK_STEP * untimed.index(name)],
                    transform=axes.get_xaxis_transform(),
                    marker=NO_TIME.get(point.status, CROSS),
                    linestyle="none",
                    color=style.color,
                    markersize=5,
                )
    sizes = {point.x for point in panel.points}
    if len(sizes) == 1:  # no range to scale by
        axes.set_xlim(min(sizes) / 2, max(sizes) * 2)
    _log2(axes.xaxis, axes.set_xscale)
    if any(point.y is not None for point in panel.points):
        _log2(axes.yaxis, axes.set_yscale)
    else:
        said = "nothing was timed"
        axes.text(0.5, 0.5, said, ha="center", color=GREY, transform=axes.transAxes)
    axes.set_title(panel.title, fontsize=10)
    axes.tick_params(axis="x", labelrotation=35, labelsize=8)
    axes.grid(which="major", alpha=0.3)
    axes.margins(y=0.12)


def _log2(axis: Any, set_scale: Any) -> None:
    from matplotlib import ticker

    set_scale("log", base=2)
    low, high = axis.get_view_interval()
    if high < NARROW * low:  # powers of two alone would be one or two
        axis.set_major_locator(ticker.LogLocator(base=2, subs=(1, 1.25, 1.5, 1.75)))
    shown = ticker.FuncFormatter(lambda x, _: f"{x:,.0f}" if x >= 1 else f"{x:.2g}")
    axis.set_major_formatter(shown)


def _title(figure: Any, title: str) -> None:
    """Each of its lines as many as the figure's width needs."""
    width = int(TITLE_CHARACTERS * figure.get_figwidth())
    lines = (part for line in title.splitlines() for part in wrap(line, width))
    figure.suptitle("\n".join(lines), fontsize=10)


def _legend(figure: Any, variants: Sequence[str]) -> None:
    from matplotlib.lines import Line2D

    handles = []
    for name in variants:
        line: dict[str, Any] = dict(style_of(name).line())
        handles.append(Line2D([], [], label=name, **line))
    for marker, label in ((CROSS, "no time: refused, wrong, …"), (NO_TIME["oom"], "out of memory")):
        handles.append(Line2D([], [], label=label, linestyle="none", marker=marker, color=GREY))
    figure.legend(handles=handles, loc="outside lower center", ncols=6, frameon=False, fontsize=8)
