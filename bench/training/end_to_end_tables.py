"""The tables and the figure of `end_to_end.py`, from its rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flexvarlen.bench.model.cases import split_variant
from flexvarlen.bench.model.geometries import GEOMETRY_TITLES
from flexvarlen.bench.series_figure import figure_path, save_figure
from flexvarlen.markdown import markdown
from flexvarlen.plotstyle import UNSUPPORTED, style_of
from flexvarlen.rows import Row, commits_of, ran_on, rows_alike

SUITE = "end-to-end"
OURS = "packed:auto"
_KEPT = "@kept"
TARGETS = {
    "packed:transformers:flash_attention_2": 1.1,
    "packed:transformers:flash_attention_3": 1.0,
    "packed:transformers:flex_attention": 1.1,
    "padded:transformers:sdpa": 3.0,
    "padded:transformers:flash_attention_2": 3.0,
}
"""How many times as many tokens a second `OURS` should make, at least, in the same mode."""


def parts_of(variant: str) -> tuple[str, str, bool]:
    """How it batches, its attention, and whether checkpointed layers keep attention's outputs.

    >>> parts_of("packed:auto@kept")
    ('packed', 'auto', True)
    """
    batching, attention = split_variant(variant)
    return batching, attention.removesuffix(_KEPT), attention.endswith(_KEPT)


def _shown(variant: str, quote: str = "") -> tuple[str, str]:
    """Its batching and its attention, in words."""
    batching, attention, kept = parts_of(variant)
    name = f"{quote}{attention.replace('transformers:', 'transformers ')}{quote}"
    return batching, name + (", attention's outputs kept" if kept else "")


def groups_of(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows that differ in the variant alone, on machines of one kind."""
    return rows_alike(rows, ("variant",))


def title_of(rows: Sequence[Row]) -> str:
    """What a group trained, and where."""
    case = rows[0].case
    name = GEOMETRY_TITLES.get(case["geometry"], case["geometry"])
    documents = next((r.measures["documents"] for r in rows if "documents" in r.measures), None)
    counted = "" if documents is None else f" of {documents:.0f} documents on average"
    checkpointed = ", layers checkpointed" if case["checkpointing"] else ""
    return (
        f"Trainer, {name} geometry, {case['layers']} layers, {case['tokens']:,} tokens a step"
        f"{counted}, Python's help topics cut at {case['longest']:,}; {case['dtype']}, "
        f"{case['mode']}{checkpointed}; {ran_on(rows[0].environment)}"
    )


def end_to_end_section(rows: Sequence[Row]) -> str:
    """A table of each group."""
    return "\n\n".join(_table(group) for group in groups_of(rows))


def speed_of(rows: Sequence[Row], variant: str) -> float | None:
    """Its tokens a second; None where it has none."""
    found = [row for row in rows if row.case["variant"] == variant and row.status == "ok"]
    return found[-1].measures["tokens_per_s"] if found else None


def _table(rows: Sequence[Row]) -> str:
    ours = speed_of(rows, OURS)
    header = ["batch, attention", "tokens/s", "ms a step", "MFU", "peak GiB", "positions a token"]
    header += ["batches a step", "graph breaks", "steps that compiled", "ours is", "target"]
    lines = []
    for row in sorted(rows, key=lambda row: -row.measures.get("tokens_per_s", 0.0)):
        name, m = row.case["variant"], row.measures
        shown = ", ".join(_shown(name, "`"))
        if row.status != "ok":
            lines.append([shown, row.outcome, *["–"] * 9])
            continue
        target = TARGETS.get(name)
        ratio = None if ours is None or name == OURS else ours / m["tokens_per_s"]
        lines.append(
            [
                shown,
                f"{m['tokens_per_s']:,.0f}",
                f"{m['ms_p50']:,.0f}",
                "–" if m["mfu"] is None else f"{m['mfu']:.1%}",
                "–" if m["peak_mib"] is None else f"{m['peak_mib'] / 1024:.1f}",
                f"{m['positions'] / row.case['tokens']:.2f}",
                str(m["batches"]),
                str(m["graph_breaks"]) if row.case["mode"] == "compiled" else "–",
                f"{m['steps_compiling']} of {row.case['steps']}" if m["steps_compiling"] else "0",
                "–" if ratio is None else f"{ratio:.2f}×",
                "–" if ratio is None or target is None else _judged(ratio, target),
            ]
        )
    errors = [
        f"{max(r.measures[f'{what}_error'] for r in done):.1e} ({what}; each document alone "
        f"{done[0].measures[f'peer_{what}_error']:.1e})"
        for what in ("loss", "gradient")
        if (done := [row for row in rows if row.status == "ok"])
    ]
    checked = f" The first step's largest relative errors: {', '.join(errors)}." if errors else ""
    return (
        f"{title_of(rows)}{commits_of(rows)}:\n\n{markdown(header, lines)}\n\n"
        "Tokens are the documents' own: pads are not counted. Timed steps that compiled a graph "
        "are left out, unless all did. MFU: 6 operations a token for each parameter of a matrix "
        f"product and attention's unmasked pairs, no recomputation, over the GPU's peak.{checked}"
    )


def _judged(ratio: float, target: float) -> str:
    said = f"{target:g}×: {'met' if ratio >= target else 'missed'}"
    return said if ratio >= target else f"**{said}**"


def end_to_end_figures(rows: Sequence[Row], folder: Path) -> list[Path]:
    """A figure of each group: tokens a second, a bar a variant; what has none is marked."""
    import matplotlib as mpl

    mpl.use("Agg")
    drawn = []
    for group in groups_of(rows):
        case = group[0].case
        name = f"end-to-end-{case['geometry']}-{case['tokens']}-{case['mode']}"
        drawn.append(figure_path(folder, name, group))
        _draw(group, drawn[-1])
    return drawn


def _draw(rows: Sequence[Row], path: Path) -> None:
    from matplotlib import pyplot

    shown = sorted(rows, key=lambda row: row.measures.get("tokens_per_s", 0.0))
    figure, axes = pyplot.subplots(figsize=(10, 0.45 * len(rows) + 2), layout="constrained")
    for height, row in enumerate(shown):
        style = style_of(parts_of(row.case["variant"])[1])
        if row.status != "ok":
            axes.plot(0, height, UNSUPPORTED.marker, color=UNSUPPORTED.color)
            axes.annotate(row.status, (0, height), (8, -3), textcoords="offset points")
            continue
        rate = row.measures["tokens_per_s"]
        looks: dict[str, Any] = {"color": style.color, "alpha": 1.0 if style.filled else 0.6}
        axes.barh(height, rate, **looks)
        axes.annotate(f"{rate:,.0f}", (rate, height), (5, -3), textcoords="offset points")
    axes.set_yticks(range(len(shown)), [" ".join(_shown(row.case["variant"])) for row in shown])
    axes.set_xlabel("documents' tokens a second")
    axes.margins(x=0.15)
    axes.grid(axis="x", alpha=0.3)
    figure.suptitle(title_of(rows).replace("; ", "\n"), fontsize=10)
    save_figure(figure, path)
