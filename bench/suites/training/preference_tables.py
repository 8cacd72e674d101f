"""Tables of the suite "preference", from records alone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from flexvarlen.bench.suites.model.tables import (
    is_ok,
    model_title,
    number,
    spread,
    value,
    where,
)
from flexvarlen.report.records import Record, records_alike
from flexvarlen.report.table import Column, Notes, Table

PADDED = "padded-fa3"
"""The variant that speeds are compared with, beside `padded-sdpa` where it did not run."""
TITLES = {
    "dpo": "DPOTrainer with its reference model",
    "grpo": "GRPOTrainer's policy update",
    "reward": "RewardTrainer",
    "classification": "Trainer, classification of texts",
}
EXPLAINED = (
    "Error ÷ allowed: the largest error of the loss and of any parameter's gradient, against the "
    "padded run in fp32, over what the acceptance rule allows beside `padded-sdpa`; at most 1 "
    "passes."
)
SAMPLES = {"dpo": "pairs", "grpo": "completions", "reward": "pairs", "classification": "texts"}


def section(records: Sequence[Record]) -> str:
    """What the error is, and a table of each case."""
    tables = [table(group).markdown() for group in records_alike(records, ("variant",))]
    return "\n\n".join([EXPLAINED, *tables])


def table(records: Sequence[Record]) -> Table:
    """The variants of one case."""
    notes = Notes()
    columns = [
        Column("variant", _shown),
        number("samples/s", "samples_per_s", ".2f", notes=notes),
        Column("ms a step (p20–p80)", lambda r: spread(r) or "–"),
        number("peak GiB", "peak_mib", ".1f", 1 / 1024),
    ]
    if records[0].case["mode"] == "compiled":
        columns += [
            number("graphs", "compilations", ".0f"),
            number("recompilations", "recompilations", ".0f"),
            number("graph breaks", "graph_breaks", ".0f"),
            number("s of compiling", "compile_s", ".0f"),
        ]
    base, name = _base(records)
    if base is not None:

        def gain(record: Record) -> float | None:
            own = value(record, "samples_per_s")
            return None if own is None else own / base

        def used(record: Record) -> str:
            found = gain(record)
            if found is None or record.case["variant"].startswith("padded"):
                return "–"
            m = record.measures
            return f"{found * (m.get('tokens_run') or m['tokens_real']) / m['tokens_padded']:.0%}"

        if any(r.case["variant"].endswith("+shared") for r in records):
            columns.append(number("tokens run", "tokens_run", ",.0f"))
        columns += [
            Column(f"speed ÷ `{name}`'s", lambda r: "–" if (x := gain(r)) is None else f"{x:.2f}×"),
            Column("share of the possible speedup", used),
        ]
    columns.append(number("error ÷ allowed", "error_over_allowed", ".2f"))
    return Table.of(records, columns, _title(records), notes=chain(_said(records), notes))


def _shown(record: Record) -> str:
    variant, attends = record.case["variant"], record.measures.get("attends")
    return f"`{variant}`" + (f" ({attends})" if attends else "")


def _base(records: Sequence[Record]) -> tuple[float | None, str]:
    speeds = {r.case["variant"]: value(r, "samples_per_s") for r in records}
    name = PADDED if speeds.get(PADDED) else "padded-sdpa"
    return speeds.get(name), name


def _said(records: Sequence[Record]) -> list[str]:
    done = next((r.measures for r in records if is_ok(r)), None)
    if done is None:
        return []
    return [
        f"A step is {records[0].case['step']}. A batch holds {done['tokens_padded']:,.0f} "
        f"positions for {done['tokens_real']:,.0f} tokens, "
        f"{done['tokens_padded'] / done['tokens_real']:.2f} times as many. Gradients of "
        f"{done['gradients']} parameters are compared."
    ]


def _title(records: Sequence[Record]) -> str:
    case = records[0].case
    shared = "shared " if any(r.case["variant"].endswith("+shared") for r in records) else ""
    what = f"{shared}prompts of {case['prompt']:,} tokens, answers of {case['shortest']:,} to "
    if not case["prompt"]:
        what = "Python's help topics cut at "
    groups = f", {case['group']} to a prompt" if "group" in case and case["task"] == "grpo" else ""
    return (
        f"{TITLES[case['task']]}, {case['samples']} {SAMPLES[case['task']]} a batch{groups}, {what}"
        f"{case['longest']:,}; {model_title(records[0])}, {case['mode']}, {where(records)}"
    )
