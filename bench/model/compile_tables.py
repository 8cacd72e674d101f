"""Tables of `compile_time.py` and `small_inference.py`, from their rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flexvarlen.bench.mask_build.tables import Notes
from flexvarlen.markdown import markdown
from flexvarlen.rows import Row, commit_of, ran_on, rows_alike

SCOPE_NAMES = {
    "whole": "the whole model",
    "layer": "layer by layer",
    "decoder": "decoder layers alone",
}


def _where(row: Row) -> str:
    return ran_on(row.environment) + commit_of(row.environment)


def _spread(measures: dict[str, Any], digits: int) -> str:
    p50, p20, p80 = (f"{measures[name]:.{digits}f}" for name in ("ms_p50", "ms_p20", "ms_p80"))
    return f"{p50} ({p20}–{p80})"


# --- compile time --------------------------------------------------------------------------------


def compile_section(rows: Sequence[Row]) -> str:
    """A table for each run."""
    return "\n\n".join(
        _compile_table(group) for group in rows_alike(rows, ("scope", "part"), of_one_run=True)
    )


def _compile_table(rows: Sequence[Row]) -> str:
    case = rows[0].case
    found = {(row.case["scope"], row.case["part"]): row for row in rows}
    header = ["compiled", "cold s", "warm s", "eager start s, cold", "warm", "graphs"]
    header += ["graph breaks", "step ms (p20–p80)", "MFU"]
    reasons, lines = Notes(), []
    for scope, name in SCOPE_NAMES.items():
        own = [row for row in rows if row.case["scope"] == scope]
        if not own:
            continue
        how = next((row.measures["how"] for row in own if "how" in row.measures), None)
        version = rows[0].environment.get("accelerate")
        if how is not None and "accelerate" in how and version:
            how += f" {version}"
        line = [name if how is None else f"{name} ({how})"]
        parts = [found.get((scope, part)) for part in ("cold", "warm")]
        line += [_seconds(row, "compile_wall_s", reasons) for row in parts]
        line += [_seconds(row, "eager_start_s", reasons) for row in parts]
        first = found.get((scope, "cold"))
        ok = first is not None and first.status == "ok"
        for what in ("graphs", "graph_breaks"):
            line.append(str(first.measures[what]) if ok and first is not None else "–")
        steady = found.get((scope, "steady"))
        if steady is None or steady.status != "ok":
            line += ["–" if steady is None else reasons.status(steady), "–"]
        else:
            mfu = steady.measures.get("mfu")
            line += [_spread(steady.measures, 1), "–" if mfu is None else f"{mfu:.0%}"]
        lines.append(line)
    attends = next((r.measures["attends"] for r in rows if "attends" in r.measures), "")
    of = f" ({attends})" if case["backend"] == "auto" else ""
    whose = "" if case["backend"].startswith("transformers:") else "flexvarlen "
    return (
        f"{case['geometry']} geometry, {case['layers']} layers, {whose}`{case['backend']}`{of},"
        f" one row of {case['tokens']:,} tokens, documents of mean {case['mean_doc']:,}; "
        f"{case['dtype']}, {case['passes']}; {_where(rows[0])}:\n\n{markdown(header, lines)}"
        f"{reasons.text()}\n\nSeconds: the first step of a new process less a later one, with an "
        "empty cache folder (cold) and with the one that the cold process left (warm). Eager "
        "start: the first eager step less the second, before any is compiled: CUDA's start, and "
        "kernels that a package compiles by itself; where none was run, it is in the compiled "
        "step's time. Steps: all ways in turns, in one process, outputs and gradients checked "
        "before."
    )


def _seconds(row: Row | None, name: str, reasons: Notes) -> str:
    if row is None:
        return "–"
    if row.status != "ok":
        return reasons.status(row)
    return f"{row.measures[name]:.1f}" if name in row.measures else "–"


# --- small inference -----------------------------------------------------------------------------

MODES = ("eager", "compiled", "cuda graphs")


def small_inference_section(rows: Sequence[Row]) -> str:
    """A table for each run."""
    return "\n\n".join(_small_table(group) for group in small_inference_groups(rows))


def small_inference_groups(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows of one run on one model and row, which differ in the variant and the mode."""
    return rows_alike(rows, ("variant", "mode"), of_one_run=True)


def _small_table(rows: Sequence[Row]) -> str:
    case = rows[0].case
    found = {(row.case["variant"], row.case["mode"]): row for row in rows}
    header = ["attention", "eager ms", "compiled ms", "CUDA graphs ms (p20–p80)"]
    header += ["× compiled", "× eager", "graph breaks", "largest relative error"]
    reasons, lines = Notes(), []
    for variant in dict.fromkeys(row.case["variant"] for row in rows):
        own = [found.get((variant, mode)) for mode in MODES]
        times = [None if row is None else row.measures.get("ms_p50") for row in own]
        cells = []
        for row, digits in zip(own, (2, 2, 3), strict=True):
            if row is None:
                cells.append("–")
            elif row.status != "ok":
                cells.append(reasons.status(row))
            elif row.case["mode"] == "cuda graphs":
                skipped = row.measures.get("cudagraph_skips")  # graphs that ran without one
                note = f", {skipped} not captured" if skipped else ""
                cells.append(_spread(row.measures, digits) + note)
            else:
                cells.append(f"{row.measures['ms_p50']:.{digits}f}")
        eager, plain, graphs = times
        for slower in (plain, eager):
            cells.append(f"{slower / graphs:.1f}" if slower and graphs else "–")
        breaks = [r.measures["graph_breaks"] for r in own[1:] if r and "graph_breaks" in r.measures]
        errors = [r.measures["error"] for r in own if r and "error" in r.measures]
        cells.append(str(max(breaks)) if breaks else "–")
        cells.append(f"{max(errors):.1e}" if errors else "–")
        lines.append([_name(variant, own), *cells])
    documents = case["documents"]
    many = "1 document" if len(documents) == 1 else f"{len(documents)} documents"
    return (
        f"{case['geometry']} geometry, {case['layers']} layers, {many} of "
        f"{', '.join(map(str, documents))} tokens in one row; {case['dtype']}, {case['passes']} "
        f"under no_grad; {_where(rows[0])}:\n\n{markdown(header, lines)}{reasons.text()}\n\n"
        "Medians of the time from an idle device to the end of the call's work, the host's own "
        "included (CUDA events). CUDA graphs: torch.compile's `reduce-overhead`, other documents "
        "copied into the same tensors and checked before timing. Told their documents, if not said "
        "otherwise: flexvarlen by a PackedLayout made ahead, transformers by position_ids."
    )


def _name(variant: str, own: Sequence[Row | None]) -> str:
    kind, _, form = variant.partition("@")
    told = f", boundaries from {form}" if form else ""
    if variant.startswith("transformers:"):
        return f"transformers `{kind.removeprefix('transformers:')}`{told}"
    took = {r.case["mode"]: r.measures["attends"] for r in own if r and r.measures.get("attends")}
    names = list(dict.fromkeys(took.values()))
    if len(names) > 1:
        names = [f"{mode}: {name}" for mode, name in took.items()]
    shown = f" ({'; '.join(names)})" if kind == "auto" and names else ""
    return f"flexvarlen `{kind}`{told}{shown}"
