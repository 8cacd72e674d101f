"""The README's table of measurements, and its picture, from the records of several suites."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from flexvarlen.bench.suites.masks.builders import COMPARED
from flexvarlen.bench.suites.masks.mask_build import HEADLINE_TOKENS
from flexvarlen.report.figure import bars, chart, save, style_of
from flexvarlen.report.records import Record, provenance
from flexvarlen.report.table import Table, three_digits

CU_SEQ_LENS = "transformers:flash_attention_3@cu_seq_lens"
PADDED = "padded:transformers:flash_attention_2"


class Gain(NamedTuple):
    """How many times as fast one variant of a suite is as another.

    Attributes:
        what, baseline: the workload, and what `theirs` is.
        suite, measure: of which more is better if it is a rate.
        ours, theirs: the variants.
        case: fields of their cases.
    """

    what: str
    baseline: str
    suite: str
    measure: str
    ours: str
    theirs: str
    case: Mapping[str, object]

    def times(self, records: Sequence[Record]) -> float | None:
        """The ratio of what was measured; None without the records."""
        found = {
            r.case["variant"]: r.measures[self.measure]
            for r in records
            if r.suite == self.suite and r.status == "ok" and self.case.items() <= r.case.items()
        }
        if not {self.ours, self.theirs} <= set(found):
            return None
        ratio: float = found[self.ours] / found[self.theirs]
        return ratio if self.measure.endswith("_per_s") else 1 / ratio


GAINS = (
    Gain(
        "Trainer, Qwen3-1.7B",
        "padded batches, transformers FA2",
        *("end-to-end", "tokens_per_s", "packed:auto", PADDED),
        {"mode": "eager"},
    ),
    Gain(
        "Trainer with `torch_compile`, Qwen3-1.7B",
        "packed rows, transformers FA2",
        *("end-to-end", "tokens_per_s", "packed:auto", "packed:transformers:flash_attention_2"),
        {"mode": "compiled"},
    ),
    Gain(
        "TRL's GRPO update with `share_prefixes=True`, 16 answers to a prompt of 4,096 tokens",
        "padded batches, transformers FA3",
        *("preference", "samples_per_s", "auto+shared", "padded-fa3"),
        {"task": "grpo", "prompt": 4096, "group": 16},
    ),
    Gain(
        f"building a FlexAttention block mask, {HEADLINE_TOKENS:,} tokens",
        "compiled `create_block_mask`",
        *("mask-build", "wall_us_p50", COMPARED, "create_block_mask compiled"),
        {"part": "build", "tokens": HEADLINE_TOKENS},
    ),
)


def summary(records: Sequence[Record]) -> Table | None:
    """A line for each of `GAINS`; None unless one GPU's records have them all."""
    gpus = [r.environment.get("gpu") for r in records if r.suite == "end-to-end"][:1]
    own = [r for r in records if r.environment.get("gpu") in gpus]
    lines = [
        (gain.what, gain.baseline, f"{three_digits(times)}×")
        for gain in GAINS
        if (times := gain.times(own)) is not None
    ]
    if len(lines) < len(GAINS):
        return None
    return Table("", (f"on one {gpus[0]}", "baseline", "speedup"), tuple(lines))


# --- the picture ---------------------------------------------------------------------------------

DRAWN = {
    "packed:auto": "packed: flexvarlen auto",
    "packed:fa3": "packed: flexvarlen fa3",
    "packed:fa4": "packed: flexvarlen fa4",
    "packed:fa2": "packed: flexvarlen fa2",
    "packed:flex": "packed: flexvarlen flex",
    f"packed:{CU_SEQ_LENS}": "packed: transformers FA3 with cu_seq_lens",
    "padded-sorted:transformers:flash_attention_2": "padded, sorted by length: transformers FA2",
    "padded:transformers:flash_attention_2": "padded: transformers FA2",
    "padded:transformers:sdpa": "padded: transformers sdpa",
}
"""Variants of the suite "model", and what the picture calls them."""
CASE = {"geometry": "qwen3-1.7b", "tokens": 32_768, "mode": "eager", "documents": "text"}


def front_figure(records: Sequence[Record], folder: Path) -> Sequence[Path]:
    """What packing gains in training; none without the records."""
    found = {
        r.case["variant"]: r
        for r in records
        if r.suite == "model" and r.status == "ok" and CASE.items() <= r.case.items()
    }
    if not set(DRAWN) <= set(found):
        return ()
    own = [found[name] for name in DRAWN]
    own.sort(key=lambda r: r.measures["tokens_per_s"], reverse=True)
    speed = {r.case["variant"]: r.measures["tokens_per_s"] for r in own}
    padded = [value for name, value in speed.items() if name.startswith("padded")]
    gains = [speed["packed:auto"] / value for value in (max(padded), min(padded))]
    errors = sorted(r.measures["error"] / r.measures["baseline_error"] for r in own)
    figure, (axes,) = chart(
        f"Packed rows train {gains[0]:.1f} to {gains[1]:.1f} times as many tokens per second as "
        "padded batches",
        "Training steps of Qwen3-1.7B, bf16, eager, 32,768 tokens of texts a step; the title "
        "compares flexvarlen auto. Each is as exact as documents alone in bf16: "
        f"{errors[0]:.3f} to {errors[-1]:.3f} times their error against fp32 (TF32). "
        f"{provenance(own)}",
        height_px=360,
    )
    bars(
        axes,
        {DRAWN[x]: value for x, value in speed.items()},
        label="document tokens per second",
        colors=[style_of(name.partition(":")[2]).color for name in speed],
    )
    return [save(figure, folder / "front.png")]
