"""Charts: bars and lines in one style, with one colour and one marker for each backend.

Our backends have saturated colours and solid lines. transformers' own have the pale colour and the
marker of the kernel that they share with ours, hollow and dashed; so have a kernel called directly
("raw:", dotted) and its fixed-length form ("fixed:", dashed). The hues are the Okabe-Ito set, which
is readable with any kind of colour vision. matplotlib is imported where something is drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LEGEND: dict[str, Any] = {
    "fontsize": 8,
    "frameon": False,
    "loc": "upper left",
    "bbox_to_anchor": (1, 1),
}
"""Places a legend right of its axes."""
WIDTH_PX = 800
"""The width at which pages show a chart; files have twice as many pixels."""
_DPI = 100


@dataclass(frozen=True)
class Style:
    """How one variant is drawn; the names are matplotlib's."""

    color: str
    marker: str
    filled: bool = True
    linestyle: str = "-"

    def line(self) -> dict[str, Any]:
        """Keyword arguments for `Axes.plot`."""
        face = self.color if self.filled else "white"
        return {
            "color": self.color,
            "marker": self.marker,
            "markerfacecolor": face,
            "markeredgecolor": self.color,
            "linestyle": self.linestyle,
        }


STYLES: dict[str, Style] = {
    "reference": Style("#000000", "*"),
    "sdpa": Style("#999999", "o"),
    "flex": Style("#D55E00", "s"),
    "varlen": Style("#009E73", "^"),
    "fa2": Style("#0072B2", "D"),
    "fa3": Style("#56B4E9", "P"),
    "fa4": Style("#CC79A7", "X"),
    "flex_fa4": Style("#E69F00", "p"),
    "nested": Style("#B8A800", "v"),
    "cudnn": Style("#7F5539", "<"),
    "auto": Style("#7A4EAB", "h"),
    "transformers:eager": Style("#444444", "*", filled=False, linestyle="--"),
    "transformers:sdpa": Style("#BBBBBB", "o", filled=False, linestyle="--"),
    "transformers:flex_attention": Style("#F0A878", "s", filled=False, linestyle="--"),
    "transformers:flash_attention_2": Style("#80B5D8", "D", filled=False, linestyle="--"),
    "transformers:flash_attention_3": Style("#ABDAF4", "P", filled=False, linestyle="--"),
    "transformers:flash_attention_4": Style("#E5BBD2", "X", filled=False, linestyle="--"),
    "standard": Style("#000000", ">", filled=False, linestyle="-."),
    "eager": Style("#444444", "*", filled=False, linestyle="--"),
    "sdpa:default": Style("#666666", "o", filled=False, linestyle="--"),
    "sdpa:flash": Style("#009E73", "^", filled=False, linestyle="--"),
    "sdpa:efficient": Style("#882255", "v", filled=False, linestyle="--"),
    "sdpa:cudnn": Style("#7F5539", "<", filled=False, linestyle="--"),
    "sdpa:math": Style("#332288", "s", filled=False, linestyle="--"),
    "padded": Style("#999999", "o", linestyle="--"),
    "padded-sorted": Style("#666666", "^", linestyle="--"),
    "serial": Style("#222222", "x", linestyle=":"),
    "unpatched": Style("#C0392B", "x", linestyle="--"),
    "padded:masked": Style("#666666", "o", filled=False, linestyle="--"),
    "padded:unmasked": Style("#AAAAAA", "o", filled=False, linestyle=":"),
}

LINES_OF_FORMS = {"raw": ":", "fixed": "--"}
"""Prefixes of a backend's kernel: called directly; in its fixed-length form."""


def style_of(variant: str) -> Style:
    """The style of a variant; what follows an "@" (where boundaries come from) has no say.

    >>> style_of("flex@position_ids") == STYLES["flex"]
    True
    >>> style_of("raw:fa2")
    Style(color='#0072B2', marker='D', filled=False, linestyle=':')

    Raises:
        ValueError: the name has no style yet.
    """
    name = variant.partition("@")[0]
    form, _, backend = name.rpartition(":")
    if form in LINES_OF_FORMS and backend in STYLES:
        return replace(STYLES[backend], filled=False, linestyle=LINES_OF_FORMS[form])
    if name not in STYLES:
        known = ", ".join(STYLES)
        raise ValueError(
            f"variant must be one of {known}, got {variant!r}; give it a style in report/figure.py"
        )
    return STYLES[name]


def chart(
    title: str, caption: str, *, height_px: int = 400, panels: int = 1, share_y: bool = False
) -> tuple[Figure, list[Axes]]:
    """An empty chart of `WIDTH_PX`, with panels side by side.

    Args:
        title: the finding, in one sentence.
        caption: where the numbers come from: machine, versions, commit, what was not measured.
    """
    from matplotlib.figure import Figure

    label, title, caption = title, fill(title, 80), fill(caption, 138, break_on_hyphens=False)
    head, foot = 28 + 18 * title.count("\n"), 20 + 12 * caption.count("\n")
    figure = Figure(figsize=(WIDTH_PX / _DPI, height_px / _DPI), dpi=_DPI, layout="constrained")
    figure.set_label(label)
    figure.get_layout_engine().set(  # type: ignore[union-attr]
        rect=(0.005, foot / height_px, 0.99, 1 - (head + foot) / height_px)  # type: ignore[call-arg]
    )
    figure.text(0.01, 1 - 8 / height_px, title, size=11.5, weight="bold", va="top")
    figure.text(0.01, 6 / height_px, caption, size=7.5, color="#555555", va="bottom")
    axes = figure.subplots(1, panels, squeeze=False, sharey=share_y)[0]
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
        each.tick_params(labelsize=8.5)
        each.set_axisbelow(True)
    return figure, list(axes)


def bars(
    axes: Axes,
    values: Mapping[str, float],
    *,
    label: str,
    colors: Sequence[str] | None = None,
    texts: Sequence[str] | None = None,
) -> None:
    """Horizontal bars, the first on top, with the value written behind each.

    Args:
        values: length of each bar, by its name.
        label: what the length is, with the unit.
        colors: color of each bar; default: the backend's.
        texts: text after each bar; default: the value to three digits.
    """
    from flexvarlen.report.table import three_digits

    names, lengths = list(values), list(values.values())
    color = colors or [style_of(x).color for x in names]
    drawn = axes.barh(names, lengths, color=color)
    said = texts or [three_digits(x) for x in lengths]
    axes.bar_label(drawn, labels=list(said), padding=3, fontsize=8.5)
    axes.yaxis.set_inverted(True)
    axes.margins(x=0.15)
    axes.set_xlabel(label, size=8.5)
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.locator_params(axis="x", nbins=5)
    axes.tick_params(left=False)
    axes.spines["left"].set_visible(False)


def lines(
    axes: Axes,
    series: Mapping[str, Mapping[float, float]],
    *,
    x_label: str,
    y_label: str,
    log_x: bool = True,
    log_y: bool = False,
    labels: Mapping[str, str] | None = None,
    legend: bool = True,
) -> None:
    """A line for each variant; on a logarithmic x axis the ticks are the measured sizes (1K, 8K).

    Args:
        series: y by x, by variant.
        labels: labels in the legend, where they differ from the variant.
        legend: whether to draw a legend right of the axes.
    """
    ticks = sorted({x for points in series.values() for x in points})
    for name, points in series.items():
        xs = sorted(points)
        label = (labels or {}).get(name, name)
        axes.plot(xs, [points[x] for x in xs], label=label, markersize=4.5, **style_of(name).line())
    if log_x:
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [_in_k(x) for x in ticks])
        axes.minorticks_off()
    if log_y:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:,g}")
    elif all(y >= 0 for points in series.values() for y in points.values()):
        axes.set_ylim(bottom=0)
    axes.set_xlabel(x_label, size=8.5)
    axes.set_ylabel(y_label, size=8.5)
    axes.grid(color="#DDDDDD", linewidth=0.6)
    if legend and len(series) > 1:
        axes.legend(**LEGEND)


def save(figure: Figure, path: Path) -> Path:
    """Write the PNG at twice the resolution that it is shown at, its title inside; its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=2 * _DPI, metadata={"Title": str(figure.get_label())})
    return path


def _in_k(value: float) -> str:
    """Format a size: 512, 1K, 32K, 1M."""
    if value >= 2**20:
        return f"{value / 2**20:g}M"
    return f"{value / 1024:g}K" if value >= 1024 else f"{value:g}"
