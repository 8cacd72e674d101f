"""The figure of the suite "mask-build": cost of a build against tokens, and against blocks kept."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.rows import Row

BUILDER_STYLES = {  # of flexvarlen.plotstyle
    "flexvarlen": "flex",
    "flexvarlen from cu_seqlens": "flex_fa4",
    "create_block_mask eager": "transformers:eager",
    "create_block_mask compiled": "transformers:flex_attention",
    "create_block_mask(_compile=True)": "transformers:sdpa",
    "attention-gym": "nested",
}


def where_of(rows: Sequence[Row]) -> str:
    """The machine and the versions of a group."""
    where = rows[0].environment
    return f"{where.get('gpu') or where.get('cpu')}, torch {where.get('torch')}"


def mask_build_figure_name(rows: Sequence[Row]) -> str:
    """A file name for a GPU's figure."""
    where = rows[0].environment.get("gpu") or rows[0].environment.get("device") or "unknown"
    return "-".join(["mask-build", *where.lower().replace("/", " ").split()]) + ".png"


def mask_build_figure(rows: Sequence[Row], path: Path) -> None:
    """Cost of a build against tokens, of every builder; of ours against the blocks kept."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 5.2), layout="constrained")
    _against_tokens(left, rows)
    _against_blocks(right, rows)
    figure.suptitle(f"Building a causal document BlockMask; {where_of(rows)}", fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _against_tokens(axes: Any, rows: Sequence[Row]) -> None:
    from flexvarlen.plotstyle import STYLES, UNSUPPORTED

    built = [row for row in rows if row.case["part"] == "build"]
    for builder, style_name in BUILDER_STYLES.items():
        own = [row for row in built if row.case["builder"] == builder]
        done = sorted((r for r in own if r.status == "ok"), key=lambda r: r.case["tokens"])
        if not done:
            continue
        _line(axes, done, [r.case["tokens"] for r in done], STYLES[style_name], builder)
        missing = [row for row in own if row.status != "ok"]
        for row in missing:
            at = (row.case["tokens"], done[-1].measures["wall_us_p50"])
            axes.plot(*at, UNSUPPORTED.marker, color=STYLES[style_name].color, markersize=9)
            axes.annotate(
                row.status, at, (0, 8), textcoords="offset points", ha="center", fontsize=8
            )
    axes.set_xlabel("tokens (log2)")
    _finish(axes)


def _against_blocks(axes: Any, rows: Sequence[Row]) -> None:
    from flexvarlen.plotstyle import STYLES

    grown = [row for row in rows if row.case["part"] == "growth" and row.status == "ok"]
    for series, style_name in (("tokens", "flex"), ("documents", "flex_fa4")):
        done = [row for row in grown if row.case["series"] == series]
        if not done:
            continue
        done.sort(key=lambda row: row.measures["blocks"])
        fixed = done[0].case["mean_doc"] if series == "tokens" else done[0].case["tokens"]
        label = {
            "tokens": f"flexvarlen, more tokens (mean document {fixed:,})",
            "documents": f"flexvarlen, longer documents ({fixed:,} tokens)",
        }[series]
        _line(axes, done, [r.measures["blocks"] for r in done], STYLES[style_name], label)
    axes.set_xlabel("blocks kept (log2)")
    _finish(axes)


def _line(axes: Any, rows: Sequence[Row], x: Sequence[int], style: Any, label: str) -> None:
    """Wall p50 with its p20–p80 band, and the GPU's part below it, thin and without markers."""
    wall = [row.measures["wall_us_p50"] for row in rows]
    axes.plot(x, wall, label=f"{label}: wall", **style.line())
    low, high = ([row.measures[f"wall_us_{p}"] for row in rows] for p in ("p20", "p80"))
    axes.fill_between(x, low, high, color=style.color, alpha=0.2, linewidth=0)
    gpu = [row.measures["gpu_us"] for row in rows]
    if None not in gpu:
        axes.plot(x, gpu, color=style.color, linestyle=":", linewidth=1.2, label=f"{label}: GPU")


def _finish(axes: Any) -> None:
    from matplotlib import ticker

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(ticker.FuncFormatter(lambda x, _: f"{x:,.10g}"))
    axes.tick_params(axis="x", labelrotation=30, labelsize=8)
    axes.grid(which="major", alpha=0.3)
    axes.set_ylabel("µs a build (p50, band p20–p80)")
    axes.margins(y=0.15)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=7)
