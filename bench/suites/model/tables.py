"""What the tables of these suites share: names, cells, and titles, from records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from flexvarlen.bench.suites.model.geometries import GEOMETRY_TITLES
from flexvarlen.report.records import Record, commits_of, ran_on
from flexvarlen.report.table import NOTHING, Column, Notes, best
from flexvarlen.verify.experiment.inputs import THEIRS


def attention_title(name: str, took: Sequence[str] = ()) -> str:
    """An attention's name for a reader; of "auto" with what it took.

    >>> attention_title("transformers:flash_attention_3@cu_seq_lens")
    'transformers `flash_attention_3`, boundaries from cu_seq_lens'
    >>> attention_title("auto", ["fa3"])
    'flexvarlen `auto` (fa3)'
    """
    kind, _, form = name.partition("@")
    theirs = kind.startswith(THEIRS)
    shown = f"{'transformers' if theirs else 'flexvarlen'} `{kind.removeprefix(THEIRS)}`"
    shown += f", boundaries from {form}" if form else ""
    return shown + (f" ({', '.join(took)})" if took and kind == "auto" else "")


def took(records: Iterable[Record]) -> list[str]:
    """The backends that attended, once each."""
    found = (r.measures.get("attends") or "" for r in records)
    return [x for x in dict.fromkeys(name for names in found for name in names.split(", ")) if x]


def model_title(record: Record, what: str = "") -> str:
    """A record's model and layers; `what` stands after the model's name, as " geometry"."""
    geometry, layers = record.case["geometry"], record.case["layers"]
    return f"{GEOMETRY_TITLES.get(geometry, geometry)}{what}, {layers} layers"


def where(records: Sequence[Record]) -> str:
    """The dtype, the machine, versions and commits."""
    ran = f"{ran_on(records[0].environment)}{commits_of(records)}"
    return f"{records[0].case['dtype']}; {ran}"


def is_ok(record: Record) -> bool:
    return record.status == "ok"


def value(record: Record | None, name: str) -> float | None:
    """A measure of a record that is right."""
    return None if record is None or not is_ok(record) else record.measures.get(name)


def cell(record: Record | None, text: str | None, notes: Notes) -> str:
    """`text`; or why there is none, in a note."""
    if record is not None and not is_ok(record):
        return f"{record.status} {notes.mark(record.outcome)}"
    return NOTHING if record is None or text is None else text


def spread(record: Record | None, digits: int = 0, name: str = "ms") -> str | None:
    """The median in ms, and in parentheses the 20th and 80th percentile."""
    if value(record, f"{name}_p50") is None or record is None:
        return None
    p20, p50, p80 = (f"{record.measures[f'{name}_p{x}']:.{digits}f}" for x in (20, 50, 80))
    return f"{p50} ({p20}–{p80})"


def made(title: str, text: Callable[[Record], str | None], *, outcome: bool = False) -> Column:
    """Text of the records that are right; `outcome`: say what became of the others."""

    def shown(record: Record) -> str:
        if not is_ok(record):
            return record.outcome if outcome else NOTHING
        return text(record) or NOTHING

    return Column(title, shown)


def number(
    title: str,
    name: str,
    form: str,
    scale: float = 1.0,
    *,
    outcome: bool = False,
) -> Column:
    """A column of a measure in that format; `outcome` as in `made`."""

    def text(record: Record) -> str | None:
        found = record.measures.get(name)
        return None if found is None else f"{found * scale:{form}}"

    return made(title, text, outcome=outcome)


def to_best(record: Record, name: str, others: Iterable[Record]) -> float:
    """The ratio of a measure to the best of some records, itself among them.

    Tokens per second are best where they are most, times where they are least.
    """
    values = [value(other, name) for other in others]
    top = best(values, max if name == "tokens_per_s" else min)
    return record.measures[name] / top if top else 1.0


def with_ratio(record: Record | None, name: str, others: Iterable[Record], form: str) -> str | None:
    """A measure, and in parentheses its ratio to the best of some records."""
    found = value(record, name)
    if record is None or found is None:
        return None
    return f"{found:{form}} ({to_best(record, name, others):.2f})"
