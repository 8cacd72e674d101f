"""Tables and charts of the suite "embeddings", from records alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flexvarlen.bench.suites.model.geometries import GEOMETRY_TITLES
from flexvarlen.bench.suites.model.tables import made, number
from flexvarlen.report.figure import bars, chart, save, style_of
from flexvarlen.report.records import Record, commits_of, ran_on, records_alike
from flexvarlen.report.table import NOTHING, Column, Table

OURS = "embed"
UNPAD = "unpad"
THEIRS = "sentence-transformers"


def kernel_of(variant: str) -> str | None:
    """transformers' name of a variant's attention, or None if it is ours.

    >>> kernel_of("sentence-transformers:sdpa@32"), kernel_of("unpad@32")
    ('sdpa', None)
    """
    return variant.partition("@")[0].partition(":")[2] or None


def batch_size_of(variant: str) -> int:
    """The number behind the "@"; 0 if there is none.

    >>> batch_size_of("unpad@32"), batch_size_of("embed")
    (32, 0)
    """
    return int(variant.partition("@")[2] or 0)


def section(records: Sequence[Record]) -> str:
    """A table for each number of texts."""
    return "\n\n".join(_table(group).markdown() for group in _groups(records))


def figures(records: Sequence[Record], folder: Path) -> list[Path]:
    """A chart of the most texts that were embedded on each machine."""
    drawn = [_draw(group, folder) for group in _groups(records)]
    return [path for path in drawn if path is not None]


def _groups(records: Sequence[Record]) -> list[list[Record]]:
    """Records that differ in the variant alone, the fastest first."""
    return [
        sorted(group, key=_speed, reverse=True) for group in records_alike(records, ["variant"])
    ]


def _speed(record: Record) -> float:
    return record.measures["texts_per_s"] if record.status == "ok" else 0.0


def _shown(record: Record, quote: str = "") -> str:
    variant = record.case["variant"]
    kernel = kernel_of(variant)
    if variant == OURS:
        return f"{quote}fv.embed{quote}"
    if kernel is None:
        return f"{THEIRS}, {quote}unpad=True{quote}"
    return f"{THEIRS}, {quote}{kernel}{quote}"


def _table(records: Sequence[Record]) -> Table:
    columns = [
        Column("embeds", lambda r: _shown(r, quote="`")),
        Column("batch size", lambda r: str(batch_size_of(r.case["variant"]) or NOTHING)),
        number("texts/s", "texts_per_s", ",.0f", outcome=True),
        number("tokens/s", "tokens_per_s", ",.0f"),
        number("seconds", "seconds", ".1f"),
        number("texts", "texts", ",.0f"),
        number("peak GiB", "peak_mib", ".2f", 1 / 1024),
        made("1 − lowest cosine", lambda r: f"{1 - r.measures['lowest_cosine']:.0e}"),
    ]
    return Table.of(records, columns, _title(records), notes=_notes(records))


def _notes(records: Sequence[Record]) -> list[str]:
    done = [r for r in records if r.status == "ok"]
    if not done:
        return []
    first = done[0].measures
    return [
        "Seconds are from texts to vectors on the host, tokenization included. The cosine is with "
        f"vectors in fp32; plain attention in this dtype has "
        f"{1 - first['plain_lowest_cosine']:.0e}. A variant that would take more than "
        f"{records[0].case['at_most_s']:.0f} seconds gets fewer texts."
    ]


def _title(records: Sequence[Record]) -> str:
    case = records[0].case
    name = GEOMETRY_TITLES.get(case["geometry"], case["geometry"])
    return (
        f"{case['texts']:,} texts of {case['mean']:.0f} words on average, {name} geometry, "
        f"{case['layers']} layers, {case['dtype']}; "
        f"{ran_on(records[0].environment)}{commits_of(records)}"
    )


def _draw(records: Sequence[Record], folder: Path) -> Path | None:
    """Texts a second: ours, and of each other way the default batch size and the best one."""
    found = [r for r in records if r.status == "ok"]
    ours = next((_speed(r) for r in found if r.case["variant"] == OURS), None)
    theirs = [r for r in found if kernel_of(r.case["variant"])]
    if ours is None or not theirs:
        return None
    shown: dict[tuple[str, bool], Record] = {}
    for record in found:  # the fastest first
        is_default = batch_size_of(record.case["variant"]) == 32
        shown.setdefault((_shown(record), is_default), record)
    chosen = list(shown.values())
    best, worst = (ours / _speed(r) for r in (theirs[0], theirs[-1]))
    title = (
        f"fv.embed embeds {best:.1f} times the texts a second of sentence-transformers at its best "
        f"batch size, {worst:.1f} at its worst"
    )
    figure, (axes,) = chart(
        title, f"{_title(records)}. flexvarlen bench embeddings.", height_px=160 + 32 * len(chosen)
    )
    bars(
        axes,
        {_label(r): _speed(r) for r in chosen},
        label="texts a second",
        colors=[style_of(_style(r)).color for r in chosen],
        texts=[f"{_speed(r):,.0f}" for r in chosen],
    )
    return save(figure, folder / f"embeddings-{records[0].case['texts']}.png")


def _label(record: Record) -> str:
    size = batch_size_of(record.case["variant"])
    return _shown(record) + (f", batches of {size}" if size else "")


def _style(record: Record) -> str:
    kernel = kernel_of(record.case["variant"])
    return "auto" if kernel is None else f"transformers:{kernel}"
