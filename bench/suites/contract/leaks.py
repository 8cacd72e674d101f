"""Suite "leaks": in which form of a packed batch documents leak, in transformers and in ours."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import transformers

from flexvarlen.bench.suites.contract.forms import Forms, FormsCase
from flexvarlen.bench.suites.contract.tiny_images import IMAGES
from flexvarlen.reference.acceptance import largest
from flexvarlen.report.records import Record, commits_of, grouped, grouped_by, ran_on
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
    """A case for one version of transformers, so that a file can have records of several."""

    transformers: str


class Leaks(Forms):
    """Llama, Qwen3, hybrids and models with images on plain transformers' layers, beside ours."""

    name = "leaks"
    models = ("llama", "qwen3", *HYBRID, *IMAGES)
    gradients = False

    def cases(self, options: Options) -> Sequence[FormsCase]:
        version = transformers.__version__
        return [LeaksCase(**asdict(case), transformers=version) for case in super().cases(options)]

    def variants(self, case: Case, options: Options) -> Sequence[str]:
        theirs = ("eager", "sdpa", "flash_attention_2")
        ours = ("sdpa", "flex", "varlen", "fa2") if options.on_gpu else ("sdpa",)
        return (*(f"transformers:{x}" for x in theirs), *(f"flexvarlen:{x}" for x in ours))

    def tables(self, records: Sequence[Record]) -> Iterable[Table]:
        """For each machine and version, a table of each kind of models."""
        for own in _runs(records):
            for kind in grouped_by(sorted(own, key=_kind), _kind).values():
                yield _table(grouped_by(kind, lambda r: f"{r.case['variant'].replace(':', ' `')}`"))

    def page_tables(self, records: Sequence[Record]) -> Iterable[Table]:
        """For each version's most complete machine, ours in one column: text, then images."""
        shown = sorted(_shown(records), key=lambda r: (_kind(r), _is_ours(r)))
        for with_images, own in grouped_by(shown, _has_images).items():
            yield _table(grouped_by(own, _image_column if with_images else _page_column))


def front_table(records: Sequence[Record]) -> Table:
    """The README's: how many packed forms leak in each version, and six of them."""
    text = [r for r in records if not _has_images(r)]
    shown = [r for r in _shown(text) if r.case["pass"] not in WITHOUT_PACKING]
    shown.sort(key=lambda r: (_is_ours(r), _kind(r)))
    columns, forms = grouped_by(shown, _front_column), grouped(shown, "pass")
    table = _by_form((form for form in FRONT if form in forms), columns, _verdict, "")
    versions = sorted(grouped_by(shown, _version))
    total = f"all {len(forms)} forms: how many leak under {' / '.join(versions)}"
    counts = (_leaking_forms(own, versions) for own in columns.values())
    return replace(table, lines=(*table.lines, (total, *counts)))


def _leaking_forms(records: Sequence[Record], versions: Sequence[str]) -> str:
    """In how many forms documents leak, under each of these versions of transformers."""
    leaking: dict[str, set[str]] = {}
    for version, own in grouped_by(records, _version).items():
        leaking[version] = {r.case["pass"] for r in own if r.measures.get("leaks")}
    return " / ".join(str(len(leaking[v])) if v in leaking else NOTHING for v in versions)


def _runs(records: Sequence[Record]) -> Iterable[list[Record]]:
    """The records of each machine and version of transformers."""
    return grouped_by(records, lambda r: (r.environment.get("gpu"), _version(r))).values()


def _shown(records: Sequence[Record]) -> list[Record]:
    """Each version's records on the most complete machine, without forms not measured there."""
    versions: dict[str, list[Record]] = {}
    for own in _runs(records):
        ran = {r.case["variant"] for r in own if "error" in r.measures}
        kept = [r for r in own if r.case["variant"] in ran]
        version = _version(own[0])
        versions[version] = max(versions.get(version, []), kept, key=len)
    return [record for version in sorted(versions) for record in versions[version]]


def _version(record: Record) -> str:
    return str(record.environment["transformers"])


def _has_images(record: Record) -> bool:
    return record.case["model"] in IMAGES


def _kind(record: Record) -> str:
    if _has_images(record):
        return "images"
    return "hybrid" if record.case["model"] in HYBRID else "attention"


def _is_ours(record: Record) -> bool:
    return is_ours(record.case["variant"])


def _theirs(record: Record) -> str:
    name = record.case["variant"].partition(":")[2]
    both = "`eager`, `sdpa`"
    return {"eager": both, "sdpa": both, "flash_attention_2": "FA2"}.get(name, f"`{name}`")


def _front_column(record: Record) -> str:
    if _is_ours(record):
        return "flexvarlen"
    return "hybrid models" if _kind(record) == "hybrid" else f"dense models, {_theirs(record)}"


def _page_column(record: Record) -> str:
    library = f"transformers {_version(record)} {_theirs(record)}"
    return f"{_kind(record)}: {'flexvarlen' if _is_ours(record) else library}"


def _image_column(record: Record) -> str:
    return "flexvarlen" if _is_ours(record) else f"transformers, `{record.case['model']}`"


def _table(columns: Mapping[str, Sequence[Record]]) -> Table:
    """Errors and leaks, in all forms."""
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
    return _by_form(grouped(records, "pass"), columns, partial(_leak, notes), title, notes)


def _by_form(
    forms: Iterable[str],
    columns: Mapping[str, Sequence[Record]],
    cell: Callable[[Sequence[Record]], str],
    title: str,
    notes: Iterable[str] = (),
) -> Table:
    """Forms down, and across what `cell` says of each column's records of a form."""

    def column(name: str) -> Column:
        own = grouped(columns[name], "pass")
        return Column(name, lambda form: cell(own.get(form, [])))

    return Table.of(forms, [Column("packed batch", str), *map(column, columns)], title, notes=notes)


def _leak(notes: Notes, records: Sequence[Record]) -> str:
    measured = [r.measures["error"] for r in records if "error" in r.measures]
    parts = []
    if measured:
        worst = largest(measured)
        value = f"{worst:.1g}" if worst < 1 else f"{worst:.1f}"
        parts.append(f"**{value}**" if any(r.status == "wrong" for r in records) else value)
    for r in records:
        if r.status not in ("ok", "wrong"):
            word = "refused" if r.status == "unsupported" else r.status
            parts.append(f"{word} {notes.mark(r.reason or '')}")
    return ", ".join(dict.fromkeys(parts))


def _verdict(records: Sequence[Record]) -> str:
    """In words, over all models and versions; the worst first."""
    found = {"leaks" if r.measures.get("leaks") else r.status for r in records}
    return " or ".join(word for status, word in WORDS.items() if status in found) or NOTHING


SUITE = Leaks()
