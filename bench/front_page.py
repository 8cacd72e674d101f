"""The README's table of what flexvarlen gains, and its picture, from records of several suites."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from flexvarlen.report.figure import bars, chart, save, style_of
from flexvarlen.report.records import Record, ran_on
from flexvarlen.report.table import Table

Fields = Mapping[str, object]


class Pair(NamedTuple):
    """What somebody runs today, and the same with flexvarlen.

    Attributes:
        what: what is run today, for the picture.
        suite, measure: of which more is better if it is a rate.
        case: fields of both cases.
        ours, theirs: further fields of each.
    """

    what: str
    suite: str
    measure: str
    case: Fields
    ours: Fields
    theirs: Fields

    def records(self, every: Sequence[Record]) -> tuple[Record, Record] | None:
        """The records of both; None unless both were measured."""
        found = []
        for own in (self.ours, self.theirs):
            fields = {**self.case, **own}.items()
            of_suite = (r for r in every if r.suite == self.suite and r.status == "ok")
            found += [next((r for r in of_suite if fields <= r.case.items()), None)]
        ours, theirs = found
        return None if ours is None or theirs is None else (ours, theirs)

    def times(self, every: Sequence[Record]) -> float | None:
        """How many times as fast ours is; None without the records."""
        both = self.records(every)
        if both is None:
            return None
        ours, theirs = (r.measures[self.measure] for r in both)
        ratio: float = ours / theirs
        return ratio if self.measure.endswith("_per_s") else 1 / ratio


class Gain(NamedTuple):
    """A line of the table: what a reader has today, what to call, and what that gains."""

    today: str
    call: str
    pairs: tuple[Pair, ...]


def _trainer(mode: str, what: str, theirs: str) -> Pair:
    ours, other = {"variant": "packed:auto"}, {"variant": theirs}
    return Pair(what, "end-to-end", "tokens_per_s", {"mode": mode}, ours, other)


def _grpo(prompt: int, group: int) -> Pair:
    what = f"GRPO update, padded FA3: prompt of {prompt:,}, {group} answers"
    case = {"task": "grpo", "geometry": "qwen3-1.7b", "prompt": prompt, "group": group}
    ours, theirs = {"variant": "auto+shared"}, {"variant": "padded-fa3"}
    return Pair(what, "preference", "samples_per_s", case, ours, theirs)


def _hybrid(what: str, batching: str) -> Pair:
    theirs = {"variant": f"{batching}:transformers:flash_attention_3+fla-conv"}
    ours = {"variant": "auto"}
    return Pair(what, "hybrid", "tokens_per_s", {"kind": "padded"}, ours, theirs)


_SFT: Fields = {"variant": "sft", "tokens": 131_072}
_FA2, _FA3 = ("packed:transformers:flash_attention_2", "packed:transformers:flash_attention_3")
GAINS = (
    Gain(
        "GRPO's policy update in TRL (generation not counted), padded, prompts of 1,024 to 4,096 "
        "tokens",
        "[`patch_trainer(trainer, share_prefixes=True)`](docs/preference.md)",
        tuple(_grpo(prompt, group) for prompt in (4096, 1024) for group in (16, 8)),
    ),
    Gain(
        "a hybrid model (Qwen3.5), padded, sorted by length or not; packed, it "
        "[leaks](docs/benchmarks/leaks.md)",
        "[`patch_model`](docs/families.md#hybrid-and-state-space-models) and packed rows",
        (
            _hybrid("hybrid model, padded FA3", "padded"),
            _hybrid("hybrid model, padded FA3, sorted", "padded-sorted"),
        ),
    ),
    Gain(
        "a dense model, padded, sorted by length or not, FlashAttention-2",
        "`patch_model` and [packed rows](docs/packing.md)",
        (
            _trainer("eager", "Trainer, padded FA2", "padded:transformers:flash_attention_2"),
            _trainer(
                "eager",
                "Trainer, padded FA2, sorted",
                "padded-sorted:transformers:flash_attention_2",
            ),
        ),
    ),
    Gain(
        "a packed row of 131,072 tokens on one GPU; TRL refuses to split it over several",
        "[`patch_trainer(trainer, context_parallel=2)`](docs/several-gpus.md), on two GPUs",
        (
            Pair(
                "SFT, a row on one GPU: ours on two",
                *("scaling-ranks", "tokens_per_s"),
                *(_SFT, {"ranks": 2}, {"ranks": 1}),
            ),
        ),
    ),
    Gain(
        "a dense model, packed by TRL or Trainer, FlashAttention-2: eager, compiled, LoRA",
        "`patch_model`; your documents are isolated already",
        (
            _trainer("compiled", "Trainer, packed FA2, compiled", _FA2),
            _trainer("eager", "Trainer, packed FA2", _FA2),
            _trainer("lora", "Trainer, packed FA2, LoRA", _FA2),
        ),
    ),
    Gain(
        "the same with FlashAttention-3: eager, LoRA",
        "no gain: stay as you are",
        (
            _trainer("eager", "Trainer, packed FA3", _FA3),
            _trainer("lora", "Trainer, packed FA3, LoRA", _FA3),
        ),
    ),
    Gain(
        "the same with FlashAttention-3, compiled, which breaks the graph in transformers",
        "`patch_model`: one graph",
        (_trainer("compiled", "Trainer, packed FA3, compiled", _FA3),),
    ),
)


def summary(records: Sequence[Record]) -> Table | None:
    """A line for each of `GAINS`; None unless one GPU's records have them all."""
    own, gpu = _of_one_gpu(records)
    lines = []
    for gain in GAINS:
        times = [x for pair in gain.pairs if (x := pair.times(own)) is not None]
        if len(times) < len(gain.pairs):
            return None
        ends = dict.fromkeys(f"{x:.2f}" for x in (min(times), max(times)))
        lines.append((gain.today, gain.call, " to ".join(ends) + "×"))
    header = ("you have today", "with flexvarlen", f"speedup, {gpu}")
    return Table("", header, tuple(lines))


def _of_one_gpu(records: Sequence[Record]) -> tuple[list[Record], str | None]:
    gpus = [r.environment.get("gpu") for r in records if r.suite == "end-to-end"][:1]
    own = [r for r in records if r.environment.get("gpu") in gpus]
    return own, gpus[0] if gpus else None


def front_figure(records: Sequence[Record], folder: Path) -> Sequence[Path]:
    """What each pair gains; none without all records."""
    own, _ = _of_one_gpu(records)
    pairs = [pair for gain in GAINS for pair in gain.pairs]
    found = {pair.what: pair.times(own) for pair in pairs}
    times = {what: x for what, x in found.items() if x is not None}
    if len(times) < len(pairs):
        return ()
    used = [r for pair in pairs for r in pair.records(own) or ()]
    times = dict(sorted(times.items(), key=lambda pair: -pair[1]))
    low, high = min(times.values()), max(times.values())
    figure, (axes,) = chart(
        f"Training with flexvarlen: {low:.2f} to {high:.1f} times the speed of what you have today",
        "Steps of Qwen3-1.7B and of a hybrid like Qwen3.5 (2B), bf16; each compared with its "
        f"documents alone before it was timed. {ran_on(used[0].environment)}; "
        f"flexvarlen bench {', '.join(sorted({r.suite for r in used}))}; commits: their tables.",
        height_px=440,
    )
    bars(
        axes,
        times,
        label="times the speed of what is named at the left",
        colors=[style_of("auto").color] * len(times),
        texts=[f"{x:.2f}×" for x in times.values()],
    )
    axes.axvline(1, color="black", linewidth=0.8)
    return [save(figure, folder / "front.png")]
