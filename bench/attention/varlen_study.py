"""Suite "varlen-study": FlashAttention 2 beside torch's varlen kernel on the 13 cases of a study.

Each case in one call of all its documents and in one call a document ("@serial"; of the calls
together), forward and backward, with every other kernel beside: as its own users call it ("raw:"),
and as a backend of `packed_attention`. SDPA takes documents one by one only.

The study's clock ran over whole calls, so that below about a thousand tokens it saw how fast Python
launches. Here both are told: what the kernels take, and what a call among others takes, which is
the slower of host and device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from flexvarlen.attention.backends.registry import BACKENDS
from flexvarlen.bench.attention.engine import (
    PASSES,
    RAW_PREFIX,
    Inputs,
    Prepare,
    findings_of_all,
    measure_attention,
    ours,
    raw,
    ways_of,
)
from flexvarlen.bench.attention.kernels_tables import kernels_groups
from flexvarlen.bench.attention.raw_kernels import RAW, sdpa_of_one, serial
from flexvarlen.bench.claims import Claim, bullets
from flexvarlen.bench.series import Grid, Measured, by_shape, legend, measured_cases, three_digits
from flexvarlen.bench.series_figure import Panel, Point, figure_path, runs_of, save_lines
from flexvarlen.bench.suite import Case, Finding, Options, Suite
from flexvarlen.drift.op.cases import SUITES as OP_SUITES
from flexvarlen.drift.op.cases import OpCase
from flexvarlen.markdown import markdown
from flexvarlen.rows import Row, one_line

SERIAL = "@serial"
SHAPE = ("num_heads", "head_dim", "dtype", "causal")  # what a table's cases have in common
FA2, SDPA_VARLEN = f"{RAW_PREFIX}fa2", f"{RAW_PREFIX}varlen"
SDPA_SERIAL = f"{RAW_PREFIX}sdpa{SERIAL}"
FLEX = ("flex", f"{RAW_PREFIX}flex")
DENSE = "reference"  # scores of all tokens of the row at once
CLOCKS = ("device", "call")
"""What the kernels take, back to back; the slower of that and the host's time."""

SOURCE = "https://github.com/vllm-project/vllm-omni/issues/4418"
CLAIMED_ON = "A100"
CLAIMED_MS: dict[tuple[int, ...], tuple[float, float]] = {
    (256,): (0.137, 0.070),
    (320,): (0.127, 0.068),
    (320, 320): (0.119, 0.067),
    (299, 1115): (0.179, 0.180),
    (1088, 2368): (0.539, 0.571),
    (1088, 4160): (1.310, 1.441),
    (4160,) * 8: (9.040, 10.015),
}
"""What the study measured, forward, batch: FA2's ms and SDPA varlen's, by the documents' lengths.
The rest of its 13 cases it lists for their drift alone."""
CLAIMS: tuple[tuple[tuple[int, ...], str, str, Claim], ...] = (
    (
        (256,),
        FA2,
        SDPA_VARLEN,
        Claim("SDPA varlen over FA2, one document of 256 tokens", 1.97, CLAIMED_ON, SOURCE),
    ),
    (
        (4160,) * 8,
        SDPA_VARLEN,
        FA2,
        Claim("FA2 over SDPA varlen, 8 documents of 4,160 tokens", 1.11, CLAIMED_ON, SOURCE),
    ),
)
"""Lengths, what is slower, what is faster, and by how much it is said to be."""


@dataclass(frozen=True)
class StudyCase:
    """Documents of the study, in one dtype."""

    op: OpCase
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        return self.op.name

    def data(self) -> dict[str, Any]:
        return self.op.as_row_case(getattr(torch, self.dtype))

    def inputs(self, device: torch.device) -> Inputs:
        """Random q, k, v `[T, num_heads, head_dim]`."""
        op = self.op
        heads, dtype = (op.num_heads, op.num_kv_heads), getattr(torch, self.dtype)
        return Inputs.random(op.lengths, heads, op.head_dim, dtype, device, op.causal)


class VarlenStudy(Suite):
    """The 13 cases, in batch and serial."""

    name: ClassVar[str] = "varlen-study"

    def cases(self, options: Options) -> Sequence[Case]:
        if options.quick or not options.on_gpu:
            small, _ = OP_SUITES["cpu"]
            one = dataclasses.replace(small, name="128", lengths=(128,))
            dtype = "bfloat16" if options.on_gpu else "float32"
            return [StudyCase(one, dtype), StudyCase(small, dtype)]
        # Those with a claim first.
        cases = sorted(OP_SUITES["varlen-study"], key=lambda op: op.lengths not in CLAIMED_MS)
        return [StudyCase(op) for op in cases]

    def variants(self, case: Case, options: Options) -> Sequence[str]:
        assert isinstance(case, StudyCase)
        left_out = (DENSE,) if options.on_gpu else FLEX  # which takes long to compile there
        names = [name for name in known_ways() if name.partition("@")[0] not in left_out]
        if len(case.op.lengths) == 1:  # then batch and serial are one call
            return [name for name in names if not name.endswith(SERIAL) or name == SDPA_SERIAL]
        return names

    def measure(self, case: Case, variants: Sequence[str], options: Options) -> Sequence[Finding]:
        assert isinstance(case, StudyCase)
        ways = ways_of(variants, known_ways())
        try:
            inputs = case.inputs(options.device)
        except torch.OutOfMemoryError as error:
            return findings_of_all(ways, PASSES, "oom", one_line(error))
        return measure_attention(inputs, ways, options)

    def section(self, rows: Sequence[Row]) -> str:
        return "\n\n".join(
            _section(own) for group in kernels_groups(rows) for own in by_shape(group, *SHAPE)
        )

    def figures(self, rows: Sequence[Row], folder: Path) -> Sequence[Path]:
        groups = (by_shape(group, *SHAPE)[0] for group in kernels_groups(rows))
        return [_machine_figure(group, folder) for group in groups]


SUITE = VarlenStudy()


def known_ways() -> dict[str, Prepare]:
    """Raw kernels, then backends, then both a call a document."""
    first = (FA2, SDPA_VARLEN)
    names = [*first, *(RAW_PREFIX + name for name in RAW if RAW_PREFIX + name not in first)]
    batch = {name: raw(name.removeprefix(RAW_PREFIX)) for name in names}
    batch |= {name: ours(name) for name in BACKENDS}
    one_by_one = {f"{name}{SERIAL}": serial(prepare) for name, prepare in batch.items()}
    return batch | one_by_one | {SDPA_SERIAL: serial(sdpa_of_one)}


# --- tables --------------------------------------------------------------------------------------


def ms_of(each: Measured, variant: str, pass_: str, clock: str) -> float | None:
    """Milliseconds, p50: of the device, or of a call among others."""
    device = each.ms(variant, pass_)
    host = each.value(variant, pass_, "host_ms_p50") if clock == "call" else None
    return device if device is None or host is None else max(device, host)


def ratio_of(each: Measured, slow: str, fast: str, pass_: str, clock: str) -> float | None:
    """How many times as long one takes as the other; None unless both were timed."""
    if clock == "device":
        return each.ratio(slow, fast, pass_)
    both = ms_of(each, slow, pass_, clock), ms_of(each, fast, pass_, clock)
    return None if both[0] is None or not both[1] else both[0] / both[1]


def sorted_cases(rows: Sequence[Row]) -> list[Measured]:
    """By the tokens of the row."""
    return sorted(measured_cases(rows), key=lambda each: sum(each.case["lengths"]))


def _section(rows: Sequence[Row]) -> str:
    cases = sorted_cases(rows)
    shape = cases[0].case
    said = (
        f"{shape['num_heads']} heads, head_dim {shape['head_dim']}, {shape['dtype']}, "
        f"{'causal' if shape['causal'] else 'not causal'}; {runs_of(rows)}. Batch: one call of all "
        "documents; serial: a call a document, of all calls together. “Device” is what the kernels "
        "take, back to back; “call” the slower of that and the host's time, as a program that is "
        "not compiled meets it."
    )
    timed_host = any("host_ms_p50" in row.measures for row in rows)
    clocks = CLOCKS if timed_host else CLOCKS[:1]  # the CPU has one
    parts = [said, who_is_faster(cases)]
    parts += [study_table(cases, clock) for clock in clocks]
    parts += [others_table(cases, clock, form) for clock in clocks for form in (False, True)]
    return "\n\n".join(parts)


def who_is_faster(cases: Sequence[Measured]) -> str:
    """In how many cases SDPA varlen takes less time than FA2, by pass and clock."""
    sentences = []
    for pass_ in PASSES:
        for clock in CLOCKS:
            ratios = [ratio_of(each, SDPA_VARLEN, FA2, pass_, clock) for each in cases]
            known = [ratio for ratio in ratios if ratio is not None]
            if known:
                faster = sum(ratio < 1 for ratio in known)
                sentences.append(
                    f"{pass_.capitalize()}, batch, {clock} time: SDPA varlen is faster in {faster} "
                    f"of {len(known)} cases, {min(known):.2f} to {max(known):.2f} of FA2's time."
                )
    return bullets(sentences) or "FA2 and SDPA varlen were not both timed in any case."


def study_table(cases: Sequence[Measured], clock: str) -> str:
    """FA2 beside SDPA varlen: batch, serial, and the ratio of their times."""
    header = [
        *("documents", "pass", "FA2 batch ms", "FA2 serial ms"),
        *("SDPA varlen batch ms", "SDPA varlen serial ms"),
        *("SDPA varlen : FA2, batch", "serial", f"claimed, {CLAIMED_ON}"),
    ]
    lines = []
    for pass_ in PASSES:
        for each in cases:
            both = ("", SERIAL)
            times = [
                ms_of(each, name + form, pass_, clock)
                for name in (FA2, SDPA_VARLEN)
                for form in both
            ]
            marks = [
                each.mark(name + form, pass_) if clock == "device" else ""
                for name in (FA2, SDPA_VARLEN)
                for form in both
            ]
            ratios = [ratio_of(each, SDPA_VARLEN + x, FA2 + x, pass_, clock) for x in both]
            claimed = CLAIMED_MS.get(tuple(each.case["lengths"])) if pass_ == "forward" else None
            said = "" if claimed is None else f"{claimed[1] / claimed[0]:.2f}"
            shown = [
                "–" if x is None else three_digits(x) + mark
                for x, mark in zip(times, marks, strict=True)
            ]
            shown += ["–" if x is None else f"{x:.2f}" for x in ratios]
            lines.append([each.case["name"], pass_, *shown, said])
    table = markdown(header, lines)
    return f"{clock.capitalize()} time, p50:\n\n{table}{legend(table)}"


def others_table(cases: Sequence[Measured], clock: str, one_by_one: bool) -> str:
    """Every variant, in batch or one call a document, the best of a line bold."""
    wanted = [
        Measured(
            each.case,
            {key: row for key, row in each.rows.items() if key[0].endswith(SERIAL) == one_by_one},
        )
        for each in cases
    ]
    grid = Grid(
        ("documents", "pass"),
        lambda each, pass_: [each.case["name"], pass_],
        lambda each, variant, pass_: ms_of(each, variant, pass_, clock),
        device=clock == "device",
    )
    form = "serial, all calls together" if one_by_one else "batch"
    return f"All, {form}, ms of {clock} time, p50:\n\n{grid.markdown(wanted)}"


# --- figure --------------------------------------------------------------------------------------


def _machine_figure(rows: Sequence[Row], folder: Path) -> Path:
    cases = sorted_cases(rows)
    grid = [
        [
            Panel(f"{pass_}, {form}", "device ms", _points(cases, pass_, form == "serial"))
            for form in ("batch", "serial")
        ]
        for pass_ in PASSES
    ]
    shape = cases[0].case
    what = (
        f"The study's documents, {shape['num_heads']} heads, head_dim {shape['head_dim']}, "
        f"{shape['dtype']}, forward and backward (band: p20–p80)"
    )
    return save_lines(
        grid,
        figure_path(folder, VarlenStudy.name, rows),
        title=f"{what}\n{runs_of(rows)}",
        xlabel="tokens of all documents (log2)",
    )


def _points(cases: Sequence[Measured], pass_: str, one_by_one: bool) -> list[Point]:
    points = []
    for each in cases:
        for variant, own in each.rows:
            if own != pass_ or variant.endswith(SERIAL) != one_by_one:
                continue
            x, name = sum(each.case["lengths"]), variant.removesuffix(SERIAL)
            status = each.status(variant, pass_)
            if status != "ok":
                points.append(Point(name, x, status=status))
                continue
            y, low, high = (each.ms(variant, pass_, at) for at in ("p50", "p20", "p80"))
            points.append(Point(name, x, y, low, high))
    return points
