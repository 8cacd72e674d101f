"""Suite "varlen-study": FlashAttention-2 beside torch's varlen kernel, on a study's 13 packings.

Each packing in one call of all documents, and in one call for each document ("@serial").
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import torch

from flexvarlen.bench.suites.attention.engine import AttentionSuite
from flexvarlen.bench.suites.attention.inputs import AttentionCase, Inputs, Prepare, serial
from flexvarlen.bench.suites.attention.packed import (
    ON_CPU,
    RAW,
    RAW_PREFIX,
    packed_calls,
    packed_variants,
    sdpa_of_one,
)
from flexvarlen.bench.suites.attention.tables import (
    PACKAGES,
    PASS,
    Measured,
    field,
    heads,
    measured,
    times_tables,
)
from flexvarlen.report.figure import bars, chart, save, style_of
from flexvarlen.report.records import Record, provenance
from flexvarlen.report.table import Table
from flexvarlen.runner.suite import Options
from flexvarlen.verify.experiment.operator_cases import PACKINGS, packing_name

SERIAL = "@serial"
FA2, VARLEN = "raw:fa2", "raw:varlen"
SDPA_SERIAL = f"{RAW_PREFIX}sdpa{SERIAL}"
SHOWN = (FA2, VARLEN, "fa2", "varlen", "fa3", "fa4", "flex", *ON_CPU)
"""The columns of the tables; the records hold more."""


@dataclass(frozen=True)
class StudyCase(AttentionCase):
    """Some documents, 24 heads of 128, not causal; the fields of the records."""

    lengths: tuple[int, ...]
    num_heads: int = 24
    num_kv_heads: int = 24
    head_dim: int = 128
    causal: bool = False
    window: int | None = None
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        """As the study writes it."""
        return packing_name(self.lengths)

    def data(self) -> dict[str, Any]:
        return super().data() | {"name": self.name}

    def inputs(self, device: torch.device) -> Inputs:
        heads, dtype = (self.num_heads, self.num_kv_heads), getattr(torch, self.dtype)
        return Inputs.random(self.lengths, heads, self.head_dim, dtype, device, self.causal)


class VarlenStudy(AttentionSuite[StudyCase]):
    """The 13 packings."""

    name: ClassVar[str] = "varlen-study"

    def cases(self, options: Options) -> Sequence[StudyCase]:
        if options.quick or not options.on_gpu:
            dtype = "bfloat16" if options.on_gpu else "float32"  # raw kernels know no other
            return [StudyCase((40, 24), 2, 2, 64, dtype=dtype)]
        return [StudyCase(lengths) for lengths in PACKINGS]

    def variants(self, case: StudyCase, options: Options) -> Sequence[str]:
        names = packed_variants(on_gpu=options.on_gpu)
        names = [*(RAW_PREFIX + x for x in RAW if options.on_gpu), *names]
        several = [x + SERIAL for x in names] if len(case.lengths) > 1 else []
        return [*names, *several, SDPA_SERIAL]

    def calls(self, case: StudyCase) -> Mapping[str, Prepare]:
        """Kernels and backends in one call, and in one call for each document."""
        together = packed_calls()
        alone = {name + SERIAL: serial(call) for name, call in together.items() if name != "auto"}
        return together | alone | {SDPA_SERIAL: serial(sdpa_of_one)}

    def tables(self, records: Sequence[Record]) -> Iterable[Table]:
        def title_of(case: Mapping[str, Any]) -> str:
            mask = "causal" if case["causal"] else "not causal"
            return f"{heads(case)}, {case['dtype']}, {mask}: ms on the device, median"

        several = [r for r in records if len(r.case["lengths"]) > 1]
        serial = [*(name + SERIAL for name in SHOWN), SDPA_SERIAL]
        return chain.from_iterable(
            times_tables(
                own,
                [PASS, field("documents", "name")],
                title=lambda case, form=form: f"{title_of(case)}; {form}",  # type: ignore[misc]
                sort=lambda x: sum(x.case["lengths"]),
                kept=lambda name, shown=shown: name in shown,  # type: ignore[misc]
            )
            for form, own, shown in (
                ("one call", records, SHOWN),
                ("one call for each document", several, serial),
            )
        )

    def draw(self, records: Sequence[Record], folder: Path) -> Sequence[Path]:
        return [draw(records, folder)]


SUITE = VarlenStudy()


def draw(records: Sequence[Record], folder: Path) -> Path:
    """How many times as long torch's kernel takes as FlashAttention-2, on each packing."""
    found = sorted(measured(records), key=lambda x: sum(x.case["lengths"]))
    panels = {
        pass_: {x.case["name"]: ratio for x in found if x.pass_ == pass_ and (ratio := _ratio(x))}
        for pass_ in ("forward", "backward")
    }
    ratios = [ratio for panel in panels.values() for ratio in panel.values()]
    figure, axes = chart(
        f"torch's varlen function takes {min(ratios):.2f} to {max(ratios):.2f} times as long as "
        "flash_attn's on the packings of a public study",
        "Device time, median, one call of all documents, 24 heads, head_dim 128, bfloat16, not "
        f"causal; {provenance(records, PACKAGES)}",
        height_px=420,
        panels=2,
    )
    for each, (pass_, values) in zip(axes, panels.items(), strict=True):
        each.axvline(1, color="#888888", linestyle="--", linewidth=1)
        bars(
            each,
            {name.replace(",", " + "): ratio for name, ratio in values.items()},
            label=f"{pass_}: torch's varlen function ÷ flash_attn's",
            colors=[style_of("varlen").color] * len(values),
        )
    axes[0].set_ylabel("lengths of the documents", size=8.5)
    return save(figure, folder / "varlen-study.png")


def _ratio(line: Measured) -> float | None:
    slow, fast = line.kernel_ms(VARLEN), line.kernel_ms(FA2)
    return slow / fast if slow and fast else None
