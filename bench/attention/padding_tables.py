"""Tables and figure of the suite "padding", from rows alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flexvarlen.bench.attention.engine import RAW_PREFIX
from flexvarlen.bench.attention.kernels_tables import kernels_groups
from flexvarlen.bench.attention.padding import MASKED, UNMASKED
from flexvarlen.bench.claims import Claim, Found, bullets
from flexvarlen.bench.series import PASSES, Grid, Measured, measured_cases, three_digits
from flexvarlen.bench.series_figure import (
    Panel,
    Point,
    figure_path,
    machine_of,
    runs_of,
    save_dots,
)
from flexvarlen.markdown import markdown
from flexvarlen.rows import Row

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
    return "\n\n".join(_machine_section(group) for group in kernels_groups(rows))


def padding_figures(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Every machine's figure."""
    return [_machine_figure(group, folder) for group in kernels_groups(rows)]


def mask_of(each: Measured) -> str:
    return "causal" if each.case["causal"] else "full"


def _line(each: Measured, pass_: str) -> list[str]:
    case = each.case
    padding = f"{100 * case['sparsity']:.0f}%"
    took = each.value(MASKED, pass_, "sdpa_kernel")
    return [case["part"], pass_, mask_of(each), case["documents"], padding, took or "–"]


def _machine_section(rows: Sequence[Row]) -> str:
    cases = measured_cases(rows)
    shape = cases[0].case
    times = Grid(HEADER, _line, lambda each, name, pass_: each.ms(name, pass_)).markdown(cases)
    said = (
        f"Device ms, p50, the best of a line bold; {shape['batch']} documents of up to "
        f"{shape['max_length']:,} tokens, embedding {shape['embedding']:,}, {shape['num_heads']} "
        f"heads, {shape['dtype']}; {runs_of(rows)}"
    )
    return "\n\n".join([claim_of(cases, rows), f"{said}:\n\n{times}", gains_of(cases)])


def _case(cases: Sequence[Measured], part: str, documents: str) -> Measured | None:
    """Of those that are not causal, as the source's were not."""
    for each in cases:
        known = (each.case["part"], each.case["documents"], each.case["causal"])
        if known == (part, documents, False):
            return each
    return None


def claim_of(cases: Sequence[Measured], rows: Sequence[Row]) -> str:
    """The claim beside what was measured: ratios, and milliseconds in a table."""
    machine = rows[0].environment.get("gpu") or rows[0].environment.get("cpu") or machine_of(rows)
    found, lines = [], []
    for part, varlen in VARLEN.items():
        packed, full = _case(cases, part, "multiples"), _case(cases, part, "full-length")
        if packed is None:
            found.append(Found(part, None, "it was not measured"))
            continue
        varlen_ms = packed.ms(varlen, "forward")
        lines.append([part, "varlen", *_both(CLAIMED_MS["varlen"], varlen_ms)])
        for name, where in ((MASKED, packed), (UNMASKED, full)):
            padded_ms = None if where is None else where.ms(name, "forward")
            ratio = None if padded_ms is None or not varlen_ms else padded_ms / varlen_ms
            why = packed.why_none([varlen], "forward")
            if where is None:
                why = "documents of full length were not measured"
            elif padded_ms is None:
                why = "; ".join(x for x in (why, where.why_none([name], "forward")) if x)
            found.append(Found(f"{part}, {name.partition(':')[2]} SDPA", ratio, why))
            lines.append([part, name, *_both(CLAIMED_MS["padded"], padded_ms)])
    table = markdown(["", "forward", f"claimed ms, {CLAIM.gpu}", f"ms, {machine}"], lines)
    return (
        f"{bullets([CLAIM.sentence(found, str(machine)), unmasked_is_wrong(cases)])}\n\n"
        f"What is claimed, in milliseconds (unmasked: the same call on full lines):\n\n{table}"
    )


def _both(claimed: float, measured: float | None) -> list[str]:
    return [f"{claimed:g}", "–" if measured is None else three_digits(measured)]


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
        row = each.rows.get((variant, pass_))
        if row is None:
            continue
        low, middle, high = (each.ms(variant, pass_, at) for at in ("p20", "p50", "p80"))
        points.append(Point(variant, 0, middle, low, high, row.status))
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
