"""Suites "scaling" and "sdpa-backends": documents of one length, padded beside packed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from flexvarlen.bench.suites.attention.engine import AttentionSuite
from flexvarlen.bench.suites.attention.inputs import AttentionCase, Inputs, Prepare
from flexvarlen.bench.suites.attention.packed import ON_CPU, packed_calls, packed_variants
from flexvarlen.bench.suites.attention.padded import FIXED, SDPA
from flexvarlen.bench.suites.attention.tables import (
    MASK,
    PACKAGES,
    PASS,
    TOKENS,
    Measured,
    field,
    heads,
    measured,
    times_tables,
)
from flexvarlen.report.figure import LEGEND, chart, lines, save
from flexvarlen.report.records import Record, provenance
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
        columns = [PASS, field("dtype", "dtype"), MASK, TOKENS]
        return times_tables(
            records,
            columns,
            title=lambda case: (
                f"{case['batch']} documents of equal length, {heads(case)}: ms on the device, "
                "median"
            ),
            sort=lambda x: (x.case["dtype"], x.case["causal"], x.case["tokens"]),
            kept=lambda name: name in (*SCALED, "fixed:fa3", *ON_CPU),
        )

    def draw(self, records: Sequence[Record], folder: Path) -> Sequence[Path]:
        own = _lines(records, dtype="bfloat16", causal=True, batch=8)
        return [draw_scaling(own, folder)] if own else []


def _lines(records: Sequence[Record], **case: object) -> list[Measured]:
    """The passes of the cases with these fields, by tokens."""
    found = [x for x in measured(records) if case.items() <= x.case.items()]
    return sorted(found, key=lambda x: x.case["tokens"])


SCALED = {
    "standard": "standard attention",
    "eager": "transformers eager",
    "sdpa:default": "PyTorch SDPA (default)",
    "flex": "flexvarlen flex, packed",
    "fa2": "flexvarlen fa2, packed",
    "fa3": "flexvarlen fa3, packed",
    "fa4": "flexvarlen fa4, packed",
}


def draw_scaling(found: Sequence[Measured], folder: Path) -> Path:
    """Time and memory of a forward over the length of the documents."""
    times: dict[str, dict[float, float]] = {}
    memory: dict[str, dict[float, float]] = {}
    for line in (x for x in found if x.pass_ == "forward"):
        for name in SCALED:
            if (ms := line.ms(name)) is not None:
                times.setdefault(name, {})[line.case["tokens"]] = ms
                peak = line.records[name].measures["peak_mib"] / 1024
                memory.setdefault(name, {})[line.case["tokens"]] = peak
    one = {x: y for x, y in memory.items() if x in ("standard", "eager", "sdpa:default")}
    others = [memory[x] for x in memory if x not in ("standard", "eager")]
    at_once = [[y[x] for y in others if x in y] for x in memory["sdpa:default"]]
    apart = max(max(at) / min(at) - 1 for at in at_once)
    lost = {
        name: line.case["tokens"]
        for line in reversed(found)
        for name, record in line.records.items()
        if line.pass_ == "forward" and name in SCALED and record.status == "oom"
    }
    ends = ", ".join(f"{SCALED[name]} at {tokens:,} tokens" for name, tokens in lost.items())
    most = max(times["standard"])
    gain = times["standard"][most] / times["fa3"][most]
    records = [r for line in found for r in line.records.values()]
    figure, (left, right) = chart(
        f"Standard attention runs out of memory after {most:,.0f} tokens a document; there the "
        f"forward of fa3 on a packed row is {gain:.0f} times as fast",
        "Forward of 8 equally long documents, 32 heads, head_dim 64, bfloat16, causal; device "
        "time, median. Standard attention keeps all scores in memory. Out of memory: "
        f"{ends}. {provenance(records, PACKAGES)}",
        panels=2,
    )
    axis = "tokens a document"
    lines(left, times, x_label=axis, y_label="ms", log_y=True, labels=SCALED, legend=False)
    lines(right, one, x_label=axis, y_label="GiB per call", log_y=True, legend=False)
    right.legend(*left.get_legend_handles_labels(), **LEGEND)
    said = f"SDPA and all packed,\nat most {apart:.0%} apart"
    right.annotate(said, (0.97, 0.08), xycoords="axes fraction", ha="right", fontsize=8)
    return save(figure, folder / "scaling.png")


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
        columns = [
            PASS,
            field("head_dim", "head_dim"),
            MASK,
            field("documents", "batch"),
            TOKENS,
            Column("default took", _took),
        ]
        return times_tables(
            records,
            columns,
            title=lambda case: (
                "SDPA's kernels, each forced, beside packed rows: ms on the device, median; "
                f"{case['dtype']}"
            ),
            sort=lambda x: (x.case["head_dim"], x.case["causal"], x.case["tokens"]),
            kept=lambda name: name in (*self.padded, "fa2", "fa3", *ON_CPU),
        )

    def draw(self, records: Sequence[Record], folder: Path) -> Sequence[Path]:
        own = _lines(records, head_dim=128, causal=True)
        return [draw_sdpa(own, folder)] if own else []


def _took(line: Measured) -> str:
    """The kernel that torch chose."""
    record = line.records.get("sdpa:default")
    return "" if record is None else record.measures.get("sdpa_kernel", "")


def draw_sdpa(found: Sequence[Measured], folder: Path) -> Path:
    """Forward TFLOP/s of each kernel over the length of the documents."""
    names = (*SDPA, "fixed:fa2", "fa3")
    series: dict[str, dict[float, float]] = {}
    for line in (x for x in found if x.pass_ == "forward"):
        for name in names:
            record = line.records.get(name)
            if record is not None and record.status == "ok" and "tflops" in record.measures:
                series.setdefault(name, {})[line.case["tokens"]] = record.measures["tflops"]
    labels = {"fa3": "flexvarlen fa3, packed", "fixed:fa2": "FA2, fixed lengths"}
    default = series["sdpa:default"]
    if all(abs(default[x] / y - 1) <= 0.02 for x, y in series["sdpa:flash"].items()):
        del series["sdpa:default"]
        labels["sdpa:flash"] = "sdpa:default (= sdpa:flash)"
    sizes = {f"{x.case['batch']} × {x.case['tokens']:,}": x.case["num_heads"] for x in found}
    longest = max(x.case["tokens"] for x in found)
    cudnn, flash, fa3 = (series[x][longest] for x in ("sdpa:cudnn", "sdpa:flash", "fa3"))
    records = [r for line in found for r in line.records.values()]
    figure, (axes,) = chart(
        f"In the forward at {longest:,} tokens a document SDPA's cuDNN kernel is "
        f"{cudnn / flash:.1f} times as fast as its flash kernel, fa3 on a packed row "
        f"{fa3 / flash:.1f} times",
        f"Forward of {', '.join(sizes)} tokens (documents × length), {max(sizes.values())} heads "
        "of 128, bfloat16, causal; rate of unmasked work by device time, median; "
        f"{provenance(records, PACKAGES)}",
    )
    lines(axes, series, x_label="tokens a document", y_label="TFLOP/s", labels=labels)
    return save(figure, folder / "sdpa-backends.png")


SCALING, SDPA_BACKENDS = Scaling(), SdpaBackends()
