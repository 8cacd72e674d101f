"""The figure of the suite "mask-build": cost of a build against tokens, and against blocks kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from flexvarlen.rows import Row, commit_of

BUILDER_STYLES = {  # of flexvarlen.plotstyle
    "flexvarlen": "flex",
    "flexvarlen from cu_seqlens": "flex_fa4",
    "create_block_mask eager": "transformers:eager",
    "create_block_mask compiled": "transformers:flex_attention",
    "create_block_mask(_compile=True)": "transformers:sdpa",
    "attention-gym": "nested",
}
# Of the strip above the axes, in heights of the axes: its lowest line, and from line to line.
STRIP, STRIP_LINE = 1.035, 0.05
GPU_LINE = ":"


def where_of(rows: Sequence[Row]) -> str:
    """The machine, the versions and the commit of a run."""
    where = rows[0].environment
    machine = where.get("gpu") or where.get("cpu")
    return f"{machine}, torch {where.get('torch')}{commit_of(where)}"


OLD_VARIANTS = {"build": "builder", "kinds": "kind", "attention": "mask"}
"""Of rows from before the runner: by part, what of a case said its variant."""
ONLY_VARIANT = {"long": "flex"}  # of the other parts: flexvarlen


def with_variants(rows: Sequence[Row]) -> list[Row]:
    """The rows, each with the `variant` of its case, also those from before the runner."""

    def variant(row: Row) -> str:
        part = row.case["part"]
        if part in OLD_VARIANTS:
            return str(row.case[OLD_VARIANTS[part]])
        return ONLY_VARIANT.get(part, "flexvarlen")

    return [
        row
        if "variant" in row.case
        else dataclasses.replace(row, case=row.case | {"variant": variant(row)})
        for row in rows
    ]


def place_of(row: Row) -> str:
    """All of a row's environment but when its run began: a run that was resumed is one."""
    where = {key: value for key, value in row.environment.items() if key != "started_utc"}
    return repr(sorted(where.items()))


def latest_place(rows: Sequence[Row]) -> list[Row]:
    """Those measured in the environment of the run that started last."""
    if not rows:
        return []
    latest = place_of(max(rows, key=lambda row: row.environment.get("started_utc") or ""))
    return [row for row in rows if place_of(row) == latest]


def drawn(rows: Sequence[Row]) -> Any:
    """Cost of a build against tokens, of every builder; of ours against the blocks kept.

    Of one GPU's rows: of each part, the latest environment's.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    rows = with_variants(rows)
    parts = {
        part: latest_place([row for row in rows if row.case["part"] == part])
        for part in ("build", "growth")
    }
    figure, axes = pyplot.subplots(1, 2, figsize=(13, 6.4), layout="constrained")
    for one, draw, part in zip(
        axes, (_against_tokens, _against_blocks), parts.values(), strict=True
    ):
        if part:
            draw(one, part)
        else:
            one.set_axis_off()
            one.text(0.5, 0.5, "not measured", ha="center")
    runs = dict.fromkeys(where_of(part) for part in parts.values() if part)
    title = ["Building a causal document BlockMask", *runs]
    figure.suptitle("\n".join(title), fontsize=11)
    return figure


def _against_tokens(axes: Any, rows: Sequence[Row]) -> None:
    from matplotlib.lines import Line2D

    from flexvarlen.plotstyle import STYLES

    handles, missing = [], {}
    for builder, style_name in BUILDER_STYLES.items():
        own = [row for row in rows if row.case["variant"] == builder]
        if not own:
            continue
        style = STYLES[style_name]
        done = sorted((r for r in own if r.status == "ok"), key=lambda r: r.case["tokens"])
        _line(axes, done, [r.case["tokens"] for r in done], style)
        handles.append(Line2D([], [], label=builder, **style.line()))
        missing[builder] = [row for row in own if row.status != "ok"]
    _strip(axes, {name: own for name, own in missing.items() if own})
    axes.set_xlabel("tokens of the row (log2)")
    _finish(axes, handles)


def _strip(axes: Any, missing: dict[str, list[Row]]) -> None:
    """Above the axes, a line a builder: where it has no cost, a mark and the status."""
    from flexvarlen.plotstyle import STYLES, UNSUPPORTED

    across = axes.get_xaxis_transform()  # x in tokens, y in heights of the axes
    for index, (builder, rows) in enumerate(reversed(missing.items())):
        height = STRIP + index * STRIP_LINE
        color = STYLES[BUILDER_STYLES[builder]].color
        axes.text(
            -0.015, height, builder, transform=axes.transAxes, fontsize=7, ha="right", va="center"
        )
        for row in rows:
            at = (row.case["tokens"], height)
            axes.plot(
                *at,
                transform=across,
                clip_on=False,
                color=color,
                markersize=6,
                marker=UNSUPPORTED.marker,
                linestyle="none",
            )
            axes.annotate(
                row.status,
                at,
                (6, 0),
                xycoords=across,
                textcoords="offset points",
                fontsize=7,
                va="center",
                annotation_clip=False,
            )


def _against_blocks(axes: Any, rows: Sequence[Row]) -> None:
    from matplotlib.lines import Line2D

    from flexvarlen.plotstyle import STYLES

    ours, handles = STYLES["flex"], []
    styles = {
        "tokens": ours,
        "documents": dataclasses.replace(ours, marker="o", filled=False, linestyle="--"),
    }
    for series, style in styles.items():
        own = [row for row in rows if row.case["series"] == series]
        if not own:
            continue
        label = {
            "tokens": f"more tokens (documents of mean {own[0].case['mean_doc']:,})",
            "documents": f"longer documents (rows of {own[0].case['tokens']:,} tokens)",
        }[series]
        done = [row for row in own if row.status == "ok"]
        done.sort(key=lambda row: row.measures["blocks"])
        _line(axes, done, [r.measures["blocks"] for r in done], style)
        varied = "tokens" if series == "tokens" else "mean_doc"
        for row in own:  # without a count of blocks there is no place to mark
            if row.status != "ok":
                label += f"\n{row.case[varied]:,}: {row.status}"
        handles.append(Line2D([], [], label=f"flexvarlen, {label}", **style.line()))
    axes.set_xlabel("blocks kept (log2)")
    _finish(axes, handles)


def _line(axes: Any, rows: Sequence[Row], x: Sequence[int], style: Any) -> None:
    """Wall p50 with its p20–p80 band; the GPU's part of it thin, with small markers."""
    if not rows:
        return
    wall = [row.measures["wall_us_p50"] for row in rows]
    axes.plot(x, wall, **style.line())
    low, high = ([row.measures[f"wall_us_{p}"] for row in rows] for p in ("p20", "p80"))
    axes.fill_between(x, low, high, color=style.color, alpha=0.2, linewidth=0)
    gpu = [row.measures["gpu_us"] for row in rows]
    if None not in gpu:
        axes.plot(x, gpu, **style.line() | {"linestyle": GPU_LINE}, linewidth=1.2, markersize=3)


def _finish(axes: Any, handles: list[Any]) -> None:
    from matplotlib import ticker
    from matplotlib.lines import Line2D

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(ticker.FuncFormatter(lambda x, _: f"{x:,.10g}"))
    axes.tick_params(axis="x", labelrotation=30, labelsize=8)
    axes.grid(which="major", alpha=0.3)
    axes.set_ylabel("µs a build (log10)")
    axes.margins(y=0.08)
    grey = {"color": "#666666"}
    handles.append(Line2D([], [], label="wall, p50 (band: p20–p80)", **grey))
    if any(line.get_linestyle() == GPU_LINE for line in axes.lines):
        handles.append(Line2D([], [], label="GPU time", linestyle=GPU_LINE, linewidth=1.2, **grey))
    place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.18)}
    axes.legend(
        handles=handles, fontsize=7.5, ncols=3 if len(handles) > 4 else 2, frameon=False, **place
    )
