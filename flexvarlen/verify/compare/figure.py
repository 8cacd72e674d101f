"""The picture of a comparison: the speed of each variant, and the error of its logits."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flexvarlen.report.figure import bars, chart, save, style_of
from flexvarlen.report.records import Record, grouped

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LEAK = "#C0392B"
ROW_PX, FRAME_PX = 26, 240


def draw(
    records: Sequence[Record],
    folder: Path,
    title: Callable[[Sequence[Record]], str],
    caption: Callable[[Sequence[Record]], str],
) -> list[Path]:
    """A picture of each model's records that were timed; returns the files."""
    paths = []
    models = grouped(records, "model")
    for model, own in models.items():
        timed = [r for r in own if r.measures.get("tokens_per_s")]
        if not timed:
            continue
        figure, (left, right) = chart(
            title(own), caption(own), height_px=FRAME_PX + ROW_PX * len(timed), panels=2
        )
        speeds = {_name(r): r.measures["tokens_per_s"] for r in timed}
        colors = [style_of(r.case["variant"]).color for r in timed]
        bars(left, speeds, label="tokens a second", colors=colors)
        draw_errors(right, timed)
        right.set_yticks([])
        slug = re.sub(r"[^\w.]+", "-", model).strip("-")
        name = "compare.png" if len(models) == 1 else f"compare-{slug}.png"
        paths.append(save(figure, folder / name))
    return paths


def draw_errors(axes: Axes, records: Sequence[Record]) -> None:
    """The largest error of the logits, in multiples of each document alone in the same dtype."""
    baseline = [r for r in records if _is_alone(r)]
    limits = [r.measures["logits_limit"] for r in records if r.measures.get("logits_limit")]
    errors = [r.measures.get("logits_max") or 0.0 for r in records]
    unit = (baseline[0].measures["logits_max"] if baseline else max(limits, default=1.0)) or 1.0
    shown = [x / unit if math.isfinite(x) else math.nan for x in errors]
    for index, (record, error) in enumerate(zip(records, shown, strict=True)):
        leaks = record.measures.get("verdict") == "leaks"
        color = LEAK if leaks else style_of(record.case["variant"]).color
        at = error if error > 0 else 1.0
        axes.plot([at], [index], "o", color=color, markersize=7)
        text = f"{error:.2g}×, leaks" if leaks else f"{error:.2g}×"
        offset = {"textcoords": "offset points", "va": "center", "fontsize": 8.5}
        offset["bbox"] = {"color": "white", "pad": 0.5}  # over the line of the limit
        axes.annotate(text, (at, index), (8, 0), **offset)  # type: ignore[arg-type]
    if limits:
        axes.axvline(limits[0] / unit, color="#888888", linestyle="--", linewidth=1)
        axes.text(1.08 * limits[0] / unit, -0.75, "limit", fontsize=8, color="#555555")
    axes.set_yticks(range(len(records)), [_name(r) for r in records])
    axes.set_ylim(len(records) - 0.4, -1)
    axes.set_xscale("log")
    largest = max((x for x in shown if x > 0), default=1.0)
    axes.set_xlim(0.4, 12 * largest)
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.set_xlabel("logit error ÷ that of each document alone", size=8.5)
    axes.grid(axis="x", color="#DDDDDD", linewidth=0.6)


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
