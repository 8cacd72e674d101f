"""Suite "leaks": in which form of a packed batch documents leak, in transformers and in ours."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from flexvarlen.bench.suites.contract.forms import Forms
from flexvarlen.reference.acceptance import largest
from flexvarlen.report.records import Record, by_machine, commits_of, grouped, ran_on
from flexvarlen.report.table import Column, Notes, Table
from flexvarlen.runner.suite import Case, Options

HYBRID = ("qwen3_5_text", "lfm2", "granitemoehybrid")
"""Models with a gated delta rule, with short convolutions, and with Mamba-2."""


class Leaks(Forms):
    """Llama, Qwen3 and hybrid models on plain transformers' layers, beside ours."""

    name = "leaks"
    models = ("llama", "qwen3", *HYBRID)
    gradients = False

    def variants(self, case: Case, options: Options) -> Sequence[str]:
        theirs = ("eager", "sdpa", "flash_attention_2")
        ours = ("sdpa", "flex", "varlen", "fa2") if options.on_gpu else ("sdpa",)
        return (*(f"transformers:{x}" for x in theirs), *(f"flexvarlen:{x}" for x in ours))

    def tables(self, records: Sequence[Record]) -> Iterable[Table]:
        """For each machine a table of attention alone and one of hybrid models."""
        groups = [
            [r for r in own if (r.case["model"] in HYBRID) == hybrid]
            for own in by_machine(records)
            for hybrid in (False, True)
        ]
        for own in filter(None, groups):
            variants = grouped(own, "variant")
            yield _table({f"{x.replace(':', ' `')}`": found for x, found in variants.items()})

    def page_tables(self, records: Sequence[Record]) -> Iterable[Table]:
        """Of the machine with the most records: both kinds of models, ours in one column."""
        columns: dict[str, list[Record]] = {}
        own = max(by_machine(records), key=lambda own: len(own))
        for record in sorted(own, key=_is_hybrid):
            columns.setdefault(_page_column(record), []).append(record)
        yield _table(columns)


def _is_hybrid(record: Record) -> bool:
    return record.case["model"] in HYBRID


def _page_column(record: Record) -> str:
    library, _, name = record.case["variant"].partition(":")
    theirs = {"eager": " `eager`, `sdpa`", "sdpa": " `eager`, `sdpa`", "flash_attention_2": " FA2"}
    named = theirs.get(name, f" `{name}`") if library == "transformers" else ""
    return f"{'hybrid' if _is_hybrid(record) else 'attention'}: {library}{named}"


def _table(columns: Mapping[str, Sequence[Record]]) -> Table:
    """Forms down, and across what each column's records say."""
    notes = Notes()
    records = [record for own in columns.values() for record in own]
    *others, last = dict.fromkeys(r.case["model"] for r in records)
    models = f"{', '.join(others)} and {last}" if others else last
    title = (
        f"Largest error of packed logits against each document alone in fp64, over tiny random "
        f"{models} models; {records[0].case['dtype']}, {ran_on(records[0].environment)}"
        f"{commits_of(records)}. Bold: documents leak, or the results are wrong"
    )
    made = [Column(name, _leak_of(grouped(own, "pass"), notes)) for name, own in columns.items()]
    forms = grouped(records, "pass")
    return Table.of(forms, [Column("packed batch", str), *made], title, notes=notes)


def _leak_of(groups: Mapping[str, Sequence[Record]], notes: Notes) -> Callable[[str], str]:
    def cell(form: str) -> str:
        own = groups.get(form, [])
        measured = [r.measures["error"] for r in own if "error" in r.measures]
        parts = []
        if measured:
            worst = largest(measured)
            value = f"{worst:.1g}" if worst < 1 else f"{worst:.1f}"
            parts.append(f"**{value}**" if any(r.status == "wrong" for r in own) else value)
        for r in own:
            if r.status not in ("ok", "wrong"):
                word = "refused" if r.status == "unsupported" else r.status
                parts.append(f"{word} {notes.mark(r.reason or '')}")
        return ", ".join(dict.fromkeys(parts))

    return cell


SUITE = Leaks()
