"""Tables and figure of the suite "padding", from rows alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flexvarlen.bench.attention.engine import RAW_PREFIX
from flexvarlen.bench.attention.kernels_tables import kernels_groups
from flexvarlen.bench.attention.padding import MASKED, UNMASKED, PaddingCase
from flexvarlen.bench.claims import Claim
from flexvarlen.bench.series import (
    PASSES,
    Grid,
    Measured,
    by_shape,
    legend,
    measured_cases,
    three_digits,
)
from flexvarlen.bench.series_figure import Panel, Point, figure_path, machine_of, runs_of, save_dots
from flexvarlen.markdown import markdown
from flexvarlen.rows import Row

SHAPE = ("batch", "max_length", "embedding", "num_heads", "dtype")  # what a table's cases share
CLAIMED_LENGTH = PaddingCase("multiples", causal=False).max_length
CLAIMED_MS = {"varlen": 0.218, "padded": 0.432}
CLAIM = Claim(
    "varlen over padded SDPA",
    round(CLAIMED_MS["padded"] / CLAIMED_MS["varlen"], 2),
    "H100",
    "pytorch/pytorch#164502",
)
HEADER = ("", "pass", "mask", "documents", "padding", "masked SDPA took")
VARLEN = {"attention": f"{RAW_PREFIX}varlen", "module": "varlen"}
"""The source's `varlen_attn`, by part: in the module behind flexvarlen's backend."""


def padding_section(rows: Sequence[Row]) -> str:
    """Every machine's tables."""
    return "\n\n".join(
        _section(own) for group in kernels_groups(rows) for own in by_shape(group, *SHAPE)
    )


def padding_figures(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Every machine's figure."""
    groups = (by_shape(group, *SHAPE)[0] for group in kernels_groups(rows))
    return [_machine_figure(group, folder) for group in groups]


def mask_of(each: Measured) -> str:
    return "causal" if each.case["causal"] else "full"


def _line(each: Measured, pass_: str) -> list[str]:
    case = each.case
    padding = f"{100 * case['sparsity']:.0f}%"
    took = each.value(MASKED, pass_, "sdpa_kernel")
    return [case["part"], pass_, mask_of(each), case["documents"], padding, took or "–"]


def _section(rows: Sequence[Row]) -> str:
    cases = measured_cases(rows)
    shape = cases[0].case
    times = Grid(HEADER, _line, lambda each, name, pass_: each.ms(name, pass_)).markdown(cases)
    said = (
        f"Device ms, p50, the best of a line bold; {shape['batch']} documents of up to "
        f"{shape['max_length']:,} tokens, embedding {shape['embedding']:,}, {shape['num_heads']} "
        f"heads, {shape['dtype']}; {runs_of(rows)}"
    )
    own = claimed_ms(cases, rows) if shape["max_length"] == CLAIMED_LENGTH else ""
    parts = [own, unmasked_is_wrong(cases), f"{said}:\n\n{times}", gains_of(cases)]
    return "\n\n".join(part for part in parts if part)


def _case(cases: Sequence[Measured], part: str, documents: str) -> Measured | None:
    """Of those that are not causal, as the source's were not."""
    for each in cases:
        known = (each.case["part"], each.case["documents"], each.case["causal"])
        if known == (part, documents, False):
            return each
    return None


def claimed_ms(cases: Sequence[Measured], rows: Sequence[Row]) -> str:
    """The source's milliseconds beside those of its documents; "" where they were not measured."""
    lines = []
    for part, varlen in VARLEN.items():
        packed, full = _case(cases, part, "multiples"), _case(cases, part, "full-length")
        if packed is None:
            continue
        lines.append([part, "varlen", *_both(CLAIMED_MS["varlen"], packed, varlen)])
        for name, where in ((MASKED, packed), (UNMASKED, full)):
            lines.append([part, name, *_both(CLAIMED_MS["padded"], where, name)])
    if not lines:
        return ""
    header = ["", "forward", f"claimed ms, {CLAIM.gpu}", f"ms, {machine_of(rows)}"]
    table = markdown(header, lines)
    said = "What is claimed, in milliseconds (unmasked: the same call on full lines)"
    return f"{said}:\n\n{table}{legend(table)}"


def _both(claimed: float, where: Measured | None, name: str) -> list[str]:
    ms = None if where is None else where.ms(name, "forward")
    if where is None or ms is None:
        return [f"{claimed:g}", "–"]
    return [f"{claimed:g}", three_digits(ms) + where.mark(name, "forward")]


def unmasked_is_wrong(cases: Sequence[Measured]) -> str:
    """In how many of the cases padded SDPA without a mask was not timed, being wrong."""
    rows = [row for each in cases if (row := each.rows.get((UNMASKED, "forward"))) is not None]
    untimed = {row.reason for row in rows if row.status in ("unsupported", "wrong")}
    count = sum(row.status in ("unsupported", "wrong") for row in rows)
    why = f": {'; '.join(sorted(x for x in untimed if x))}" if count else ""
    return f"Padded SDPA without a mask is not timed in {count} of {len(rows)} cases{why}."


def gains_of(cases: Sequence[Measured]) -> str:
    """How many times as fast as masked padded SDPA each variant is."""

    def ratio(each: Measured, name: str, pass_: str) -> float | None:
        return each.ratio(MASKED, name, pass_)

    table = Grid(HEADER, _line, ratio, "max").markdown(cases)
    return f"Times as fast as masked padded SDPA:\n\n{table}"


# --- figure --------------------------------------------------------------------------------------


def _points(each: Measured, pass_: str) -> list[Point]:
    points = []
    for variant in each.variants():
        if (variant, pass_) not in each.rows:
            continue
        status = each.status(variant, pass_)
        if status != "ok":
            points.append(Point(variant, 0, status=status))
            continue
        low, middle, high = (each.ms(variant, pass_, at) for at in ("p20", "p50", "p80"))
        points.append(Point(variant, 0, middle, low, high))
    return points


def _machine_figure(rows: Sequence[Row], folder: Path) -> Path:
    every = measured_cases(rows)
    cases = [each for each in every if each.case["part"] == "attention"] or every
    grid = [
        [
            Panel(
                f"{pass_}, {mask_of(each)}, {each.case['documents']}\n"
                f"({100 * each.case['sparsity']:.0f}% padding)",
                "",
                _points(each, pass_),
            )
            for each in cases
        ]
        for pass_ in PASSES
    ]
    shape = cases[0].case
    what = (
        f"{shape['part'].capitalize()}, packed and padded: {shape['batch']} documents, lines of "
        f"{shape['max_length']:,} tokens, {shape['num_heads']} heads, {shape['dtype']}"
    )
    return save_dots(
        grid,
        figure_path(folder, "padding", rows),
        title=f"{what}, forward and backward (bar: p20–p80)\n{runs_of(rows)}",
        xlabel="device ms (log2)",
    )
