"""Suites "scaling" and "sdpa-backends": documents of one length, padded beside packed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from flexvarlen.bench.suites.attention.engine import AttentionSuite
from flexvarlen.bench.suites.attention.inputs import AttentionCase, Inputs, Prepare
from flexvarlen.bench.suites.attention.packed import ON_CPU, packed_calls, packed_variants
from flexvarlen.bench.suites.attention.padded import FIXED, SDPA
from flexvarlen.bench.suites.attention.tables import (
    MASK,
    PASS,
    TOKENS,
    Measured,
    field,
    heads,
    times_tables,
)
from flexvarlen.report.records import Record
from flexvarlen.report.table import Column, Table
from flexvarlen.runner.suite import Options

SIZES = (512, 1024, 2048, 4096, 8192, 16_384)


@dataclass(frozen=True)
class EqualDocuments(AttentionCase):
    """`batch` documents of `tokens` tokens each."""

    tokens: int
    causal: bool
    batch: int
    num_heads: int
    head_dim: int
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        """For `--cases`.

        >>> EqualDocuments(1024, True, 16, 32, 64).name
        'bfloat16-d64-causal-16x1024'
        """
        mask = "causal" if self.causal else "full"
        return f"{self.dtype}-d{self.head_dim}-{mask}-{self.batch}x{self.tokens}"

    def inputs(self, device: torch.device) -> Inputs:
        heads, lengths = (self.num_heads, self.num_heads), (self.tokens,) * self.batch
        dtype = getattr(torch, self.dtype)
        return Inputs.random(lengths, heads, self.head_dim, dtype, device, self.causal)


class _EqualDocuments(AttentionSuite[EqualDocuments]):
    """Padded and packed variants of one attention."""

    padded: ClassVar[Mapping[str, Prepare]]

    def variants(self, case: EqualDocuments, options: Options) -> Sequence[str]:
        return [*self.padded, *packed_variants(on_gpu=options.on_gpu)]

    def calls(self, case: EqualDocuments) -> Mapping[str, Prepare]:
        return {**self.padded, **packed_calls()}


# --- scaling -------------------------------------------------------------------------------------


class Scaling(_EqualDocuments):
    """Attention that holds all scores, and attention that does not, as documents grow.

    Batch 8, 32 heads, head_dim 64; the claims that this shape is compared with are in
    `flexvarlen.bench.claims`.
    """

    name: ClassVar[str] = "scaling"
    padded = FIXED
    peak = True

    def cases(self, options: Options) -> Sequence[EqualDocuments]:
        masks = (False, True)
        if options.quick or not options.on_gpu:
            return [EqualDocuments(64, causal, 2, 2, 16) for causal in masks]
        return [
            *(EqualDocuments(tokens, causal, 8, 32, 64) for tokens in SIZES for causal in masks),
            *(EqualDocuments(8192, causal, 8, 32, 64, "float16") for causal in masks),
        ]

    def tables(self, records: Sequence[Record]) -> Iterable[Table]:
        return _scaling_tables(records, [PASS, field("dtype", "dtype"), MASK, TOKENS], SCALED)

    def page_tables(self, records: Sequence[Record]) -> Iterable[Table]:
        own = _cases(records, dtype="bfloat16", causal=True, **{"pass": "forward"})
        return _scaling_tables(own, [TOKENS], ("standard", "sdpa:default", *SCALED_PACKED))


def _scaling_tables(
    records: Sequence[Record], columns: Sequence[Column], shown: Sequence[str]
) -> Iterable[Table]:
    return times_tables(
        records,
        columns,
        title=lambda case: (
            f"{case['batch']} documents of equal length, {heads(case)}: ms on the device, median"
        ),
        sort=lambda x: (x.case["dtype"], x.case["causal"], x.case["tokens"]),
        kept=lambda name: name in shown,
    )


def _cases(records: Sequence[Record], **case: object) -> list[Record]:
    """The records of the cases with these fields."""
    return [r for r in records if case.items() <= r.case.items()]


SCALED_PACKED = ("flex", "fa2", "fa3", "fa4")
SCALED = ("standard", "eager", "sdpa:default", *SCALED_PACKED, "fixed:fa3", *ON_CPU)
"""The columns of the tables; the records hold more."""


# --- sdpa-backends -------------------------------------------------------------------------------


class SdpaBackends(_EqualDocuments):
    """The kernels behind `scaled_dot_product_attention`, forced one by one.

    `sdpa_kernel` in the records is the kernel that a call ran, seen from its operator.
    """

    name: ClassVar[str] = "sdpa-backends"
    padded: ClassVar[Mapping[str, Prepare]] = {**SDPA, "fixed:fa2": FIXED["fixed:fa2"]}

    def cases(self, options: Options) -> Sequence[EqualDocuments]:
        if options.quick or not options.on_gpu:
            return [EqualDocuments(48, True, 2, 2, 16)]
        # 16,384 tokens and 2,048 channels each, but at least two documents.
        sizes = [(1024, 16), (2048, 8), (4096, 4), (8192, 2), (16_384, 2)]
        return [
            EqualDocuments(tokens, causal, batch, 2048 // head_dim, head_dim)
            for tokens, batch in sizes
            for head_dim in (64, 128)
            for causal in (False, True)
        ]

    def tables(self, records: Sequence[Record]) -> Iterable[Table]:
        took = Column("default took", _took)
        of_case = [field("head_dim", "head_dim"), MASK, field("documents", "batch"), TOKENS, took]
        return _sdpa_tables(records, [PASS, *of_case], (*self.padded, "fa2", "fa3", *ON_CPU))

    def page_tables(self, records: Sequence[Record]) -> Iterable[Table]:
        shown = ("sdpa:flash", "sdpa:cudnn", "fixed:fa2", "fa3")
        return _sdpa_tables(_cases(records, head_dim=128, causal=True), [PASS, TOKENS], shown)


def _sdpa_tables(
    records: Sequence[Record], columns: Sequence[Column], shown: Sequence[str]
) -> Iterable[Table]:
    return times_tables(
        records,
        columns,
        title=lambda case: (
            "SDPA's kernels, each forced, beside packed rows: ms on the device, median; "
            f"{case['dtype']}"
        ),
        sort=lambda x: (x.case["head_dim"], x.case["causal"], x.case["tokens"]),
        kept=lambda name: name in shown,
    )


def _took(line: Measured) -> str:
    """The kernel that torch chose."""
    record = line.records.get("sdpa:default")
    return "" if record is None else record.measures.get("sdpa_kernel", "")


SCALING, SDPA_BACKENDS = Scaling(), SdpaBackends()
