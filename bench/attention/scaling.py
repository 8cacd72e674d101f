"""The suite "scaling": attention that holds all scores, and attention that does not, as rows grow.

    flexvarlen bench scaling

A batch of 8 documents of 512 to 16,384 tokens each, 32 heads, head_dim 64: standard attention
(what papers compare with: matmul, softmax, matmul in the dtype), transformers' eager attention
(softmax in fp32), SDPA and the fixed-length kernels on the batch; flexvarlen's packed backends on
the same tokens in one row. Forward and backward apart, their time and peak memory, in all and a
token; until memory runs out, which is a row too.

Source of the claims: references/benchmarks.md of the flash-attention skill, as it stands in
NousResearch/hermes-agent, "Forward pass time (milliseconds, batch=8, heads=32, dim=64)": at 8,192
tokens 151.4 ms standard, 47.8 ms FA2 and 27.1 ms FA3 in FP16 on an H100, 218.5 ms and 66.2 ms on
an A100.
It does not say under which mask (both are measured here), by which calls, or in which dtype all but
FA3 are. Its figures do not agree with one another, so that the ratios alone are compared: 7.2 ms at
4,096 tokens are 153 TFLOP/s of this shape, where it has 740, and the scores of 8,192 tokens take
34 GB in two bytes, where it has 2 GB.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from flexvarlen.bench.attention.engine import (
    PASSES,
    Inputs,
    findings_of_all,
    measure_attention,
    ours,
    ways_of,
)
from flexvarlen.bench.attention.kernels_tables import kernels_groups
from flexvarlen.bench.attention.padded import FIXED, PACKED, PACKED_ON_CPU
from flexvarlen.bench.attention.sdpa_ways import with_kernels
from flexvarlen.bench.claims import Claim
from flexvarlen.bench.series import Grid, Measured, by_shape, measured_cases
from flexvarlen.bench.series_figure import Panel, Point, figure_path, runs_of, save_lines
from flexvarlen.bench.suite import Case, Finding, Options, Suite
from flexvarlen.rows import Row, one_line

TOKENS = (512, 1024, 2048, 4096, 8192, 16_384)
CLAIMED_TOKENS = 8192
SHAPE = ("batch", "num_heads", "head_dim")  # what a table's cases have in common

SOURCE = "the flash-attention skill's benchmarks.md"
CLAIMS = (
    ("bfloat16", "fixed:fa2", Claim("FA2 over standard attention", 3.2, "H100", SOURCE)),
    ("float16", "fixed:fa3", Claim("FA3 in FP16 over standard attention", 5.6, "H100", SOURCE)),
    ("bfloat16", "fixed:fa2", Claim("FA2 over standard attention", 3.3, "A100", SOURCE)),
)
"""Dtype and variant of what is claimed, at 8,192 tokens, forward."""


@dataclass(frozen=True)
class ScalingCase:
    """A batch of documents of `tokens` tokens each."""

    tokens: int
    causal: bool
    dtype: str = "bfloat16"
    batch: int = 8
    num_heads: int = 32
    head_dim: int = 64

    @property
    def name(self) -> str:
        """For `--cases`.

        >>> ScalingCase(512, True).name
        'bfloat16-causal-t512'
        """
        return f"{self.dtype}-{'causal' if self.causal else 'full'}-t{self.tokens}"

    def data(self) -> dict[str, Any]:
        return asdict(self)

    def inputs(self, device: torch.device) -> Inputs:
        """Random q, k, v `[batch · tokens, num_heads, head_dim]`."""
        shape = (self.batch, self.tokens, self.num_heads, self.head_dim)
        return Inputs.equally_long(*shape, self.dtype, device, self.causal)


class Scaling(Suite):
    """Standard, eager, fixed-length and packed attention over the tokens of a document."""

    name = "scaling"

    def cases(self, options: Options) -> Sequence[Case]:
        masks = (False, True)
        if options.quick or not options.on_gpu:
            small: dict[str, Any] = {"batch": 2, "num_heads": 2, "head_dim": 16}
            return [
                *(ScalingCase(tokens, causal, **small) for tokens in (32, 64) for causal in masks),
                ScalingCase(64, True, "float16", **small),
            ]
        # The size that is claimed first, the largest last.
        claimed = [
            ScalingCase(CLAIMED_TOKENS, causal, dtype)
            for dtype in ("bfloat16", "float16")
            for causal in masks
        ]
        others = (tokens for tokens in TOKENS if tokens != CLAIMED_TOKENS)
        return [*claimed, *(ScalingCase(tokens, causal) for tokens in others for causal in masks)]

    def variants(self, case: Case, options: Options) -> Sequence[str]:
        packed = PACKED if options.on_gpu else PACKED_ON_CPU
        # Compiling flex_attention for the CPU takes longer than all else together.
        left_out = () if options.on_gpu else ("fixed:flex",)
        return [*(name for name in FIXED if name not in left_out), *packed]

    def measure(self, case: Case, variants: Sequence[str], options: Options) -> Sequence[Finding]:
        assert isinstance(case, ScalingCase)
        packed = {name: ours(name) for name in (*PACKED, *PACKED_ON_CPU)}
        ways = ways_of(variants, FIXED | packed)
        try:
            inputs = case.inputs(options.device)
        except torch.OutOfMemoryError as error:
            return findings_of_all(ways, PASSES, "oom", one_line(error))
        findings = measure_attention(inputs, ways, options, peak=True)
        default = {name: way for name, way in ways.items() if name == "sdpa:default"}
        return with_kernels(findings, inputs, default, needs_grad=True)

    def section(self, rows: Sequence[Row]) -> str:
        return "\n\n".join(
            _section(own) for group in kernels_groups(rows) for own in by_shape(group, *SHAPE)
        )

    def figures(self, rows: Sequence[Row], folder: Path) -> Sequence[Path]:
        groups = (by_shape(group, *SHAPE)[0] for group in kernels_groups(rows))
        return [path for group in groups for path in _machine_figures(group, folder)]


SUITE = Scaling()


# --- tables --------------------------------------------------------------------------------------


def _tokens(each: Measured) -> int:
    """Of the whole batch."""
    return int(each.case["tokens"] * each.case["batch"])


def _us_a_token(each: Measured, variant: str, pass_: str, at: str = "p50") -> float | None:
    ms = each.ms(variant, pass_, at)
    return None if ms is None else 1e3 * ms / _tokens(each)


def _peak_mib(each: Measured, variant: str, pass_: str) -> float | None:
    found: float | None = each.value(variant, pass_, "peak_mib")
    return found


def _kib_a_token(each: Measured, variant: str, pass_: str) -> float | None:
    mib = _peak_mib(each, variant, pass_)
    return None if mib is None else 1024 * mib / _tokens(each)


def sorted_cases(rows: Sequence[Row]) -> list[Measured]:
    """By dtype, mask and tokens."""
    cases = measured_cases(rows)
    return sorted(cases, key=lambda x: (x.case["dtype"], x.case["causal"], x.case["tokens"]))


def mask_of(each: Measured) -> str:
    return "causal" if each.case["causal"] else "full"


HEADER = ("pass", "dtype", "mask", "tokens a document", "SDPA took")


def _line(each: Measured, pass_: str) -> list[str]:
    took = each.value("sdpa:default", pass_, "sdpa_kernel")
    return [pass_, each.case["dtype"], mask_of(each), f"{each.case['tokens']:,}", took or "–"]


def _section(rows: Sequence[Row]) -> str:
    cases = sorted_cases(rows)
    shape = cases[0].case
    said = (
        f"Batch {shape['batch']}, {shape['num_heads']} heads, head_dim {shape['head_dim']}; "
        f"{runs_of(rows)}. `standard`: matmul, softmax, matmul in the dtype; `eager`: "
        "transformers' own. These, `sdpa:default` and `fixed:…` on `[B, S, …]`, all others on one "
        "packed row."
    )
    memory = partial(Grid, HEADER, _line, device=False, clocked=False)
    tables = [
        ("Device ms, p50, the best of a line bold", Grid(HEADER, _line, each_ms)),
        ("Device µs a token, p50", Grid(HEADER, _line, _us_a_token)),
    ]
    if any(_peak_mib(each, *key) is not None for each in cases for key in each.rows):
        tables += [
            ("Peak memory: MiB by which a call grows", memory(_peak_mib)),
            ("Peak memory, KiB a token", memory(_kib_a_token)),
        ]
    shown = [f"{title}:\n\n{grid.markdown(cases)}" for title, grid in tables]
    return "\n\n".join([said, *shown, out_of_memory(cases)])


def each_ms(each: Measured, variant: str, pass_: str) -> float | None:
    """Device milliseconds, p50."""
    return each.ms(variant, pass_)


def out_of_memory(cases: Sequence[Measured]) -> str:
    """From how many tokens on each variant has no room."""
    first: dict[tuple[str, str], int] = {}
    for each in cases:
        for (variant, pass_), row in each.rows.items():
            if row.status == "oom":
                tokens = each.case["tokens"]
                key = (variant, pass_)
                first[key] = min(first.get(key, tokens), tokens)
    if not first:
        return "Nothing ran out of memory."
    said = [f"`{name}` {pass_} at {tokens:,}" for (name, pass_), tokens in first.items()]
    return f"Out of memory, at the fewest tokens a document: {', '.join(said)}."


# --- figures -------------------------------------------------------------------------------------


def _points(each: Measured, pass_: str, memory: bool) -> list[Point]:
    points = []
    for variant in each.variants():
        if (variant, pass_) not in each.rows:
            continue
        value = _kib_a_token if memory else _us_a_token
        x, y = each.case["tokens"], value(each, variant, pass_)
        if y is None:
            points.append(Point(variant, x, status=each.status(variant, pass_)))
            continue
        low, high = (
            (None, None)
            if memory
            else (_us_a_token(each, variant, pass_, at) for at in ("p20", "p80"))
        )
        points.append(Point(variant, x, y, low, high))
    return points


def _machine_figures(rows: Sequence[Row], folder: Path) -> list[Path]:
    cases = [each for each in sorted_cases(rows) if each.case["dtype"] == "bfloat16"]
    if not cases:
        return []
    shape = cases[0].case
    drawn = []
    for name, label, memory in (
        ("scaling", "device µs a token", False),
        ("scaling-memory", "peak KiB a token", True),
    ):
        if memory and not any(_peak_mib(each, *key) for each in cases for key in each.rows):
            continue
        grid = [
            [
                Panel(
                    f"{pass_}, {'causal' if causal else 'full'}",
                    label,
                    [
                        point
                        for each in cases
                        if each.case["causal"] is causal
                        for point in _points(each, pass_, memory)
                    ],
                )
                for causal in (False, True)
            ]
            for pass_ in PASSES
        ]
        what = (
            f"Attention of {shape['batch']} equal documents, {shape['num_heads']} heads, head_dim "
            f"{shape['head_dim']}, bfloat16, forward and backward"
        )
        band = "" if memory else " (band: p20–p80)"
        drawn.append(
            save_lines(
                grid,
                figure_path(folder, name, rows),
                title=f"{what}{band}\n{runs_of(rows)}",
                xlabel="tokens a document (log2)",
            )
        )
    return drawn
