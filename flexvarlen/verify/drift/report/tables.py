"""The tables that `flexvarlen drift` prints, from records alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from flexvarlen.reference.acceptance import largest
from flexvarlen.report.records import Record, by_machine, in_short, ran_on
from flexvarlen.report.table import NOTHING, Column, Notes, Table, nan_last, number, share
from flexvarlen.verify.drift.training.verdict import ROUNDING, RULE

FORWARD, BACKWARD = ("out", "lse"), ("dq", "dk", "dv")
PARTS = (*FORWARD, *BACKWARD)
BAD = ("wrong", "failed")
RATIOS = tuple(f"{of}ratio_{part}" for of in ("", "serial_") for part in PARTS)
"""Errors against the reference over what the rule allows: one call, and one call per document."""


def tables(records: Sequence[Record]) -> list[Table]:
    """A table for each suite, machine, model and dtype."""
    makers = {"drift-op": _operators, "drift-model": _models, "drift-training": _trainings}
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for own in by_machine(records):
        for record in own:
            where = record.environment.get("gpu")
            model = (record.case.get("model"), record.case["dtype"])
            key = (where, record.suite, *(model if record.suite != "drift-op" else ()))
            groups.setdefault(key, []).append(record)
    return [makers[key[1]](own) for key, own in groups.items() if key[1] in makers]


def largest_of(records: Sequence[Record], names: Sequence[str]) -> float | None:
    """The largest of these measures; NaN if one is; None if no record has any."""
    found = [
        record.measures[name]
        for record in records
        for name in names
        if record.measures.get(name) is not None
    ]
    return largest(found) if found else None


def _field(name: str) -> Column:
    return Column(name, lambda record: str(record.case.get(name, "")))


def _measure(title: str, name: str, *, as_share: bool = False) -> Column:
    show = share if as_share else number
    return Column(title, lambda record: show(record.measures.get(name)))


def _status(notes: Notes) -> Column:
    """The status, with the reason below the table."""

    def cell(record: Record) -> str:
        if record.status == "ok" or record.reason is None:
            return record.status
        return f"{record.status} {notes.mark(in_short(record.reason))}"

    return Column("status", cell)


def _table(records: Sequence[Record], columns: Sequence[Column], title: str, notes: Notes) -> Table:
    """Title, then the machine."""
    title = f"{title}; {ran_on(records[0].environment)}"
    table = Table.of(records, columns, title, lambda record: record.status in BAD)
    return replace(table, notes=notes.lines())  # which the cells have numbered


def _what(records: Sequence[Record]) -> str:
    """The model, the dtype and the row."""
    case = records[0].case
    return f"{case['model']}, {case['dtype']}, {case['tokens']:,} tokens"


# ---- attention ----


def _operators(records: Sequence[Record]) -> Table:
    """A line for each dtype and backend: the largest over all cases."""
    notes = Notes()
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record.case["dtype"], record.case["variant"]), []).append(record)
    comparisons = dict.fromkeys(record.case["comparison"] for record in records)

    def relative(comparison: str, parts: Sequence[str]) -> Column:
        names = [f"{part}_relative" for part in parts]

        def cell(own: Sequence[Record]) -> str:
            compared = [record for record in own if record.case["comparison"] == comparison]
            return number(largest_of(compared, names))

        return Column(f"{comparison} {'fwd' if parts == FORWARD else 'bwd'}", cell)

    columns = [
        Column("backend", lambda own: str(own[0].case["variant"])),
        Column("dtype", lambda own: str(own[0].case["dtype"])),
        Column("status", lambda own: _worst_status(own, notes)),
        Column("error / allowed", lambda own: share(largest_of(own, RATIOS))),
        *(relative(name, parts) for name in comparisons for parts in (FORWARD, BACKWARD)),
    ]
    cases = len({record.case["name"] for record in records})
    title = f"Attention alone, largest relative differences over {cases} cases; "
    lines = list(groups.values())
    table = Table.of(
        lines,
        columns,
        title + ran_on(records[0].environment),
        lambda own: any(record.status in BAD for record in own),
    )
    return replace(table, notes=notes.lines())


def _worst_status(records: Sequence[Record], notes: Notes) -> str:
    """The worst status; a reason for each of the others."""
    order = ("wrong", "failed", "oom", "unsupported", "ok")
    worst = min(records, key=lambda record: order.index(record.status))
    marks = dict.fromkeys(
        notes.mark(in_short(record.reason))
        for record in records
        if record.status != "ok" and record.reason
    )
    return " ".join([worst.status, *marks])


# ---- models ----


def _models(records: Sequence[Record]) -> Table:
    """A line for each comparison and backend."""
    notes = Notes()
    columns = [
        _field("comparison"),
        Column("backend", _backends),
        _status(notes),
        Column("first layer", _first_part),
        _measure("logits", "logits_relative"),
        _measure("log-probability", "logprob_mean_abs"),
        _measure("KL", "kl_mean"),
        _measure("top-1", "top1", as_share=True),
        _measure("gradients", "gradient_relative"),
    ]
    return _table(records, columns, f"{_what(records)} packed in a row", notes)


def _backends(record: Record) -> str:
    other = record.case.get("other")
    return f"{record.case['variant']} / {other}" if other else str(record.case["variant"])


def _first_part(record: Record) -> str:
    if "logits_equal" not in record.measures:
        return NOTHING
    return record.measures["first_part"] or "none"


# ---- training ----


def _trainings(records: Sequence[Record]) -> Table:
    """A line for each variant."""
    notes = Notes()
    columns = [
        _field("variant"),
        _status(notes),
        Column("verdict", _verdict),
        Column("loss, last quarter", lambda record: _loss(record.measures.get("loss"))),
        _measure("difference", "loss_difference"),
        _measure("in σ", "sigmas"),
        Column("first angle °", lambda record: number(next(iter(_angles(record)), None))),
        Column("largest °", lambda r: number(max(_angles(r), key=nan_last, default=None))),
    ]
    title = f"{_what(records)} in each of {records[0].case['steps']} steps"
    table = _table(records, columns, title, notes)
    return replace(table, notes=(*table.notes, RULE))


def _verdict(record: Record) -> str:
    if record.case["variant"] == record.case["baseline"]:
        return "the baseline"
    if record.case["variant"] == ROUNDING:
        return "the rounding twin"
    return str(record.measures.get("verdict", NOTHING))


def _loss(value: Any) -> str:
    return NOTHING if value is None else f"{value:.5f}"


def _angles(record: Record) -> list[float]:
    return list(record.measures.get("angles", ()))
