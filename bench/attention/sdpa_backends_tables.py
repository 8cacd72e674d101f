"""Tables and figure of the suite "sdpa-backends", from rows alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flexvarlen.bench.attention.kernels_tables import kernels_groups
from flexvarlen.bench.attention.sdpa_backends import DEFAULT, SDPA
from flexvarlen.bench.series import (
    PASSES,
    Grid,
    Measured,
    all_variants,
    measured_cases,
    three_digits,
)
from flexvarlen.bench.series_figure import Panel, Point, figure_path, runs_of, save_lines
from flexvarlen.markdown import markdown
from flexvarlen.rows import Row


def sdpa_section(rows: Sequence[Row]) -> str:
    """Every machine's tables."""
    return "\n\n".join(_machine_section(group) for group in kernels_groups(rows))


def sdpa_figures(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Every machine's figure."""
    return [_machine_figure(group, folder) for group in kernels_groups(rows)]


def mask_of(each: Measured) -> str:
    return "causal" if each.case["causal"] else "full"


def _shape(each: Measured) -> list[str]:
    case = each.case
    return [str(case["head_dim"]), mask_of(each), f"{case['batch']} × {case['tokens']:,}"]


def _line(each: Measured, pass_: str) -> list[str]:
    took = each.value(DEFAULT, pass_, "sdpa_kernel")
    return [pass_, *_shape(each), took or "–"]


def sorted_cases(rows: Sequence[Row]) -> list[Measured]:
    """By head_dim, mask and tokens."""
    cases = measured_cases(rows)
    return sorted(cases, key=lambda x: (x.case["head_dim"], x.case["causal"], x.case["tokens"]))


def _machine_section(rows: Sequence[Row]) -> str:
    cases = sorted_cases(rows)
    dtypes = ", ".join(dict.fromkeys(each.case["dtype"] for each in cases))
    header = ("pass", "head_dim", "mask", "documents", "default took")
    times = Grid(header, _line, lambda each, name, pass_: each.ms(name, pass_)).markdown(cases)
    said = f"Device ms, p50, the best of a line bold; {dtypes}; {runs_of(rows)}"
    return "\n\n".join([f"{said}:\n\n{times}", equality_of(cases)])


def equality_of(cases: Sequence[Measured]) -> str:
    """The largest difference of each kernel's outputs to fp64 and to each of the others."""
    names = [name for name in all_variants(cases) if name in SDPA]
    lines = []
    for name in names:
        measures = [each.rows[name, "forward"].measures for each in cases if _timed(each, name)]
        errors = [x["max_abs_error"] for x in measures if "max_abs_error" in x]
        line = [f"`{name}`", three_digits(max(errors)) if errors else "–"]
        for other in names:
            apart = [
                x["max_abs_difference"][other]
                for x in measures
                if other in x.get("max_abs_difference", {})
            ]
            line.append("" if other == name else _largest(apart))
        lines.append(line)
    header = ["", "fp64, sampled", *(f"`{name}`" for name in names)]
    said = "Largest absolute difference of outputs over all cases (0: the same bits)"
    return f"{said}:\n\n{markdown(header, lines)}"


def _timed(each: Measured, name: str) -> bool:
    row = each.rows.get((name, "forward"))
    return row is not None and row.status == "ok"


def _largest(apart: Sequence[float]) -> str:
    if not apart:
        return "–"
    return "0" if max(apart) == 0 else three_digits(max(apart))


# --- figure --------------------------------------------------------------------------------------


def _point(each: Measured, variant: str, pass_: str) -> Point:
    middle, slow, fast = (each.tflops(variant, pass_, at) for at in ("p50", "p80", "p20"))
    status = each.status(variant, pass_)
    return Point(variant, each.case["tokens"], middle, slow, fast, status)


def _machine_figure(rows: Sequence[Row], folder: Path) -> Path:
    cases = sorted_cases(rows)
    kinds = list(dict.fromkeys((each.case["head_dim"], each.case["causal"]) for each in cases))
    grid = [
        [
            Panel(
                f"{pass_}, head_dim {head_dim}, {'causal' if causal else 'full'}",
                "TFLOP/s of unmasked work",
                [
                    _point(each, variant, pass_)
                    for each in cases
                    if (each.case["head_dim"], each.case["causal"]) == (head_dim, causal)
                    for variant in each.variants()
                    if (variant, pass_) in each.rows
                ],
            )
            for head_dim, causal in kinds
        ]
        for pass_ in PASSES
    ]
    dtypes = ", ".join(dict.fromkeys(each.case["dtype"] for each in cases))
    what = f"SDPA's kernels and others on equal documents, {dtypes}, forward and backward"
    return save_lines(
        grid,
        figure_path(folder, "sdpa-backends", rows),
        title=f"{what}, device time (band: p20–p80)\n{runs_of(rows)}",
        xlabel="tokens a document (log2)",
    )
