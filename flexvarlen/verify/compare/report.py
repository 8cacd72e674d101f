"""`Report`: the records of a comparison, as a table, as sentences, and as files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flexvarlen.report.records import (
    Record,
    append_records,
    grouped,
    grouped_by,
    in_short,
    not_run,
    ran_on,
    records_alike,
)
from flexvarlen.report.table import NOTHING, Column, Table, number, share, shown
from flexvarlen.verify.experiment.variant import is_ours

SUITE = "compare"
BASELINE = "transformers:eager@alone"
"""Each document alone, eagerly, in the tested dtype: the low-precision baseline of the rule."""
FORWARD_MARK = "†"
FORWARD_NOTE = f"{FORWARD_MARK} The forward alone; the other speeds are of forward and backward."


def variant(record: Record) -> str:
    name: str = record.case["variant"]
    return name


def verdict(record: Record) -> str:
    """ "right", "wrong", "leaks"; "baseline"; or the status of a variant that did not run."""
    if variant(record) == BASELINE:
        return "baseline"
    found: str | None = record.measures.get("verdict")
    if found is None:
        return record.status
    return f"{found} (forward)" if forward_only(record) else found


def forward_only(record: Record) -> bool:
    """Whether a record is forward-only while others have a backward: speeds are not comparable."""
    alone: bool = record.measures.get("passes", record.case["passes"]) != record.case["passes"]
    return alone


def passes(record: Record) -> bool:
    """Whether a record is no reason for a comparison to fail: transformers' own may leak."""
    found = record.measures.get("verdict", "right")
    return not is_ours(variant(record)) or (record.status != "failed" and found == "right")


def display_name(name: str) -> str:
    return "each document alone" if name == BASELINE else name


@dataclass(frozen=True)
class Report:
    """Records, in the order measured; `print` shows the table.

    Each record's `case["variant"]` is the backend; `measures` holds "verdict", "why", the errors
    ("logits_max", "gradient_max", …), the leaks and the speed.
    """

    records: tuple[Record, ...]

    def __add__(self, other: Report) -> Report:
        return Report(self.records + other.records)

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=140, no_color=True)
        with console.capture() as capture:
            console.print(self.table().rich())
        return "\n".join([capture.get().rstrip(), *self.notes(), self.sentence()])

    @property
    def passed(self) -> bool:
        """Whether every backend of ours that ran is right."""
        return all(passes(record) for record in self.records)

    @property
    def ran(self) -> bool:
        """Whether a backend of ours ran."""
        return any(
            is_ours(variant(record)) and "verdict" in record.measures for record in self.records
        )

    @property
    def measured(self) -> bool:
        """Whether there is a result besides the baseline: a check, or a failure."""
        return any(r.status == "failed" or "verdict" in r.measures for r in self.records)

    def verdict(self, backend: str, model: str | None = None) -> str:
        """ "right", "wrong", "leaks", or why it did not run: "unsupported", "oom", "failed"."""
        return verdict(self.record(backend, model))

    def record(self, backend: str, model: str | None = None) -> Record:
        """The record of a backend.

        Raises:
            ValueError: there is no record, or one for each of several models.
        """
        found = [
            record
            for record in self.records
            if variant(record) == backend and model in (None, record.case["model"])
        ]
        if len(found) != 1:
            names = ", ".join(dict.fromkeys(map(variant, self.records)))
            raise ValueError(
                f"backend must be one of {names}, of one model, got {backend!r} with "
                f"{len(found)} records; choose one, and name the model."
            )
        return found[0]

    def table(self) -> Table:
        """A line for each model and variant that could run."""
        ran = [record for record in self.records if record.status != "unsupported"]
        several = len(grouped(ran, "model")) > 1
        columns = [Column("model", lambda r: r.case["model"])] if several else []
        notes = [FORWARD_NOTE] if any(map(forward_only, ran)) else []
        return Table.of(
            ran, [*columns, *COLUMNS], is_bad=lambda record: not passes(record), notes=notes
        )

    def tables(self, width: int) -> list[Table]:
        """A table for each model, with the columns that fit into a terminal of this width."""
        return [
            replace(Report(tuple(own)).table(), title=model).narrowed(width, DISPENSABLE)
            for model, own in grouped(self.records, "model").items()
        ]

    def notes(self) -> list[str]:
        """Sentences on variants that did not run, and on those that are wrong."""
        notes: dict[str, dict[str, None]] = {}
        for record in self.records:
            where = f"{record.case['model']}, {display_name(variant(record))}"
            if record.status != "unsupported" and record.reason is not None:
                notes.setdefault(in_short(record.reason), {})[where] = None
            if (why_wrong := record.measures.get("why")) is not None:
                notes.setdefault(why_wrong, {})[where] = None
        said = [f"{'; '.join(where)}: {note}" for note, where in notes.items()]
        return [*said, *not_run(self.records)]

    def sentence(self) -> str:
        """The result in one sentence."""
        ours = [record for record in self.records if is_ours(variant(record))]
        theirs = [record for record in self.records if not is_ours(variant(record))]
        tail = "".join(
            f"; {found}: {_on_models(own)}"
            for found in ("leaks", "wrong")
            if (own := [r for r in theirs if r.measures.get("verdict") == found])
        )
        bad = [f"{r.case['model']} {variant(r)}: {verdict(r)}" for r in ours if not passes(r)]
        if bad:
            return f"Not right: {'; '.join(bad)}{tail}."
        right = [r for r in self.records if r.measures.get("verdict") == "right"]
        if not any(r in ours for r in right):
            return f"No backend of flexvarlen could run here{tail}."
        unit = "segment" if "segments" in self.records[0].case else "document"
        return f"Right, and no {unit} leaks: {_on_models(right)}{tail}."

    def markdown(self) -> str:
        """A table for each model, with a description of the measurement, and the notes."""
        parts = []
        for records in records_alike(self.records, ("variant",)):
            own = Report(tuple(records))
            parts.append(f"{describe(records)}\n\n{own.table().markdown()}")
        notes = "\n".join(f"- {note}" for note in self.notes())
        return "\n\n".join([*parts, notes, self.sentence()]) + "\n"

    def save(self, folder: str | Path) -> list[Path]:
        """Append to records.jsonl; write table.md and the pictures; creates the folder.

        Returns:
            The paths.
        """
        home = Path(folder)
        append_records(home / "records.jsonl", self.records)
        return [home / "records.jsonl", *self.show(home)]

    def show(self, folder: str | Path) -> list[Path]:
        """Write table.md and the pictures into an existing folder; returns the paths."""
        from flexvarlen.verify.compare.figure import draw

        paths = [Path(folder) / "table.md"]
        paths[0].write_text(self.markdown(), encoding="utf-8")
        models = grouped(self.records, "model")
        for model, own in models.items():
            if timed := [r for r in own if r.measures.get("tokens_per_s")]:
                slug = "" if len(models) == 1 else "-" + re.sub(r"[^\w.]+", "-", model).strip("-")
                path, title = Path(folder) / f"compare{slug}.png", Report(tuple(own)).sentence()
                caption = f"{describe(own)}; flexvarlen compare."
                paths.append(draw(timed, path, title, caption, forward_only))
        return paths


def _on_models(records: Sequence[Record]) -> str:
    """Which variants ran on which models; variants of the same models are grouped."""
    variants = grouped(records, "variant")
    together = grouped_by(variants, lambda x: ", ".join(r.case["model"] for r in variants[x]))
    return "; ".join(f"{', '.join(names)} on {models}" for models, names in together.items())


def section(records: Sequence[Record]) -> str:
    """The report section of a page."""
    return Report(tuple(records)).markdown()


def describe(records: Sequence[Record]) -> str:
    """Describe the conditions under which a model's records were measured."""
    case = records[0].case
    mode = "compiled" if case["compiled"] else "eager"
    documents = f"{case['documents']} documents"
    if "segments" in case:
        documents = f"{case['documents']} samples of {case['segments']} segments"
    return (
        f"{case['model']}, {case['dtype']}, {case['passes']}, {mode}; {case['tokens']:,} tokens "
        f"in {documents} (longest {case['longest_document']:,}); reference: {case['reference']}; "
        f"{case['source']}; {ran_on(records[0].environment)}"
    )


def _leak(record: Record) -> str:
    leaked = record.measures.get("leaked_documents")
    if leaked is None:
        return NOTHING
    units = record.case.get("segments", record.case["documents"])
    return f"{leaked} of {units}" if leaked else "none"


def _ms(record: Record) -> str:
    if "ms_p50" not in record.measures:
        return NOTHING
    middle, low, high = (record.measures[f"ms_{x}"] for x in ("p50", "p20", "p80"))
    digits = ".0f" if middle >= 100 else ".1f"
    return f"{middle:{digits}} ({low:{digits}}–{high:{digits}})"


def _marked(record: Record, text: str) -> str:
    """A cost, marked if it is of the forward alone."""
    return f"{text}{FORWARD_MARK}" if text != NOTHING and forward_only(record) else text


def _compiled(record: Record, name: str, form: str) -> str:
    return shown(record.measures.get(name), form) if record.case["compiled"] else NOTHING


COLUMNS = (
    Column("backend", lambda r: display_name(variant(r))),
    Column("verdict", verdict),
    Column("leaks", _leak),
    Column("logits error", lambda r: number(r.measures.get("logits_max"))),
    Column("gradients", lambda r: number(r.measures.get("gradient_max"))),
    Column("argmax", lambda r: share(r.measures.get("argmax_agreement"))),
    Column("tokens/s", lambda r: _marked(r, shown(r.measures.get("tokens_per_s"), ",.0f"))),
    Column("ms (p20–p80)", lambda r: _marked(r, _ms(r))),
    Column("peak MiB", lambda r: _marked(r, shown(r.measures.get("peak_mib"), ",.0f"))),
    Column("compile s", lambda r: _compiled(r, "compile_s", ".1f")),
    Column("graph breaks", lambda r: _compiled(r, "graph_breaks", ".0f")),
    Column("recompiles", lambda r: _compiled(r, "recompiles", ".0f")),
)
"""Columns of a record. Columns that are empty in all records are not shown."""
DISPENSABLE = (
    *("ms (p20–p80)", "recompiles", "argmax", "peak MiB"),
    *("graph breaks", "compile s", "gradients"),
)
"""Titles of the columns that narrow terminals drop, in this order; table.md has all."""
