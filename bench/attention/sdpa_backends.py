"""The suite "sdpa-backends": the kernels behind `scaled_dot_product_attention`, forced one by one.

    flexvarlen bench sdpa-backends

Default, flash, memory-efficient, cuDNN and math on a batch of equally long documents; beside them
FA2's own fixed-length call, and flexvarlen's packed backends on the same tokens in one row. Which
kernel a call really ran is seen from the operator that it dispatched to (`sdpa_kernel` in the
rows), not from what was asked for. All outputs are held against fp64 and, pair by pair, against one
another.

A forced call pays for the switch that forces it (`sdpa_kernel`, some microseconds of the host's
time, none of the device's).

The claim, that SDPA is within 6% of FA2, came without a source that could be found: neither the
GPU nor the shape, the pass or the kernel that SDPA took are known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flexvarlen.bench.attention.accuracy import Oracle
from flexvarlen.bench.attention.engine import (
    PASSES,
    Inputs,
    Prepare,
    findings_of_all,
    measure_attention,
    ours,
    ways_of,
)
from flexvarlen.bench.attention.padded import FIXED, PACKED, PACKED_ON_CPU
from flexvarlen.bench.attention.sdpa_ways import (
    FORCED,
    noted_forward,
    sdpa,
    stop_if_lost,
    with_measures,
)
from flexvarlen.bench.suite import Case, Finding, Options, Suite
from flexvarlen.rows import Row, one_line

DEFAULT, FA2 = "sdpa:default", "fixed:fa2"
CLAIMED_WITHIN = 0.06  # of FA2's time

SDPA: dict[str, Prepare] = {
    DEFAULT: FIXED[DEFAULT],
    **{name: partial(sdpa, backend=backend) for name, backend in FORCED.items()},
}
"""The calls of `scaled_dot_product_attention`, by variant."""


@dataclass(frozen=True)
class SdpaCase:
    """A batch of documents of `tokens` tokens each."""

    tokens: int
    batch: int
    num_heads: int
    head_dim: int
    causal: bool
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        """For `--cases`.

        >>> SdpaCase(1024, 16, 32, 64, True).name
        'd64-causal-16x1024'
        """
        mask = "causal" if self.causal else "full"
        return f"d{self.head_dim}-{mask}-{self.batch}x{self.tokens}"

    def data(self) -> dict[str, Any]:
        return asdict(self)

    def inputs(self, device: torch.device) -> Inputs:
        """Random q, k, v `[batch · tokens, num_heads, head_dim]`."""
        shape = (self.batch, self.tokens, self.num_heads, self.head_dim)
        return Inputs.equally_long(*shape, self.dtype, device, self.causal)


class SdpaBackends(Suite):
    """SDPA's kernels, forced one at a time."""

    name = "sdpa-backends"

    def cases(self, options: Options) -> Sequence[Case]:
        if options.quick or not options.on_gpu:
            return [SdpaCase(48, 2, 2, 16, causal) for causal in (False, True)]
        # 16,384 tokens and 2,048 channels each, but two documents at least.
        sizes = [(1024, 16), (2048, 8), (4096, 4), (8192, 2), (16_384, 2)]
        return [
            SdpaCase(tokens, batch, 2048 // head_dim, head_dim, causal)
            for tokens, batch in sizes
            for head_dim in (64, 128)
            for causal in (False, True)
        ]

    def variants(self, case: Case, options: Options) -> Sequence[str]:
        return [*SDPA, FA2, *(PACKED if options.on_gpu else PACKED_ON_CPU)]

    def measure(self, case: Case, variants: Sequence[str], options: Options) -> Sequence[Finding]:
        assert isinstance(case, SdpaCase)
        packed = {name: ours(name) for name in (*PACKED, *PACKED_ON_CPU)}
        ways = ways_of(variants, FIXED | SDPA | packed)
        try:
            inputs = case.inputs(options.device)
        except torch.OutOfMemoryError as error:
            return findings_of_all(ways, PASSES, "oom", one_line(error))
        findings = measure_attention(inputs, ways, options)
        return with_equality(findings, inputs, {k: v for k, v in ways.items() if k in SDPA})

    def section(self, rows: Sequence[Row]) -> str:
        from flexvarlen.bench.attention.sdpa_backends_tables import sdpa_section

        return sdpa_section(rows)

    def figures(self, rows: Sequence[Row], folder: Path) -> Sequence[Path]:
        from flexvarlen.bench.attention.sdpa_backends_tables import sdpa_figures

        return sdpa_figures(rows, folder)


SUITE = SdpaBackends()


# --- which kernel, and how equal -----------------------------------------------------------------


def with_equality(
    findings: Sequence[Finding], inputs: Inputs, ways: Mapping[str, Prepare]
) -> list[Finding]:
    """The findings, with what another forward of each of `ways` shows that was right.

    Their forwards gain `sdpa_kernel` (what ran), `max_abs_error` (to fp64, on sampled documents)
    and `max_abs_difference` (by variant, over the whole row), backwards the first alone. Both are
    absolute, of outputs of standard normal values. Where that fails, `equality_failed` says why.

    Raises:
        DeviceLost: one of these calls killed the device; with the findings as they were.
    """
    right = {x.variant for x in findings if x.status == "ok" and x.pass_ == "forward"}
    noted: dict[str, dict[str, Any]] = {name: {} for name in ways if name in right}
    outputs: dict[str, Tensor] = {}
    for name, own in noted.items():
        try:
            own["sdpa_kernel"], outputs[name] = noted_forward(inputs, ways[name], needs_grad=True)
        except Exception as error:  # cuDNN's front end and compilers raise what they like
            stop_if_lost(error, inputs.q.device, findings, name)
            own["equality_failed"] = one_line(error)
    try:
        _note_equality(noted, inputs, outputs)
    except Exception as error:
        stop_if_lost(error, inputs.q.device, findings, "the exact answers")
        for name in outputs:
            noted[name]["equality_failed"] = one_line(error)
    found = []
    for finding in findings:
        own = noted.get(finding.variant, {})
        if finding.pass_ == "backward":
            own = {name: value for name, value in own.items() if name == "sdpa_kernel"}
        found.append(with_measures(finding, own))
    return found


def _note_equality(
    noted: dict[str, dict[str, Any]], inputs: Inputs, outputs: Mapping[str, Tensor]
) -> None:
    if not outputs:
        return
    qkv = (inputs.q, inputs.k, inputs.v)
    oracle = Oracle(qkv, inputs.cotangent, inputs.lengths, inputs.causal)
    for name, out in outputs.items():
        errors = [
            float((out[where["out"]].double() - exact["out"]).abs().max())
            for where, exact in oracle.samples
        ]
        noted[name] |= {"max_abs_error": max(errors), "max_abs_difference": {}}
    for one, other in combinations(outputs, 2):
        apart = float((outputs[one].float() - outputs[other].float()).abs().max())
        noted[one]["max_abs_difference"][other] = apart
        noted[other]["max_abs_difference"][one] = apart
