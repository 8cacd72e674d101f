"""Pages and the README: every committed record has a table, and every number its record."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flexvarlen.bench import report as module
from flexvarlen.bench.front_page import GAINS, Pair, front_figure, summary
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


def test_the_readmes_table_has_a_number_for_each_gain(committed):
    lines = summary(committed).lines
    assert [today for today, *_ in lines] == [gain.today for gain in GAINS]
    assert all(re.fullmatch(r"\d\.\d\d( to \d\.\d\d)?×", times) for *_, times in lines)


@pytest.mark.parametrize(("measure", "times"), [("tokens_per_s", 0.5), ("ms_p50", 2.0)])
def test_more_is_better_of_rates_alone(measure, times):
    mode = {"mode": "eager"}
    pair = Pair("", "model", measure, mode, {"variant": "ours"}, {"variant": "theirs"})
    records = [
        Record("model", {"mode": mode, "variant": variant}, "ok", None, {measure: value}, {})
        for mode, ours, theirs in (("eager", 1.0, 2.0), ("compiled", 9.0, 1.0))
        for variant, value in (("ours", ours), ("theirs", theirs))
    ]
    assert pair.times(records) == times
    assert pair.times(records[:1]) is None


def test_the_readmes_table_and_picture_need_every_suite(committed, tmp_path):
    missing = [r for r in committed if r.suite != "hybrid"]
    assert summary(missing) is None
    assert front_figure(missing, tmp_path) == ()
