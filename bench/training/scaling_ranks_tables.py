"""The tables and the figure of `scaling_ranks.py`, from its rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flexvarlen.bench.model.geometries import GEOMETRY_TITLES
from flexvarlen.bench.series_figure import figure_path, save_figure
from flexvarlen.markdown import markdown
from flexvarlen.rows import Row, commit_of, ran_on, rows_alike

SUITE = "scaling-ranks"
NAMES = {"ddp": "DDP", "fsdp2": "FSDP2"}
STYLES: dict[tuple[str, str], dict[str, Any]] = {
    ("ddp", "shuffled"): {"color": "#0072B2", "marker": "D", "linestyle": "--"},
    ("ddp", "balanced"): {"color": "#0072B2", "marker": "D"},
    ("fsdp2", "shuffled"): {"color": "#D55E00", "marker": "s", "linestyle": "--"},
    ("fsdp2", "balanced"): {"color": "#D55E00", "marker": "s"},
}
NOT_COMPARED = ("variant", "order", "ranks", "num_heads")


def groups_of(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows of one measure on one model or row, which differ in ranks, order and heads."""
    return rows_alike(rows, NOT_COMPARED)


def scaling_ranks_section(rows: Sequence[Row]) -> str:
    """A table of each group."""
    tables = {"ulysses": _ulysses_table, "sequence": _sequence_table, "": _training_table}
    return "\n\n".join(tables[_kind(group[0])](group) for group in groups_of(rows))


def efficiency_of(row: Row, rows: Sequence[Row]) -> float | None:
    """Tokens a second and GPU over one GPU's, by the same way or, failing it, by another."""
    one = [r for r in rows if r.case["ranks"] == 1 and r.status == "ok"]
    own = [r for r in one if r.case["variant"] == row.case["variant"]] or one
    if not own or row.status != "ok":
        return None
    alone: float = own[-1].measures["tokens_per_s_rank"]
    return float(row.measures["tokens_per_s_rank"]) / alone


def _kind(row: Row) -> str:
    """What has tables of its own; "" for packed rows on each rank."""
    variant: str = row.case["variant"]
    return "" if variant in NAMES else variant


def _training_table(rows: Sequence[Row]) -> str:
    lines = []
    for row in sorted(rows, key=lambda r: (r.case["variant"], r.case["ranks"], r.case["order"])):
        case, m = row.case, row.measures
        head = [NAMES[case["variant"]], str(case["ranks"]), case["order"]]
        if row.status != "ok":
            lines.append([*head, row.outcome, *["–"] * 5])
            continue
        efficiency = efficiency_of(row, rows)
        lines.append(
            [
                *head,
                f"{m['tokens_per_s']:,.0f}",
                f"{m['tokens_per_s_rank']:,.0f}",
                "–" if efficiency is None else f"{efficiency:.1%}",
                f"{m['ms_step']:,.0f}",
                f"{m['imbalance'] - 1:.1%}",
                "–" if m["peak_mib"] is None else f"{m['peak_mib'] / 1024:.1f}",
            ]
        )
    header = ["parallel", "GPUs", "rows", "tokens/s", "tokens/s a GPU", "of one GPU", "ms a step"]
    header += ["waits for attention", "peak GiB"]
    return (
        f"{title_of(rows)}{commit_of(rows[0].environment)}:\n\n{markdown(header, lines)}\n\n"
        f"The same {rows[0].case['timed_rows']} rows of Python's help topics, whatever the GPUs. "
        "Waits for attention: how much more of it the slowest rank of each step has than the mean."
    )


def _ulysses_table(rows: Sequence[Row]) -> str:
    lines = []
    for row in sorted(rows, key=lambda r: (-r.case["num_heads"], r.case["ranks"])):
        case, m = row.case, row.measures
        head = [f"{case['num_heads']} / {case['num_kv_heads']}", str(case["ranks"])]
        if row.status != "ok":
            lines.append([*head, row.outcome, *["–"] * 5])
            continue
        speedup = m["single_ms"] / m["ulysses_ms"]
        worst = max(m[f"error_{n}"] / m[f"single_error_{n}"] for n in ("out", "dq", "dk", "dv"))
        lines.append(
            [
                *head,
                f"{m['single_forward_ms']:.1f} → {m['ulysses_forward_ms']:.1f}",
                f"{m['single_ms']:.1f} → {m['ulysses_ms']:.1f}",
                f"{speedup:.2f}×",
                f"{speedup / case['ranks']:.0%}",
                f"{worst:.2f}",
                f"{m['max_difference']:.1e}",
            ]
        )
    header = ["heads / KV heads", "GPUs", "forward ms, one GPU → all", "forward + backward ms"]
    header += ["faster", "efficiency", "error / one GPU's", "largest difference"]
    case, where = rows[0].case, rows[0].environment
    done = next((row.measures for row in rows if "documents" in row.measures), None)
    counted = "" if done is None else f" of {done['documents']} documents"
    return (
        f"Ulysses, one row of {case['tokens']:,} tokens{counted}, head_dim {case['head_dim']}, "
        f"`{case['backend']}`, {case['dtype']}; {where.get('gpu') or where.get('cpu')}, torch "
        f"{where.get('torch')}{commit_of(where)}:\n\n{markdown(header, lines)}\n\n"
        "Errors against sampled documents alone in fp64, the worst of the output and the "
        "gradients; at most 2 is right. Largest difference: from one GPU's, relative to its "
        "largest value."
    )


def _sequence_table(rows: Sequence[Row]) -> str:
    lines = []
    for row in sorted(rows, key=lambda r: r.case["ranks"]):
        case, m = row.case, row.measures
        if row.status != "ok":
            lines.append([str(case["ranks"]), row.outcome, *["–"] * 4])
            continue
        errors = [
            f"{m[f'{what}_error']:.1e} / {m[f'peer_{what}_error']:.1e}"
            for what in ("loss", "gradient")
        ]
        peak = "–" if m["peak_mib"] is None else f"{m['peak_mib'] / 1024:.1f}"
        speed = [f"{m['tokens_per_s']:,.0f}", f"{m['ms_p50']:,.0f}"]
        lines.append([str(case["ranks"]), *speed, peak, *errors])
    header = ["GPUs", "tokens/s", "ms a step", "peak GiB", "loss", "gradients"]
    case = rows[0].case
    return (
        f"Sequence parallelism, {title_of(rows)}{commit_of(rows[0].environment)}; trained on one "
        f"document of {case['document']:,} tokens over all GPUs:\n\n{markdown(header, lines)}\n\n"
        "Ms a step: the median. Loss and gradients: relative errors on a row of "
        f"{case['tokens']:,} tokens against each document alone in higher precision, and what each "
        "document alone errs in the same dtype."
    )


def title_of(rows: Sequence[Row]) -> str:
    """What a group trained, and where."""
    case = rows[0].case
    name = GEOMETRY_TITLES.get(case["geometry"], case["geometry"])
    checkpointed = ", layers checkpointed" if case["checkpointing"] else ""
    a_gpu = "" if _kind(rows[0]) else f" a packed row of {case['tokens']:,} tokens a GPU and step,"
    return (
        f"{name} geometry, {case['layers']} layers,{a_gpu} `{case['backend']}`, {case['dtype']}"
        f"{checkpointed}; {ran_on(rows[0].environment)}"
    )


# --- figure --------------------------------------------------------------------------------------


def scaling_ranks_figures(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Of each group of trainings: tokens a second over the GPUs, beside what one would give."""
    import matplotlib as mpl

    mpl.use("Agg")
    drawn = []
    for group in groups_of(rows):
        if _kind(group[0]) or all(row.status != "ok" for row in group):
            continue
        case = group[0].case
        name = f"scaling-ranks-{case['geometry']}-{case['tokens']}"
        drawn.append(figure_path(folder, name, group))
        _draw([row for row in group if row.status == "ok"], drawn[-1])
    return drawn


def _draw(rows: Sequence[Row], path: Path) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    counts = sorted({row.case["ranks"] for row in rows})
    one = [row.measures["tokens_per_s"] for row in rows if row.case["ranks"] == 1]
    for (variant, order), style in STYLES.items():
        own = sorted(
            (r for r in rows if (r.case["variant"], r.case["order"]) == (variant, order)),
            key=lambda r: r.case["ranks"],
        )
        if own:
            rates = [row.measures["tokens_per_s"] for row in own]
            at = [row.case["ranks"] for row in own]
            axes.plot(at, rates, label=f"{NAMES[variant]}, {order} rows", **style)
    if one:
        ideal = [max(one) * count for count in counts]
        axes.plot(counts, ideal, color="#999999", linestyle=":", label="one GPU's, times GPUs")
    axes.set_xticks(counts)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("GPUs")
    axes.set_ylabel("tokens a second")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    title = title_of(rows).replace("; ", "\n").replace(", a packed", ",\na packed")
    figure.suptitle(title.replace("`", ""), fontsize=10)
    save_figure(figure, path)
