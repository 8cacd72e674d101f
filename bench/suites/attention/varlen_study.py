"""Suite "varlen-study": FlashAttention-2 beside torch's varlen kernel, on a study's 13 packings.

Each packing in one call of all documents, and in one call for each document ("@serial").
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from flexvarlen.bench.suites.attention import packed, tables
from flexvarlen.bench.suites.attention.engine import AttentionSuite
from flexvarlen.bench.suites.attention.inputs import AttentionCase, Inputs, Prepare, serial
from flexvarlen.report.records import Record
from flexvarlen.report.table import Column, Table
from flexvarlen.runner.suite import Options
from flexvarlen.verify.experiment.operator_cases import PACKINGS, packing_name

SERIAL = "@serial"
FA2, VARLEN = "raw:fa2", "raw:varlen"
SDPA_SERIAL = f"{packed.RAW_PREFIX}sdpa{SERIAL}"
SHOWN = (FA2, VARLEN, "fa2", "varlen", "fa3", "fa4", "flex", *packed.ON_CPU)
"""The columns of the tables; the records hold more."""
ON_PAGE = ("256", "320,320", "1088,2368", "4160×8")
"""The packings of the page's table."""


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
        """The name in the study's notation."""
        return packing_name(self.lengths)

    def data(self) -> dict[str, Any]:
        return super().data() | {"name": self.name}

    def inputs(self, device: torch.device) -> Inputs:
        heads, dtype = (self.num_heads, self.num_kv_heads), getattr(torch, self.dtype)
        return Inputs.random(self.lengths, heads, self.head_dim, dtype, device, self.causal)


class VarlenStudy(AttentionSuite[StudyCase]):
    name: ClassVar[str] = "varlen-study"

    def cases(self, options: Options) -> Sequence[StudyCase]:
        if options.quick or not options.on_gpu:
            dtype = "bfloat16" if options.on_gpu else "float32"  # raw kernels know no other
            return [StudyCase((40, 24), 2, 2, 64, dtype=dtype)]
        return [StudyCase(lengths) for lengths in PACKINGS]

    def variants(self, case: StudyCase, options: Options) -> Sequence[str]:
        names = packed.packed_variants(on_gpu=options.on_gpu)
        names = [*(packed.RAW_PREFIX + x for x in packed.RAW if options.on_gpu), *names]
        several = [x + SERIAL for x in names] if len(case.lengths) > 1 else []
        return [*names, *several, SDPA_SERIAL]

    def calls(self, case: StudyCase) -> Mapping[str, Prepare]:
        together = packed.packed_calls()
        alone = {name + SERIAL: serial(call) for name, call in together.items() if name != "auto"}
        return together | alone | {SDPA_SERIAL: serial(packed.sdpa_of_one)}

    def tables(self, records: Sequence[Record]) -> Iterable[Table]:
        several = [r for r in records if len(r.case["lengths"]) > 1]
        serial = [*(name + SERIAL for name in SHOWN), SDPA_SERIAL]
        yield from _tables(records, [tables.PASS, DOCUMENTS], "one call", SHOWN)
        yield from _tables(several, [tables.PASS, DOCUMENTS], "one call for each document", serial)

    def page_tables(self, records: Sequence[Record]) -> Iterable[Table]:
        own = [r for r in records if r.case["name"] in ON_PAGE and r.case["pass"] == "forward"]
        return _tables(own, [DOCUMENTS], "forward, one call", SHOWN[:4])


DOCUMENTS = tables.field("documents", "name")


def _tables(
    records: Sequence[Record], columns: Sequence[Column], calls: str, shown: Sequence[str]
) -> Iterable[Table]:
    def title(case: Mapping[str, Any]) -> str:
        mask = "causal" if case["causal"] else "not causal"
        return f"{tables.heads(case)}, {case['dtype']}, {mask}: ms on the device, median; {calls}"

    return tables.times_tables(
        records,
        columns,
        title=title,
        sort=lambda x: sum(x.case["lengths"]),
        kept=lambda name: name in shown,
    )


SUITE = VarlenStudy()
