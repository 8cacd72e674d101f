"""The records of a drift as tables: those that the command prints, and those of the pages.

A line of a table stands for one record or several; a cell shows the largest of their measures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from flexvarlen.reference.acceptance import largest
from flexvarlen.report.records import (
    Record,
    by_machine,
    commits_of,
    grouped,
    grouped_by,
    in_short,
    ran_on,
)
from flexvarlen.report.table import NOTHING, Column, Notes, Table, markdown, number, share, shown
from flexvarlen.verify.experiment.inputs import THEIRS
from flexvarlen.verify.experiment.variant import is_ours

Records = Sequence[Record]
Measured = tuple[float, str, Record]
"""A measure, its name, and the record that has it."""

FORWARD, BACKWARD = ("out", "lse"), ("dq", "dk", "dv")
PARTS = (*FORWARD, *BACKWARD)
RATIOS = tuple(f"{of}ratio_{part}" for of in ("", "serial_") for part in PARTS)
"""Errors against the reference over their limits: in one call, and in one call per document."""

STATUSES = ("wrong", "failed", "oom", "unsupported", "ok")
"""Statuses, the worst first."""
BAD = STATUSES[:2]


def measured(records: Records, names: Sequence[str]) -> list[Measured]:
    """The values of these measures in the records."""
    every = [(r.measures.get(name), name, r) for r in records for name in names]
    return [(value, name, r) for value, name, r in every if value is not None]


def field(name: str, title: str = "") -> Column:
    """A column with a field of the case."""
    return Column(title or name, lambda line: str(line[0].case.get(name, "")))


def measure(
    title: str,
    *names: str,
    comparison: str | None = None,
    show: Callable[[float | None], str] = number,
) -> Column:
    """A column with the largest of these measures, in one comparison or in all; NaN if one is."""

    def cell(line: Records) -> str:
        found = [value for value, *_ in measured(compared(line, comparison), names)]
        return show(largest(found) if found else None)

    return Column(title, cell)


def compared(records: Records, comparison: str | None) -> Records:
    """The records of one comparison; None: all."""
    return [r for r in records if comparison is None or r.case["comparison"] == comparison]


# ---- what the command prints ----


def never_ran(records: Records) -> list[Record]:
    """The records of variants that could not run at all."""
    could = {r.case["variant"] for r in records if r.status != "unsupported"}
    return [record for record in records if record.case["variant"] not in could]


def tables(records: Records) -> list[Table]:
    """A table for each suite, machine, model and dtype, of the variants that ran anywhere."""
    idle = {record.case["variant"] for record in never_ran(records)}

    def key(record: Record) -> tuple[Any, ...]:
        model = (record.case.get("model"), record.case["dtype"])
        return record.suite, *(model if record.suite != "drift-op" else ())

    machines = by_machine([r for r in records if r.case["variant"] not in idle])
    groups = [group for own in machines for group in grouped_by(own, key).values()]
    return [_table(own) for own in groups if own[0].suite in COLUMNS]


def _table(records: Records) -> Table:
    suite, case = records[0].suite, records[0].case
    marks = Notes()
    columns = list(COLUMNS[suite](Column("status", lambda line: _status(line, marks))))
    title = f"{case.get('model')}, {case['dtype']}, {case.get('tokens', 0):,} tokens"
    lines: list[Records] = [[record] for record in records]
    if suite == "drift-op":
        by_backend = grouped_by(records, lambda r: (r.case["dtype"], r.case["variant"]))
        lines = list(by_backend.values())
        cases = len(grouped(records, "name"))
        title = f"Attention alone, largest relative differences over {cases} cases"
        columns += [
            measure(f"{name} {way}", *(f"{part}_relative" for part in parts), comparison=name)
            for name in grouped(records, "comparison")
            for way, parts in (("fwd", FORWARD), ("bwd", BACKWARD))
        ]
    elif suite == "drift-rollout":
        title = f"{case['file']} of the engine beside {case.get('model')}, {case['dtype']}"
    else:
        title += " packed in a row"
    title = f"{title}; {ran_on(records[0].environment)}"
    return Table.of(lines, columns, title, lambda line: any(r.status in BAD for r in line), marks)


def _status(line: Records, notes: Notes) -> str:
    """The worst status; its reasons are noted below the table."""
    worst = min(line, key=lambda record: STATUSES.index(record.status))
    bad = [record for record in line if record.status != "ok" and record.reason]
    marks = dict.fromkeys(notes.mark(in_short(record.reason or "")) for record in bad)
    return " ".join([worst.status, *marks])


def _pair(line: Records) -> str:
    case = line[0].case
    return f"{case['variant']} / {case['other']}" if case.get("other") else str(case["variant"])


def _first_part(line: Records) -> str:
    measures = line[0].measures
    return (measures["first_part"] or "none") if "logits_equal" in measures else NOTHING


COLUMNS: dict[str, Callable[[Column], tuple[Column, ...]]] = {
    "drift-op": lambda status: (
        field("variant", "backend"),
        field("dtype"),
        status,
        measure("error / allowed", *RATIOS, show=share),
    ),
    "drift-model": lambda status: (
        field("comparison"),
        Column("backend", _pair),
        status,
        Column("first layer", _first_part),
        measure("logits", "logits_relative"),
        measure("log-probability", "logprob_mean_abs"),
        measure("KL", "kl_mean"),
        measure("top-1", "top1", show=share),
        measure("gradients", "gradient_relative"),
    ),
    "drift-rollout": lambda status: (
        field("variant", "backend"),
        field("pass"),
        status,
        measure("rms", "log_ratio_rms"),
        measure("outside 0.8 to 1.2", "outside_0.8_1.2", show=share),
        measure("0.9 to 1.1", "outside_0.9_1.1", show=share),
        measure("k1", "kl_k1"),
        measure("k3", "kl_k3"),
        *(
            measure(f"ratio p{q}", f"ratio_p{q}", show=partial(shown, form=".3f"))
            for q in ("01", "50", "99")
        ),
        measure("worst response", "response_rms"),
        measure("line", "worst_line", show=partial(shown, form=".0f")),
        measure("moved", "moved_rms"),
    ),
}
"""Columns of each suite's table, given the status column, whose reasons each table numbers."""
DISPENSABLE = ("log-probability", "KL", "first layer", "top-1", "line", "ratio p50", "moved", "k1")
"""Titles of the columns that a narrow terminal goes without, in this order; report.md has all."""


# ---- the tables of docs/verification.md ----


def section(records: Records) -> str:
    """The tables of one suite: one for each machine and dtype, and what is wrong below it."""
    parts = []
    for machine in by_machine(records):
        for own in grouped(machine, "dtype").values():
            ran = [record for record in own if record.status in ("ok", "wrong")]
            parts += [PAGE_TABLES[own[0].suite](ran)] if ran else []
            bad: dict[str, dict[str, None]] = {}
            for record in own:
                if record.status not in ("ok", "unsupported"):
                    what = f"`{record.case['variant']}`: {record.outcome}"
                    where = record.case.get("name", record.case["comparison"])
                    bad.setdefault(what, {})[where] = None
            parts += [f"{what} ({', '.join(where)})." for what, where in bad.items()]
    return "\n\n".join(parts)


def _operators(records: Records) -> str:
    """The command's table, which has a line for each backend."""
    (table,) = tables(records)
    return replace(table, title=f"{table.title}{commits_of(records)}").markdown()


def _models(records: Records) -> str:
    """A line for each comparison: the range of each measure over our backends; then a leak."""
    ours = [record for record in records if is_ours(record.case["variant"])]
    variants = grouped(compared(records, "packed-alone"), "variant")
    lines = {words: compared(ours, name) for words, name in MODEL_COMPARISONS.items()}
    # In records where none has that name, those of the plain name ran with the default cache.
    leaking = variants.get(f"{THEIRS}sdpa@default_cache") or variants.get(f"{THEIRS}sdpa", [])
    lines["a leak: transformers' `sdpa` with its default cache, packed against alone"] = leaking
    measures = MODEL_MEASURES.values()
    table = [[words, *(_range(own, name) for name in measures)] for words, own in lines.items()]
    first, names = records[0], " and ".join(grouped(records, "model"))
    return (
        f"{names}, random weights, a packed row of {first.case['tokens']:,} tokens in "
        f"{first.measures['documents']} documents, {first.case['dtype']}; "
        f"{ran_on(first.environment)}{commits_of(records)}. Smallest and largest over backends and "
        "models; logits and gradients relative; 0: the same bits.\n\n"
        f"{markdown(['what changes', *MODEL_MEASURES], table)}"
    )


def _range(records: Records, name: str) -> str:
    values = [value for value, *_ in measured(records, [name])]
    ends = (min(values), max(values)) if values else ()
    return " to ".join(dict.fromkeys(f"{value:.2g}" for value in ends)) or NOTHING


MODEL_COMPARISONS = {
    "packed against each document alone": "packed-alone",
    "packed against padded": "packed-padded",
    "another backend": "backend-backend",
    "float32 against bfloat16": "dtype",
    "compiled against eager": "eager-compiled",
}
MODEL_MEASURES = {
    "logits": "logits_relative",
    "log-probability of a label": "logprob_mean_abs",
    "KL": "kl_mean",
    "gradients": "gradient_relative",
}
PAGE_TABLES = {"drift-op": _operators, "drift-model": _models}
