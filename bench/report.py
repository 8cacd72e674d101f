"""`python -m flexvarlen.bench.report FILE…`: tables and figures, from rows alone.

Prints Markdown; `--readme` writes each suite's tables between its markers
(`<!-- bench:model begin -->` and `<!-- bench:model end -->`), `--figures` a PNG for each measured
model and GPU, one of building masks and one of the kernels.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flexvarlen.bench.capabilities import capabilities_section
from flexvarlen.bench.families import families_section
from flexvarlen.bench.figure_kernels import kernels_figure, kernels_figure_name
from flexvarlen.bench.figure_mask_build import mask_build_figure, mask_build_figure_name
from flexvarlen.bench.host_time import host_time_section
from flexvarlen.bench.report_compile import compile_section, small_inference_section
from flexvarlen.bench.report_kernels import kernels_groups, kernels_section
from flexvarlen.bench.report_mask_build import mask_build_groups, mask_build_section
from flexvarlen.markdown import markdown
from flexvarlen.rows import Row, commit_of, read_rows

BASELINES = tuple(f"transformers:{name}" for name in ("flash_attention_2", "sdpa"))
"""What speeds are told against: the first of them that was measured."""
GEOMETRY_NAMES = {"qwen3-1.7b": "Qwen3-1.7B", "llama-3.2-1b": "Llama-3.2-1B"}


def replace_between_markers(text: str, name: str, body: str) -> str:
    """`text` with `body` between the markers `<!-- bench:NAME begin -->` and `… end -->`.

    Raises:
        ValueError: the two markers are not there, once each and in order.

    >>> replace_between_markers("<!-- bench:x begin --> old <!-- bench:x end -->", "x", "new")
    '<!-- bench:x begin -->\\nnew\\n<!-- bench:x end -->'
    """
    begin, end = f"<!-- bench:{name} begin -->", f"<!-- bench:{name} end -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(
            f"the text must hold {begin} and, after it, {end}, once each; put them where the "
            "table belongs"
        )
    head, tail = text[: text.index(begin)], text[text.index(end) + len(end) :]
    return f"{head}{begin}\n{body.strip()}\n{end}{tail}"


# --- model ---------------------------------------------------------------------------------------


def model_groups(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows of one run on one model and shape, which differ in the variant; theirs first."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        case = {key: value for key, value in row.case.items() if key != "variant"}
        where = row.environment
        key = repr((sorted(case.items()), where.get("gpu"), where.get("started_utc")))
        groups.setdefault(key, []).append(row)
    return [
        sorted(group, key=lambda row: not row.case["variant"].startswith("transformers:"))
        for group in groups.values()
    ]


def model_title(rows: Sequence[Row]) -> str:
    """Model, dtype, pass and GPU of a group, and the versions it ran on."""
    case, where = rows[0].case, rows[0].environment
    name = GEOMETRY_NAMES.get(case["geometry"], case["geometry"])
    documents = next((r.measures["documents"] for r in rows if "documents" in r.measures), None)
    counted = "" if documents is None else f"{documents} "
    return (
        f"{name} geometry, {case['layers']} layers, one row of {case['tokens']:,} tokens, "
        f"{counted}log-normal documents of mean {case['mean_doc']:,}; {case['dtype']}, "
        f"{case['passes']}; {where.get('gpu') or where.get('cpu')}, torch {where.get('torch')}, "
        f"transformers {where.get('transformers')}"
    )


def model_table(rows: Sequence[Row]) -> str:
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
            reasons.append(f"{name} {row.status}: {row.reason}")
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
                f"{m['recompilations']} over {m['other_packings']} other packings",
                f"{m['compile_s']:.0f}",
                "–" if m.get("peak_mib") is None else f"{m['peak_mib'] / 1024:.1f}",
                f"{m['error']:.1e}, {m['grad_error']:.1e}",
            ]
        )
    notes = _model_notes(rows)
    notes += "".join(f"\n\n({number}) {why}" for number, why in enumerate(reasons, 1))
    title = model_title(rows) + commit_of(rows[0].environment)
    return f"{title}:\n\n{markdown(header, lines)}{notes}"


def _shown(variant: str) -> str:
    kind, _, boundaries = variant.partition("@")
    name = kind.replace("transformers:", "transformers `") if ":" in kind else f"flexvarlen `{kind}"
    return f"{name}`" + (f", boundaries from {boundaries}" if boundaries else "")


def _model_notes(rows: Sequence[Row]) -> str:
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


def model_figure(rows: Sequence[Row], path: Path) -> None:
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
        axes.plot(m["ms_p50"], height, markersize=9, **style.line() | {"linestyle": "none"})
        text = f"{m['ms_p50']:.0f} ms"
        axes.annotate(text, (m["ms_p50"], height), (9, -3), textcoords="offset points")
    axes.set_yticks(range(len(shown)), [_shown(r.case["variant"]).replace("`", "") for r in shown])
    axes.margins(y=0.08)
    slowest = max((r.measures["ms_p80"] for r in shown if r.status == "ok"), default=1.0)
    axes.set_xlim(0, 1.2 * slowest)  # room for the last label
    axes.grid(axis="x", alpha=0.3)
    axes.set_xlabel("ms a step under torch.compile")
    figure.suptitle(model_title(rows).replace(", one row", "\none row").replace("; ", "\n", 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def figure_name(rows: Sequence[Row]) -> str:
    """A file name for a group's figure."""
    where = rows[0].environment.get("gpu") or rows[0].environment.get("device") or "unknown"
    case = rows[0].case
    words = f"model {case['geometry']} {case['tokens']} {where}".lower().replace("/", " ").split()
    return "-".join(words) + ".png"


def model_section(rows: Sequence[Row]) -> str:
    """All groups' tables."""
    return "\n\n".join(model_table(group) for group in model_groups(rows))


# --- leaks ---------------------------------------------------------------------------------------


def leaks_table(rows: Sequence[Row]) -> str:
    """Forms down, implementations across: the largest error of any model, bold where it leaks."""
    columns = list(dict.fromkeys(row.case["implementation"] for row in rows))
    forms = list(dict.fromkeys(row.case["form"] for row in rows))
    cells: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        cells.setdefault((row.case["form"], row.case["implementation"]), []).append(row)
    notes: dict[str, int] = {}
    header = ["packed batch", *(_shown_implementation(name) for name in columns)]
    lines = [[form, *(_leak_cell(cells[form, name], notes) for name in columns)] for form in forms]
    first = rows[0]
    where, models = first.environment, list(dict.fromkeys(row.case["model"] for row in rows))
    text = (
        f"Largest error of packed logits against each document alone in fp64, over tiny random "
        f"{' and '.join(models)} models (logits up to {_largest_logit(rows):.0f}); "
        f"{first.case['dtype']}, {where.get('gpu') or 'CPU'}, torch {where.get('torch')}, "
        f"transformers {where.get('transformers')}{commit_of(where)}. Bold: documents leak, or the "
        "numbers are false."
        "\n\n"
        f"{markdown(header, lines)}"
    )
    for note, number in notes.items():
        text += f"\n\n({number}) {note}"
    return text


def _largest_logit(rows: Sequence[Row]) -> float:
    return max((row.measures.get("largest_logit", 0.0) for row in rows), default=0.0)


def _shown_implementation(name: str) -> str:
    kind, _, rest = name.partition(":")
    return f"{kind} `{rest}`"


def _leak_cell(rows: Sequence[Row], notes: dict[str, int]) -> str:
    def number(row: Row) -> str:
        return f"({notes.setdefault(row.reason or '', len(notes) + 1)})"

    refused = [row for row in rows if row.status == "unsupported"]
    failed = [row for row in rows if row.status == "failed"]
    measured = [row.measures["max_error"] for row in rows if "max_error" in row.measures]
    parts = []
    if measured:
        worst = max(measured, key=lambda x: math.inf if math.isnan(x) else x)
        leaks = any(row.status == "wrong" for row in rows)
        value = "NaN" if math.isnan(worst) else f"{worst:.1f}" if worst >= 0.1 else f"{worst:.0e}"
        parts.append(f"**{value}**" if leaks else value)
    for row in [*refused, *failed]:
        word = "error" if row.status == "failed" else (row.reason or "").partition(".")[0]
        parts.append(f"{word} {number(row)}")
    return ", ".join(dict.fromkeys(parts))


# --- compare -------------------------------------------------------------------------------------


def compare_section(path: Path) -> str:
    """The tables of a `flexvarlen compare` run, from its rows."""
    from flexvarlen.equivalence.report import read_rows as read_report

    return read_report(path).markdown()


# --- command -------------------------------------------------------------------------------------

SECTIONS: dict[str, Callable[[Sequence[Row]], str]] = {
    "model": model_section,
    "leaks": leaks_table,
    "mask-build": mask_build_section,
    "kernels": kernels_section,
    "capabilities": capabilities_section,
    "compile": compile_section,
    "small-inference": small_inference_section,
    "host-time": host_time_section,
    "families": families_section,
}

# Of a suite: how its rows are grouped, what a group's file is called, how it is drawn.
FIGURES: dict[str, tuple[Callable[..., Any], ...]] = {
    "model": (model_groups, figure_name, model_figure),
    "mask-build": (mask_build_groups, mask_build_figure_name, mask_build_figure),
    "kernels": (kernels_groups, kernels_figure_name, kernels_figure),
}


def main(argv: list[str] | None = None) -> None:
    """Print every suite's tables; write them to the README and draw figures, if asked."""
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m flexvarlen.bench.report", description=summary)
    parser.add_argument("files", nargs="*", type=Path, help="JSON lines of rows")
    parser.add_argument("--compare", type=Path, help="the rows.jsonl of flexvarlen compare")
    parser.add_argument("--readme", type=Path, help="file whose marked sections are replaced")
    parser.add_argument("--figures", type=Path, help="folder for the PNGs")
    args = parser.parse_args(argv)
    rows = read_rows(args.files)
    suites: dict[str, Any] = {}
    for row in rows:
        suites.setdefault(row.suite, []).append(row)
    bodies = {} if args.compare is None else {"compare": compare_section(args.compare)}
    for suite, its_rows in suites.items():
        if suite not in SECTIONS:
            raise ValueError(f"suite must be one of {', '.join(SECTIONS)}, got {suite!r}")
        bodies[suite] = SECTIONS[suite](its_rows)
    for suite, body in bodies.items():
        sys.stdout.write(body + "\n\n")
        if args.readme is not None:
            text = args.readme.read_text()
            args.readme.write_text(replace_between_markers(text, suite, body))
    for suite, its_rows in suites.items():
        if args.figures is not None and suite in FIGURES:
            groups, name, draw = FIGURES[suite]
            for group in groups(its_rows):
                path = args.figures / name(group)
                draw(group, path)
                print(path, file=sys.stderr)


if __name__ == "__main__":
    main()
