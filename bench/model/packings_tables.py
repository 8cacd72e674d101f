"""Tables and figures of `packings.py`: steps of a whole model on packed rows, from its rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flexvarlen.bench.model.geometries import GEOMETRY_TITLES
from flexvarlen.bench.series_figure import figure_path, save_figure
from flexvarlen.markdown import markdown
from flexvarlen.rows import Row, commit_of, ran_on, rows_alike

NO_OTHER, UNCHECKED = "none run", " (unchecked)"
LEGEND = {
    NO_OTHER: "time was up before other packings ran, and so none was checked",
    UNCHECKED: "time was up before the last other packing, whose outputs are checked",
}

BASELINES = tuple(f"transformers:{name}" for name in ("flash_attention_2", "sdpa"))
"""What speeds are told against: the first of them that was measured."""


def packings_section(rows: Sequence[Row]) -> str:
    """All groups' tables."""
    return "\n\n".join(packings_table(group) for group in packings_groups(rows))


def packings_groups(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows of one run on one model and shape, which differ in the variant; theirs first.

    The latest run first.
    """
    latest = sorted(
        rows_alike(rows, ("variant",), of_one_run=True),
        key=lambda group: group[0].environment.get("started_utc") or "",
        reverse=True,
    )
    return [
        sorted(group, key=lambda row: not row.case["variant"].startswith("transformers:"))
        for group in latest
    ]


def packings_title(rows: Sequence[Row]) -> str:
    """Model, dtype, pass and GPU of a group, and the versions it ran on."""
    case = rows[0].case
    name = GEOMETRY_TITLES.get(case["geometry"], case["geometry"])
    documents = next((r.measures["documents"] for r in rows if "documents" in r.measures), None)
    counted = "" if documents is None else f"{documents} "
    return (
        f"{name} geometry, {case['layers']} layers, one row of {case['tokens']:,} tokens, "
        f"{counted}log-normal documents of mean {case['mean_doc']:,}; {case['dtype']}, "
        f"{case['passes']}; {ran_on(rows[0].environment)}"
    )


def packings_table(rows: Sequence[Row]) -> str:
    """One group's table; errors are of the compiled outputs against each document alone."""
    done = {r.case["variant"]: r for r in rows if r.status == "ok"}
    known = [name for name in BASELINES if name in done]
    base = done[known[0]] if known else None
    against = (known or BASELINES)[0].replace(":", " ")
    header = [
        "attention",
        "eager ms",
        "compiled ms (p20–p80)",
        f"× {against}",
        "MFU",
        "graph breaks",
        "recompilations",
        "cold compile s",
        "peak GiB",
        "relative error (outputs, gradients)",
    ]
    lines, reasons = [], []
    for row in rows:
        name, m = _shown(row.case["variant"]), row.measures
        if row.case["variant"].startswith("auto") and m.get("attends"):
            eager = m.get("attends_eager") or m["attends"]
            also = "" if eager == m["attends"] else f"; eagerly {eager}"
            name += f" ({m['attends']}{also})"
        if row.status != "ok":
            reasons.append(f"{name} {row.outcome}")
            lines.append([name, f"{row.status} ({len(reasons)})", *[""] * (len(header) - 2)])
            continue
        spread = f"{m['ms_p50']:.0f} ({m['ms_p20']:.0f}–{m['ms_p80']:.0f})"
        speed = "" if base is None else f"{base.measures['ms_p50'] / m['ms_p50']:.2f}"
        lines.append(
            [
                name,
                f"{m['eager_ms_p50']:.0f}" if "eager_ms_p50" in m else "–",
                spread,
                speed,
                f"{m['mfu']:.0%}" if m.get("mfu") is not None else "–",
                str(m["graph_breaks"]),
                _recompilations(m),
                f"{m['compile_s']:.0f}",
                "–" if m.get("peak_mib") is None else f"{m['peak_mib'] / 1024:.1f}",
                f"{m['error']:.1e}, {m['grad_error']:.1e}",
            ]
        )
    notes = _notes(rows)
    notes += "".join(f"\n\n({number}) {why}" for number, why in enumerate(reasons, 1))
    shown = markdown(header, lines)
    notes += "".join(f"\n\n{mark.strip()}: {why}." for mark, why in LEGEND.items() if mark in shown)
    title = packings_title(rows) + commit_of(rows[0].environment)
    return f"{title}:\n\n{shown}{notes}"


def _recompilations(measures: Mapping[str, Any]) -> str:
    if not measures.get("other_packings"):
        return NO_OTHER
    said = f"{measures['recompilations']} over {measures['other_packings']} other packings"
    return said if "error_last_packing" in measures else f"{said}{UNCHECKED}"


def _shown(variant: str) -> str:
    kind, _, boundaries = variant.partition("@")
    name = kind.replace("transformers:", "transformers `") if ":" in kind else f"flexvarlen `{kind}"
    return f"{name}`" + (f", boundaries from {boundaries}" if boundaries else "")


def _notes(rows: Sequence[Row]) -> str:
    done = next((r for r in rows if r.status == "ok"), None)
    if done is None:
        return ""
    m = done.measures
    used = (
        ""
        if m.get("peak_tflops") is None
        else f" MFU: the step's {m['model_tflop']:.0f}e12 operations (six a token and parameter "
        "outside the embedding, and attention's unmasked pairs) over the time and the GPU's dense "
        f"peak, {m['peak_tflops']:g}e12 a second."
    )
    return (
        f"\n\nEach document alone in {done.case['dtype']} has relative errors of "
        f"{m['peer_error']:.1e} and {m['peer_grad_error']:.1e}. Peak: {m['peak_meaning']}.{used}"
    )


def packings_figures(rows: Sequence[Row], folder: Path) -> list[Path]:
    """A figure of each group."""
    drawn = []
    for group in packings_groups(rows):
        case = group[0].case
        drawn.append(figure_path(folder, f"packings-{case['geometry']}-{case['tokens']}", group))
        _draw(group, drawn[-1])
    return drawn


def _draw(rows: Sequence[Row], path: Path) -> None:
    """Compiled ms of a group: median and p20-p80; what could not be measured is marked."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    from flexvarlen.plotstyle import UNSUPPORTED, style_of

    figure, axes = pyplot.subplots(figsize=(9, 0.4 * len(rows) + 2), layout="constrained")
    shown = sorted(rows, key=lambda r: r.measures.get("ms_p50", math.inf), reverse=True)
    fastest = min((r.measures["ms_p50"] for r in shown if r.status == "ok"), default=1.0)
    for height, row in enumerate(shown):
        if row.status != "ok":
            axes.plot(fastest, height, UNSUPPORTED.marker, color=UNSUPPORTED.color)
            axes.annotate(row.status, (fastest, height), (8, -3), textcoords="offset points")
            continue
        m, style = row.measures, style_of(row.case["variant"])
        axes.hlines(height, m["ms_p20"], m["ms_p80"], color=style.color, linewidth=3)
        line: dict[str, Any] = {**style.line(), "linestyle": "none"}
        axes.plot(m["ms_p50"], height, markersize=9, **line)
        text = f"{m['ms_p50']:.0f} ms"
        axes.annotate(text, (m["ms_p50"], height), (9, -3), textcoords="offset points")
    axes.set_yticks(range(len(shown)), [_shown(r.case["variant"]).replace("`", "") for r in shown])
    axes.margins(y=0.08)
    slowest = max((r.measures["ms_p80"] for r in shown if r.status == "ok"), default=1.0)
    axes.set_xlim(0, 1.2 * slowest)  # room for the last label
    axes.grid(axis="x", alpha=0.3)
    axes.set_xlabel("ms a step under torch.compile")
    figure.suptitle(packings_title(rows).replace(", one row", "\none row").replace("; ", "\n", 1))
    save_figure(figure, path)
