"""The README's table of measurements, and its picture, from the records of several suites."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from flexvarlen.bench.suites.masks.builders import BASELINES, COMPARED
from flexvarlen.bench.suites.masks.mask_build import HEADLINE_TOKENS
from flexvarlen.report.figure import bars, chart, save, style_of
from flexvarlen.report.records import Record, provenance
from flexvarlen.report.table import Table, three_digits

Line = tuple[str, str, str]
"""What was measured, flexvarlen's value, and the others'."""
Values = Mapping[str, float]
"""One measure by variant."""

TRAINED = {
    "packed:auto": "flexvarlen auto, packed",
    "packed:transformers:flash_attention_3": "transformers FA3, packed",
    "packed:transformers:flex_attention": "transformers flex, packed",
    "packed:transformers:flash_attention_2": "transformers FA2, packed",
    "padded-sorted:transformers:flash_attention_2": "FA2, padded, sorted",
    "padded:transformers:flash_attention_2": "FA2, padded",
    "padded:transformers:sdpa": "sdpa, padded",
}
"""Variants of the suite end-to-end, as readers know them."""


def summary(records: Sequence[Record]) -> Table | None:
    """A line for each of `LINES`; None unless one GPU's records have them all."""
    gpus = [r.environment.get("gpu") for r in records if r.suite == "end-to-end"][:1]
    own = [r for r in records if r.status in ("ok", "wrong") and r.environment.get("gpu") in gpus]
    lines = [line(own) for line in LINES]
    found = tuple(line for line in lines if line is not None)
    if len(found) < len(LINES):
        return None
    return Table(
        "",
        (f"on one {gpus[0]}", "flexvarlen", "other implementations (flexvarlen's speedup)"),
        found,
    )


def _values(records: Sequence[Record], suite: str, measure: str, **case: object) -> Values:
    return {
        r.case["variant"]: r.measures[measure]
        for r in records
        if r.suite == suite
        and r.status == "ok"
        and measure in r.measures
        and all(r.case.get(name) == value for name, value in case.items())
    }


def trained(mode: str) -> Callable[[Sequence[Record]], Line | None]:
    """Tokens a second of transformers' Trainer."""

    def line(records: Sequence[Record]) -> Line | None:
        values = _values(records, "end-to-end", "tokens_per_s", mode=mode)
        what = f"Trainer, {mode}, Qwen3-1.7B, 32,768 tokens per step: tokens/s over all steps"
        return _line(what, values, "packed:auto", TRAINED, more_is_better=True)

    return line


def long_documents(records: Sequence[Record]) -> Line | None:
    """A compiled step where attention dominates."""
    values = _values(records, "packings", "ms_p50", geometry="qwen3-1.7b", tokens=65_536)
    names = {
        "transformers:flash_attention_3@cu_seq_lens": "transformers FA3 with cu_seq_lens",
        "transformers:flex_attention": "transformers flex",
        "transformers:flash_attention_2": "transformers FA2",
    }
    what = "compiled forward and backward of 14 layers, 65,536 tokens, documents of mean 16,384: ms"
    return _line(what, values, "auto", names)


def shared_prompts(records: Sequence[Record]) -> Line | None:
    """A trainer's update on padded batches, 16 answers to one long prompt."""
    case = {"task": "grpo", "prompt": 4096, "group": 16}
    values = _values(records, "preference", "samples_per_s", **case)
    what = "TRL's GRPO update, 16 answers to a prompt of 4,096 tokens, share_prefixes: samples/s"
    names = {"padded-fa3": "transformers FA3, padded"}
    return _line(what, values, "auto+shared", names, more_is_better=True)


def small_inference(records: Sequence[Record]) -> Line | None:
    """A short forward, where the host's time decides."""
    values = _values(records, "small-inference", "ms_p50", mode="cuda graphs")
    names = {
        "transformers:flash_attention_2@cu_seq_lens": "transformers FA2 with cu_seq_lens",
        "transformers:sdpa": "transformers sdpa",
        "transformers:flash_attention_2": "transformers FA2",
    }
    what = "forward of 256 tokens in CUDA graphs, 14 layers: ms"
    return _line(what, values, "auto", names)


def mask(records: Sequence[Record]) -> Line | None:
    """A BlockMask from boundaries on the device."""
    values = _values(records, "mask-build", "wall_us_p50", part="build", tokens=HEADLINE_TOKENS)
    what = f"BlockMask of {HEADLINE_TOKENS:,} tokens: µs"
    return _line(what, values, COMPARED, {name: name for name in BASELINES})


LINES = (
    trained("eager"),
    trained("compiled"),
    shared_prompts,
    long_documents,
    small_inference,
    mask,
)


def _line(
    what: str, values: Values, ours: str, names: Mapping[str, str], *, more_is_better: bool = False
) -> Line | None:
    """The others that were measured, best first, each with our speedup; ours bold if the best."""
    theirs = sorted((x for x in names if x in values and x != ours), key=values.__getitem__)
    if ours not in values or not theirs:
        return None
    shown, speedups = [], []
    for name in reversed(theirs) if more_is_better else theirs:
        pair = values[ours], values[name]
        speedups.append(pair[0] / pair[1] if more_is_better else pair[1] / pair[0])
        digits = 0 if speedups[-1] >= 100 else 2
        shown.append(f"{names[name]} {three_digits(values[name])} ({speedups[-1]:.{digits}f}×)")
    own = three_digits(values[ours])
    return what, f"**{own}**" if min(speedups) >= 1 else own, "; ".join(shown)


# --- the picture ---------------------------------------------------------------------------------

DRAWN = {
    "packed:auto": "packed: flexvarlen auto",
    "packed:fa3": "packed: flexvarlen fa3",
    "packed:fa4": "packed: flexvarlen fa4",
    "packed:fa2": "packed: flexvarlen fa2",
    "packed:flex": "packed: flexvarlen flex",
    "packed:transformers:flash_attention_3@cu_seq_lens": "packed: transformers FA3",
    "padded-sorted:transformers:flash_attention_2": "padded, sorted: transformers FA2",
    "padded:transformers:flash_attention_2": "padded: transformers FA2",
    "padded:transformers:sdpa": "padded: transformers sdpa",
}
"""Variants of the suite "model", and what the picture calls them."""
SAME_ERROR = 0.005
"""A difference from each document alone below which errors are called the same: 1.00 in print."""
CASE = {"geometry": "qwen3-1.7b", "tokens": 32_768, "mode": "eager", "documents": "text"}


def front_figure(records: Sequence[Record], folder: Path) -> Sequence[Path]:
    """What packing gains in training, and the errors of the outputs; none without the records."""
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
    errors = {r.case["variant"]: r.measures["error"] / r.measures["baseline_error"] for r in own}
    padded = [value for name, value in speed.items() if name.startswith("padded")]
    gains = [speed["packed:auto"] / value for value in (max(padded), min(padded))]
    off = max(abs(error - 1) for name, error in errors.items() if name.startswith("packed"))
    rounding = f"with rounding errors within {off:.1%} of each other"
    if off < SAME_ERROR:
        rounding = "with the same rounding error"
    figure, (left, right) = chart(
        f"Packing trains {gains[0]:.1f} to {gains[1]:.1f} times as fast as padding, {rounding}",
        "Training steps of Qwen3-1.7B, bf16, eager, 32,768 tokens of texts a step; the range is "
        "auto's; transformers FA3 with cu_seq_lens. Right: the relative error of the last hidden "
        "states against each document alone in fp32 (TF32), divided by that of each document alone "
        "in bf16. "
        f"{provenance(own)}",
        height_px=400,
        panels=2,
        share_y=True,
    )
    colors = [style_of(name.partition(":")[2]).color for name in speed]
    bars(
        left,
        {DRAWN[x]: value for x, value in speed.items()},
        label="document tokens per second",
        colors=colors,
    )
    for index, (error, color) in enumerate(zip(errors.values(), colors, strict=True)):
        right.plot([error], [index], "o", color=color, markersize=8)
        right.annotate(
            f"{error:.3f}", (error, index), (8, -3), textcoords="offset points", fontsize=8.5
        )
    right.axvline(2, color="#888888", linestyle="--", linewidth=1)
    right.text(1.97, -0.55, "acceptance limit (2×)", ha="right", fontsize=8.5, color="#555555")
    right.set_xlim(0, 2.2)
    right.set_xlabel("output error ÷\nerror of each document alone in bf16", size=8.5)
    right.grid(axis="x", color="#DDDDDD", linewidth=0.6)
    right.tick_params(left=False)
    return [save(figure, folder / "front.png")]
