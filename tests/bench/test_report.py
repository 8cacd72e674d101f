"""Pages and the README: every committed record has a table, and every number its record."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flexvarlen.bench import report as module
from flexvarlen.bench.front_page import LINES, front_figure, summary
from flexvarlen.report.records import Record, read_records

RESULTS = Path(module.__file__).resolve().parent / "results"
FILES = sorted(RESULTS.rglob("*.jsonl"))


@pytest.fixture(scope="module")
def committed():
    return read_records(FILES)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_tables_of_every_committed_file_are_made(path):
    text = module.report([path])
    assert "| --- |" in text
    assert "None" not in text


def test_records_of_a_suite_that_is_no_more_show_every_field():
    record = Record("gone", {"size": 8}, "ok", None, {"ms_p50": 1.5, "note": "x"}, {})
    table = module.every_field([record])
    assert table.header == ("size", "status", "ms_p50")
    assert table.lines == (("8", "ok", "1.50"),)


def test_the_readmes_table_has_six_lines_with_ours_and_theirs(committed):
    table = summary(committed)
    assert len(table.lines) == len(LINES) == 6
    assert all(ours and theirs for _, ours, theirs in table.lines)


def test_the_readmes_table_is_left_alone_where_a_suite_is_missing(committed):
    assert summary([r for r in committed if r.suite != "mask-build"]) is None


@pytest.mark.parametrize(("rate", "shown"), [(1234.0, "1,234"), (98765.0, "**98,765**")])
def test_the_readmes_table_shows_the_records_and_only_the_best_bold(committed, rate, shown):
    changed = [
        replace(r, measures=r.measures | {"tokens_per_s": rate})
        if r.suite == "end-to-end" and r.case["variant"] == "packed:auto"
        else r
        for r in committed
    ]
    assert summary(changed).lines[0][1] == shown


def test_the_picture_needs_both_halves(committed, tmp_path):
    assert front_figure([r for r in committed if r.suite == "compare"], tmp_path) == ()
    assert front_figure([r for r in committed if r.suite == "end-to-end"], tmp_path) == ()
