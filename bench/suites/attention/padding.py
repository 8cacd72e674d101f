"""Suite "padding": documents packed in one row against the same documents padded to 2,048 tokens.

The documents are those of the pull request that brought varlen_attn to torch
(pytorch/pytorch#164502): batch 8, random multiples of 64 tokens, seed 42, 45% padding; and
log-normal ones, and documents of full length. SDPA without a mask attends to padding, so its
results are right, and timed, on documents of full length or under a causal mask only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from flexvarlen.bench.suites.attention import tables
from flexvarlen.bench.suites.attention.engine import AttentionSuite
from flexvarlen.bench.suites.attention.inputs import AttentionCase, Inputs, Prepare
from flexvarlen.bench.suites.attention.packed import packed_calls, packed_variants
from flexvarlen.bench.suites.attention.padded import sdpa
from flexvarlen.report.figure import bars, chart, save, style_of
from flexvarlen.report.records import Record, provenance
from flexvarlen.report.table import Column, Table
from flexvarlen.runner.suite import Options

Documents = Literal["multiples", "log-normal", "full-length"]

STEP, SEED, SIGMA = 64, 42, 1.0
MASKED, UNMASKED = "padded:masked", "padded:unmasked"


@dataclass(frozen=True)
class PaddingCase(AttentionCase):
    """Some documents, each padded to `max_length` tokens, or all in one row."""

    documents: Documents
    causal: bool
    batch: int = 8
    max_length: int = 2048
    embedding: int = 1024
    num_heads: int = 16
    dtype: str = "bfloat16"
    seed: int = SEED
    part: str = "attention"

    @property
    def name(self) -> str:
        return f"{'causal' if self.causal else 'full'}-{self.documents}"

    def lengths(self) -> tuple[int, ...]:
        """Tokens of each document.

        >>> PaddingCase("multiples", False).lengths()
        (448, 1280, 1856, 960, 704, 512, 1856, 1344)
        """
        generator = torch.Generator().manual_seed(self.seed)
        if self.documents == "full-length":
            return (self.max_length,) * self.batch
        if self.documents == "multiples":
            most = self.max_length // STEP + 1
            drawn = (torch.randint(1, most, (1,), generator=generator) for _ in range(self.batch))
            return tuple(int(x) * STEP for x in drawn)
        mu = math.log(self.max_length / 4) - SIGMA**2 / 2  # of a mean of a quarter of the length
        normal = torch.randn(self.batch, generator=generator, dtype=torch.float64)
        return tuple(int(x) for x in (mu + SIGMA * normal).exp().round().clamp(1, self.max_length))

    def data(self) -> dict[str, Any]:
        tokens = sum(self.lengths())
        sparsity = round(1 - tokens / (self.batch * self.max_length), 4)
        return super().data() | {"tokens": tokens, "sparsity": sparsity}

    def inputs(self, device: torch.device) -> Inputs:
        heads, dtype = (self.num_heads, self.num_heads), getattr(torch, self.dtype)
        head_dim = self.embedding // self.num_heads
        return Inputs.random(self.lengths(), heads, head_dim, dtype, device, self.causal, self.seed)

    def calls(self) -> dict[str, Prepare]:
        """What can be called on these documents; SDPA without a mask where that is right."""
        padded: dict[str, Prepare] = {MASKED: partial(sdpa, masked=True, length=self.max_length)}
        if self.causal or min(self.lengths()) == self.max_length:
            padded[UNMASKED] = partial(sdpa, length=self.max_length)
        return padded | packed_calls()


class Padding(AttentionSuite[PaddingCase]):
    name: ClassVar[str] = "padding"
    repeats: ClassVar[int] = 100

    def cases(self, options: Options) -> Sequence[PaddingCase]:
        if options.quick or not options.on_gpu:
            return [PaddingCase("multiples", True, 3, 128, 32, 2)]
        documents: tuple[Documents, ...] = ("multiples", "log-normal", "full-length")
        return [PaddingCase(x, causal) for x in documents for causal in (False, True)]

    def variants(self, case: PaddingCase, options: Options) -> Sequence[str]:
        padded = [x for x in (MASKED, UNMASKED) if x in case.calls()]
        raw = ["raw:varlen", "raw:nested"] if options.on_gpu else []
        return [*padded, *raw, *packed_variants(on_gpu=options.on_gpu)]

    def calls(self, case: PaddingCase) -> Mapping[str, Prepare]:
        return case.calls()

    def tables(self, records: Sequence[Record]) -> Iterable[Table]:
        return _tables(records, [tables.PASS, tables.field("of", "part"), *COLUMNS])

    def page_tables(self, records: Sequence[Record]) -> Iterable[Table]:
        own = [r for r in records if r.case["part"] == "attention"]
        own = [r for r in own if r.case["documents"] != "log-normal"]
        return _tables(own, [tables.PASS, *COLUMNS], lambda name: name in (*DRAWN, UNMASKED))

    def figures(self, records: Sequence[Record], folder: Path) -> Sequence[Path]:
        own = [r for r in records if r.environment.get("gpu")]
        return [draw(own, folder)] if own else []


SUITE = Padding()

COLUMNS = (
    tables.MASK,
    tables.field("documents", "documents"),
    tables.field("padding", "sparsity", "{:.0%}".format),
)


def _tables(
    records: Sequence[Record],
    columns: Sequence[Column],
    kept: Callable[[str], bool] = lambda name: True,
) -> Iterable[Table]:
    return tables.times_tables(
        records,
        columns,
        title=lambda case: (
            f"{case['batch']} documents padded to {case['max_length']:,} tokens each, or in "
            f"one row; {case['num_heads']} heads of {case['embedding'] // case['num_heads']}, "
            f"{case['dtype']}: ms on the device, median"
        ),
        sort=lambda x: (x.case["part"], x.case["causal"], x.case["documents"]),
        kept=kept,
    )


DRAWN = {
    MASKED: "SDPA, padded, with a mask",
    "varlen": "flexvarlen varlen, packed",
    "flex": "flexvarlen flex, packed",
    "fa2": "flexvarlen fa2, packed",
    "fa3": "flexvarlen fa3, packed",
    "fa4": "flexvarlen fa4, packed",
}


def draw(records: Sequence[Record], folder: Path) -> Path:
    """Times on the study's documents, not causal."""
    shown = {"part": "attention", "documents": "multiples", "causal": False}
    passes = {x.pass_: x for x in tables.measured(records) if shown.items() <= x.case.items()}
    panels = {pass_: _times(passes[pass_]) for pass_ in ("forward", "backward")}
    gains = [values[MASKED] / values[name] for values in panels.values() for name in values]
    gains = sorted(gain for gain in gains if gain != 1)
    figure, axes = chart(
        f"Attention on a packed row is {gains[0]:.0f} to {gains[-1]:.0f} times as fast as SDPA "
        "with a padding mask, at 45% padding",
        "8 documents of 448 to 1,856 tokens, padded to 2,048 each, 16 heads of 64, bfloat16, not "
        f"causal; device time, median; {provenance(records, tables.PACKAGES)}",
        height_px=300,
        panels=2,
        share_y=True,
    )
    for each, (pass_, values) in zip(axes, panels.items(), strict=True):
        bars(
            each,
            {DRAWN[name]: ms for name, ms in values.items()},
            label=f"{pass_}, ms",
            colors=[style_of(name).color for name in values],
        )
    return save(figure, folder / "padding.png")


def _times(line: tables.Measured) -> dict[str, float]:
    return {name: ms for name in DRAWN if (ms := line.ms(name)) is not None}
