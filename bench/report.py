"""`report`: tables and charts, from records alone; on pages between their markers."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import cast

from flexvarlen.bench.front_page import front_figure, summary
from flexvarlen.bench.suites import SUITES, suite_of
from flexvarlen.report.page import image_links, rewrite
from flexvarlen.report.records import Record, read_records
from flexvarlen.report.table import Column, Table, all_markdown, three_digits

Section = Callable[[Sequence[Record]], str]

SECTIONS: Mapping[str, str] = {
    "compare": "flexvarlen.verify.compare.report",
    "drift-op": "flexvarlen.verify.compare.drift_tables",
    "drift-model": "flexvarlen.verify.compare.drift_tables",
    "drift-rollout": "flexvarlen.verify.rollout.report",
}
"""The module that holds `section`, of records that no benchmark wrote."""


def report(
    paths: Iterable[Path],
    *,
    pages: Iterable[Path] = (),
    figures: Path | None = None,
    tables: Path | None = None,
) -> str:
    """Every suite's tables as Markdown; written into pages, and drawn, if asked.

    Args:
        paths: JSON lines of records, of any suites, on any machines.
        pages: Markdown files whose marked sections are replaced. "summary", the table of the
            README, is made where the records of all its lines are there.
        figures: a folder for the PNGs.
        tables: a folder for SUITE.md, all tables of each suite of which a page shows few lines.

    Raises:
        ValueError: a page with one marker of a pair, or with no pair of anything that is made; a
            file that holds no records.
    """
    suites: dict[str, list[Record]] = {}
    for record in read_records(paths):
        suites.setdefault(record.suite, []).append(record)
    whole = {name: section_of(name)(records) for name, records in suites.items()}
    short = {n: all_markdown(suite_of(n).page_tables(r)) for n, r in suites.items() if n in SUITES}
    short = {name: text for name, text in short.items() if text}
    if tables is not None:
        tables.mkdir(parents=True, exist_ok=True)
        for name in short:
            text = f"# {name}: {SUITES[name].summary}\n\n{whole[name]}\n"
            (tables / f"{name}.md").write_text(text, encoding="utf-8")
    bodies = whole | short
    for name in short:
        for part in suite_of(name).page_parts:
            own = [record for record in suites[name] if record.case["part"] == part]
            if text := all_markdown(suite_of(name).page_tables(own)):
                bodies[f"{name}-{part}"] = text
    every = [record for records in suites.values() for record in records]
    table = summary(every)
    if table is not None:
        bodies["summary"] = table.markdown()
    if "leaks" in suites:
        from flexvarlen.bench.suites.contract.leaks import front_table

        bodies["leaks-front"] = front_table(suites["leaks"]).markdown()
    drawn: dict[str, Sequence[Path]] = {}
    if figures is not None:
        drawn = {n: suite_of(n).figures(r, figures) for n, r in suites.items() if n in SUITES}
        drawn["front"] = front_figure(every, figures)
    for page in pages:
        links = {f"{name}-figures": image_links(found, page) for name, found in drawn.items()}
        rewrite(page, bodies | {name: text for name, text in links.items() if text})
    return "\n\n".join(whole.values())


def section_of(name: str) -> Section:
    """What makes a suite's tables; of suites that are no more, a table of all fields."""
    if name in SUITES:
        return suite_of(name).section
    if name in SECTIONS:
        return cast(Section, importlib.import_module(SECTIONS[name]).section)
    return lambda records: every_field(records).markdown()


def every_field(records: Sequence[Record]) -> Table:
    """A column for each field of the cases and for each number that was measured."""
    fields = dict.fromkeys(name for record in records for name in record.case)
    measures = dict.fromkeys(
        name
        for record in records
        for name, value in record.measures.items()
        if isinstance(value, int | float)
    )

    def field(name: str) -> Column:
        return Column(name, lambda record: str("" if (x := record.case.get(name)) is None else x))

    def measure(name: str) -> Column:
        return Column(name, lambda record: three_digits(record.measures.get(name)))

    status = Column("status", lambda record: record.outcome)
    columns = [*map(field, fields), status, *map(measure, measures)]
    return Table.of(records, columns, title=records[0].suite)
