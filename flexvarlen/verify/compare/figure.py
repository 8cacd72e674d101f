"""The picture of a comparison: the speed of each variant, and the error of its logits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flexvarlen.report.figure import bars, chart, save, style_of
from flexvarlen.report.records import Record
from flexvarlen.report.table import three_digits

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LEAK = "#C0392B"
ROW_PX, FRAME_PX = 26, 240


def draw(
    records: Sequence[Record],
    path: Path,
    title: str,
    caption: str,
    is_apart: Callable[[Record], bool],
) -> Path:
    """The picture of one model's records that were timed.

    Args:
        is_apart: whether a record's speed is of the forward alone: it is written, not drawn.
    """
    height_px = FRAME_PX + ROW_PX * len(records)
    figure, (left, right) = chart(title, caption, height_px=height_px, panels=2)
    draw_speeds(left, records, is_apart)
    draw_errors(right, records)
    left.set_ylim(right.get_ylim())
    return save(figure, path)


def draw_speeds(axes: Axes, records: Sequence[Record], is_apart: Callable[[Record], bool]) -> None:
    """Tokens a second; of those apart the number alone, without a bar."""
    drawn, texts = {}, []
    for record in records:
        speed, apart = record.measures["tokens_per_s"], is_apart(record)
        drawn[_name(record)] = 0.0 if apart else speed
        texts.append(f"{'forward alone: ' if apart else ''}{three_digits(speed)}")
    colors = [style_of(r.case["variant"]).color for r in records]
    bars(axes, drawn, label="tokens a second", colors=colors, texts=texts)


def draw_errors(axes: Axes, records: Sequence[Record]) -> None:
    """The largest error of the logits, in multiples of each document alone in the same dtype."""
    from matplotlib.ticker import EngFormatter, LogLocator

    baseline = [r for r in records if _is_alone(r)]
    limits = [r.measures["logits_limit"] for r in records if r.measures.get("logits_limit")]
    errors = [r.measures.get("logits_max") or 0.0 for r in records]
    unit = (baseline[0].measures["logits_max"] if baseline else max(limits, default=1.0)) or 1.0
    shown = [x / unit if math.isfinite(x) else math.nan for x in errors]
    largest = max((x for x in shown if x > 0), default=1.0)
    low, high = 0.4, 3 * largest
    for index, (record, error) in enumerate(zip(records, shown, strict=True)):
        leaks = record.measures.get("verdict") == "leaks"
        color = LEAK if leaks else style_of(record.case["variant"]).color
        at = error if error > 0 else 1.0
        axes.plot([at], [index], "o", color=color, markersize=7)
        text = f"{_multiple(error)}, leaks" if leaks else _multiple(error)
        beside = axes.get_yaxis_transform()  # x in widths of the axes, so right of all points
        axes.text(1.02, index, text, fontsize=8.5, va="center", transform=beside)
    if limits and low < limits[0] / unit < high:
        axes.axvline(limits[0] / unit, color="#888888", linestyle="--", linewidth=1)
        axes.text(1.08 * limits[0] / unit, -0.75, "limit", fontsize=8, color="#555555")
    axes.set_yticks([])  # the speeds beside them have the names
    axes.set_ylim(len(records) - 0.4, -1)
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    axes.xaxis.set_major_locator(LogLocator(numticks=6))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.minorticks_off()
    axes.set_xlabel("logit error ÷ that of each document alone", size=8.5)
    axes.grid(axis="x", color="#DDDDDD", linewidth=0.6)


def _multiple(factor: float) -> str:
    """Two digits, as a reader writes them.

    >>> _multiple(1.0), _multiple(0.978), _multiple(802_345.0), _multiple(float("nan"))
    ('1×', '0.98×', '800,000×', 'nan×')
    """
    return f"{float(f'{factor:.2g}'):,.12g}×"


def _is_alone(record: Record) -> bool:
    """Whether it is the low-precision baseline."""
    alone: bool = record.case["variant"].endswith("@alone")
    return alone


def _name(record: Record) -> str:
    if _is_alone(record):
        return "each document alone"
    name = record.case["variant"].replace("transformers:", "transformers ")
    short: str = name.replace("flash_attention_", "FA").replace("flex_attention", "flex")
    return short
