"""Tables and charts of the suite "end-to-end", from records alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from flexvarlen.bench.suites.model.tables import made, model_title, number
from flexvarlen.report.figure import bars, chart, save, style_of
from flexvarlen.report.records import Record, commits_of, provenance, ran_on, records_alike
from flexvarlen.report.table import Column, Table

OURS = "packed:auto"
KEPT = "@kept"
LORA = "lora"


def parts_of(variant: str) -> tuple[str, str, bool]:
    """How it batches, its attention, and whether checkpointed layers save the attention outputs.

    >>> parts_of("packed:auto@kept")
    ('packed', 'auto', True)
    """
    batching, _, attention = variant.partition(":")
    return batching, attention.removesuffix(KEPT), attention.endswith(KEPT)


def groups_of(records: Sequence[Record]) -> list[list[Record]]:
    """Records that differ in the variant alone, the fastest first."""
    return [
        sorted(group, key=lambda r: -r.measures.get("tokens_per_s", 0.0))
        for group in records_alike(records, ("variant",))
    ]


def _shown(record: Record, quote: str = "") -> str:
    batching, attention, kept = parts_of(record.case["variant"])
    name = f"{quote}{attention.replace('transformers:', 'transformers ')}{quote}"
    return f"{batching}, {name}" + (", attention outputs saved" if kept else "")


COLUMNS = (
    Column("batch, attention", partial(_shown, quote="`")),
    number("tokens/s", "tokens_per_s", ",.0f", outcome=True),
    number("ms per step", "ms_p50", ",.0f"),
    number("peak GiB", "peak_mib", ".1f", 1 / 1024),
    made("positions per token", lambda r: f"{r.measures['positions'] / r.case['tokens']:.2f}"),
    number("batches per step", "batches", ".0f"),
    made(
        "graph breaks",
        lambda r: str(r.measures["graph_breaks"]) * (r.case["mode"] == "compiled"),
    ),
    made(
        "steps with recompilation",
        lambda r: f"{n} of {r.case['steps']}" if (n := r.measures["steps_compiling"]) else "0",
    ),
)


def table(records: Sequence[Record]) -> Table:
    done = [r for r in records if r.status == "ok"]
    ours = next((r.measures["tokens_per_s"] for r in done if r.case["variant"] == OURS), None)

    def ratio(record: Record) -> str | None:
        if ours is None or record.case["variant"] == OURS:
            return None
        return f"{ours / record.measures['tokens_per_s']:.2f}×"

    notes = [
        "Tokens are the documents' own, without pads. Timed steps that compiled a graph are left "
        "out, unless all did."
    ]
    if done:
        errors = [
            f"{max(r.measures[f'{what}_error'] for r in done):.1e} ({what}; each document alone "
            f"{done[0].measures[f'baseline_{what}_error']:.1e})"
            for what in ("loss", "gradient")
        ]
        notes[0] += f" The first step's largest relative errors: {', '.join(errors)}."
    columns = [*COLUMNS, made("`auto` speedup over this variant", ratio)]
    title = f"{_what(records)}; {ran_on(records[0].environment)}{commits_of(records)}"
    return Table.of(records, columns, title, notes=notes)


def _what(records: Sequence[Record]) -> str:
    case = records[0].case
    documents = next((r.measures["documents"] for r in records if "documents" in r.measures), None)
    mode = "eager, LoRA" if case["mode"] == LORA else case["mode"]
    counted = "" if documents is None else f" of {documents:.0f} documents on average"
    return (
        f"Trainer, {model_title(records[0], ' geometry')}, {case['tokens']:,} tokens per step"
        f"{counted}, Python's help topics cut at {case['longest']:,}; {case['dtype']}, "
        f"{mode}{', layers checkpointed' if case['checkpointing'] else ''}"
    )


def draw(records: Sequence[Record], folder: Path) -> list[Path]:
    """Tokens a second of one group: flexvarlen's auto beside transformers' own."""
    found = [r for r in records if r.status == "ok" and not r.case["variant"].endswith(KEPT)]
    speed = {r.case["variant"]: r.measures["tokens_per_s"] for r in found}
    if OURS not in speed or len(speed) < 2:
        return []
    case = found[0].case
    missing = [r for r in records if r.status != "ok"]
    left_out = "".join(f" {_shown(r)}: {r.status}." for r in missing)
    height = 120 + 32 * len(found)
    figure, (axes,) = chart(
        _finding(speed, case["mode"]),
        f"{_what(records)}.{left_out} {provenance(records)}",
        height_px=height + 40,
    )
    bars(
        axes,
        {_shown(r).replace(", auto", ", flexvarlen auto"): speed[r.case["variant"]] for r in found},
        label="document tokens per second",
        colors=[style_of(parts_of(r.case["variant"])[1]).color for r in found],
        texts=[f"{value:,.0f}" for value in speed.values()],
    )
    return [save(figure, folder / f"end-to-end-{case['mode']}.png")]


def _finding(speed: dict[str, float], mode: str) -> str:
    padded = [x for name, x in speed.items() if not name.startswith("packed")]
    others = [x for name, x in speed.items() if name.startswith("packed") and name != OURS]
    if padded:
        gains = [speed[OURS] / x for x in (max(padded), min(padded))]
        what = f"{gains[0]:.1f} to {gains[1]:.1f} times as many tokens a second as padding"
    else:
        gains = [speed[OURS] / x for x in (max(others), min(others))]
        what = (
            f"{gains[0]:.2f} to {gains[1]:.2f} times the tokens a second of transformers' packing"
        )
    return f"Trainer, {mode}: packed with auto gives {what}"
