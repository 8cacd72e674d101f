"""Suite "leaks": in which form of a packed batch documents leak, in transformers and in ours."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import transformers

from flexvarlen.bench.suites.contract.forms import Forms, FormsCase
from flexvarlen.reference.acceptance import largest
from flexvarlen.report.records import Record, commits_of, grouped, ran_on
from flexvarlen.report.table import NOTHING, Column, Notes, Table
from flexvarlen.runner.suite import Case, Options
from flexvarlen.verify.experiment.variant import is_ours

HYBRID = ("qwen3_5_text", "lfm2", "granitemoehybrid")
"""Models with a gated delta rule, with short convolutions, and with Mamba-2."""
WORDS = {"leaks": "**leaks**", "wrong": "**wrong**", "failed": "failed", "oom": "out of memory"}
WORDS |= {"unsupported": "raises", "ok": "right"}
FRONT = (
    "position_ids, use_cache=False",
    "position_ids, default use_cache",
    "position_ids and an attention_mask of ones",
    "position_ids, cu_seq_lens_*, max_length_* and seq_idx",
    "2D mask of document ids",
    "two packed rows",
)
"""The forms that the README shows."""
WITHOUT_PACKING = ("right padding", "left padding")


@dataclass(frozen=True)
class LeaksCase(FormsCase):
    """Of one version of transformers, so that records of several stand in one file."""

    transformers: str


class Leaks(Forms):
    """Llama, Qwen3 and hybrid models on plain transformers' layers, beside ours."""

    name = "leaks"
    models = ("llama", "qwen3", *HYBRID)
    gradients = False

    def cases(self, options: Options) -> Sequence[FormsCase]:
        version = transformers.__version__
        return [LeaksCase(**asdict(case), transformers=version) for case in super().cases(options)]

    def variants(self, case: Case, options: Options) -> Sequence[str]:
        theirs = ("eager", "sdpa", "flash_attention_2")
        ours = ("sdpa", "flex", "varlen", "fa2") if options.on_gpu else ("sdpa",)
        return (*(f"transformers:{x}" for x in theirs), *(f"flexvarlen:{x}" for x in ours))

    def tables(self, records: Sequence[Record]) -> Iterable[Table]:
        """For each machine and version a table of attention alone and one of hybrid models."""
        groups = [
            [r for r in own if _is_hybrid(r) == hybrid]
            for own in _runs(records)
            for hybrid in (False, True)
        ]
        for own in filter(None, groups):
            variants = grouped(own, "variant")
            yield _table({f"{x.replace(':', ' `')}`": found for x, found in variants.items()})

    def page_tables(self, records: Sequence[Record]) -> Iterable[Table]:
        """Of each version where most was measured: both kinds of models, ours in one column."""
        columns: dict[str, list[Record]] = {}
        for record in sorted(_shown(records), key=lambda r: (_is_hybrid(r), _is_ours(r))):
            columns.setdefault(_page_column(record), []).append(record)
        yield _table(columns)


def front_table(records: Sequence[Record]) -> Table:
    """The README's: how many packed forms leak in each version, and six of them."""
    shown = [r for r in _shown(records) if r.case["pass"] not in WITHOUT_PACKING]
    columns: dict[str, list[Record]] = {}
    for record in sorted(shown, key=lambda r: (_is_ours(r), _is_hybrid(r))):
        library, name = _implementation(record)
        theirs = "hybrid models" if _is_hybrid(record) else f"dense models,{name}"
        columns.setdefault(library if _is_ours(record) else theirs, []).append(record)
    counts = []
    for name, own in columns.items():
        leaking = {_version(r): set[str]() for r in own}
        for r in own:
            leaking[_version(r)] |= {r.case["pass"]} if r.measures.get("leaks") else set()
        said = [f"{len(forms)} under {version}" for version, forms in sorted(leaking.items())]
        counts.append(f"{' and '.join(said)} with {name}")
    forms = grouped(shown, "pass")
    title = (
        f"Of {len(forms)} forms of a packed batch, those in which documents leak without a "
        f"warning, by version of transformers: {'; '.join(counts)}"
    )
    made = [Column(name, _verdict_of(grouped(own, "pass"))) for name, own in columns.items()]
    rows = [form for form in FRONT if form in forms]
    return Table.of(rows, [Column("packed batch", str), *made], title)


def _runs(records: Sequence[Record]) -> list[list[Record]]:
    """The records of each machine and version of transformers."""
    found: dict[tuple[Any, str], list[Record]] = {}
    for record in records:
        found.setdefault((record.environment.get("gpu"), _version(record)), []).append(record)
    return list(found.values())


def _shown(records: Sequence[Record]) -> list[Record]:
    """Of each version the machine where most was measured, without what measured nothing there."""
    versions: dict[str, list[Record]] = {}
    for own in _runs(records):
        ran = {r.case["variant"] for r in own if "error" in r.measures}
        kept = [r for r in own if r.case["variant"] in ran]
        version = _version(own[0])
        versions[version] = max(versions.get(version, []), kept, key=len)
    return [record for version in sorted(versions) for record in versions[version]]


def _version(record: Record) -> str:
    return str(record.environment["transformers"])


def _is_hybrid(record: Record) -> bool:
    return record.case["model"] in HYBRID


def _is_ours(record: Record) -> bool:
    return is_ours(record.case["variant"])


def _implementation(record: Record) -> tuple[str, str]:
    """The library, and which attention of transformers."""
    library, _, name = record.case["variant"].partition(":")
    theirs = {"eager": " `eager`, `sdpa`", "sdpa": " `eager`, `sdpa`", "flash_attention_2": " FA2"}
    return library, theirs.get(name, f" `{name}`") if library == "transformers" else ""


def _page_column(record: Record) -> str:
    library, name = _implementation(record)
    version = "" if _is_ours(record) else f" {_version(record)}"
    return f"{'hybrid' if _is_hybrid(record) else 'attention'}: {library}{version}{name}"


def _table(columns: Mapping[str, Sequence[Record]]) -> Table:
    """Forms down, and across what each column's records say."""
    notes = Notes()
    records = [record for own in columns.values() for record in own]
    *others, last = dict.fromkeys(r.case["model"] for r in records)
    models = f"{', '.join(others)} and {last}" if others else last
    ran = [
        f"{own[0].case['dtype']}, {ran_on(own[0].environment)}{commits_of(own)}"
        for own in _runs(records)
    ]
    title = (
        f"Largest error of packed logits against each document alone in fp64, over tiny random "
        f"{models} models; {'; '.join(ran)}. Bold: documents leak, or the results are wrong"
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


def _verdict_of(groups: Mapping[str, Sequence[Record]]) -> Callable[[str], str]:
    """In words, over all models and versions; the worst first."""

    def cell(form: str) -> str:
        found = {"leaks" if r.measures.get("leaks") else r.status for r in groups.get(form, ())}
        return " or ".join(word for status, word in WORDS.items() if status in found) or NOTHING

    return cell


SUITE = Leaks()
