"""What all plots of a drift share: a panel as SVG, a log axis with a place for zero, styles."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flexvarlen.plotstyle import STYLES, Style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PANEL_INCHES = (7.2, 4.0)
LEGEND_CHARACTERS = 32  # of a label, three of which stand side by side
GRID, BAND, BAND_INK, INK, PALE = "#E4E4E4", "#E3F1E6", "#3F7A4C", "#222222", "#6B6B6B"

_OWN = {
    "unpacked": Style("#000000", "d"),
    "rounding": Style("#444444", ".", linestyle=":"),
}
"""What drift compares beside backends."""


@dataclass(frozen=True)
class Picture:
    """A plot.

    Attributes:
        title: what it shows.
        alt: the same for who cannot see it, with its main numbers.
        svg: the drawing, with neither a date nor a path in it.
    """

    title: str
    alt: str
    svg: bytes


@contextmanager
def panel(made: list[Picture], title: str, alt: str) -> Iterator[Axes]:
    """Axes to draw on; afterwards the picture is in the list."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    # Salt and no date: the same rows give the same bytes.
    settings: Any = {"font.size": 9, "svg.hashsalt": "flexvarlen", "axes.edgecolor": "#A0A0A0"}
    with mpl.rc_context(settings):
        figure = Figure(figsize=PANEL_INCHES, layout="constrained")
        axes = figure.subplots()
        axes.set_title(title, fontsize=9.5, loc="left", color=INK)
        axes.grid(True, color=GRID, linewidth=0.7)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        yield axes
        handles, labels = axes.get_legend_handles_labels()
        if handles:
            columns = 3 if max(map(len, labels)) <= LEGEND_CHARACTERS else 2
            place: Any = {"loc": "outside lower left", "ncols": columns, "fontsize": 8}
            figure.legend(handles, labels, frameon=False, **place)
        drawn = io.BytesIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None, "Creator": None})
    made.append(Picture(title, alt, drawn.getvalue()))


def style_for(name: str) -> Style:
    """A backend's style everywhere; grey for a name that has none."""
    short = name.partition("@")[0]
    return _OWN.get(short) or STYLES.get(short) or Style(PALE, ".")


def finite(values: Sequence[float | None]) -> list[float]:
    """Those that have a place on a log axis."""
    return [v for v in values if v is not None and math.isfinite(v) and v > 0]


def finite_or_gap(value: float | None) -> float:
    """NaN, where matplotlib leaves a gap, for all that is not finite."""
    return value if value is not None and math.isfinite(value) else math.nan


def log_axis(axes: Axes, values: Sequence[float | None]) -> Callable[[float | None], float]:
    """Make y logarithmic over these values; returns where to draw each.

    Zero has no place on a log axis, and is what one hopes for: it gets a line below all others.
    """
    positive = finite(values) or [1.0]
    low, high = min(positive), max(positive)
    zero = 10.0 ** (math.floor(math.log10(low)) - 1)
    axes.set_yscale("log")
    has_zero = any(value == 0 for value in values)
    axes.set_ylim(zero / 2 if has_zero else low / 2, high * 2)
    if has_zero:
        axes.axhline(zero, color="#A0A0A0", linewidth=0.8, linestyle=":")
        axes.annotate(
            "exactly 0",
            (1.0, zero),
            xycoords=axes.get_yaxis_transform(),
            ha="right",
            va="bottom",
            fontsize=7,
            color=PALE,
        )

    def place(value: float | None) -> float:
        return zero if value == 0 else finite_or_gap(value)

    return place
