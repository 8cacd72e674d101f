"""Pages and the README: every committed record has a table, and every number its record."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexvarlen.bench import report as module
from flexvarlen.bench.front_page import GAINS, Gain, front_figure, summary
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
    assert [what for what, *_ in lines] == [gain.what for gain in GAINS]
    assert all(float(times.removesuffix("×")) > 1 for *_, times in lines)


@pytest.mark.parametrize(("measure", "times"), [("tokens_per_s", 0.5), ("ms_p50", 2.0)])
def test_more_is_better_of_rates_alone(measure, times):
    gain = Gain("", "", "model", measure, "ours", "theirs", {"mode": "eager"})
    records = [
        Record("model", {"mode": mode, "variant": variant}, "ok", None, {measure: value}, {})
        for mode, ours, theirs in (("eager", 1.0, 2.0), ("compiled", 9.0, 1.0))
        for variant, value in (("ours", ours), ("theirs", theirs))
    ]
    assert gain.times(records) == times
    assert gain.times(records[:1]) is None


def test_the_readmes_table_is_left_alone_where_a_suite_is_missing(committed):
    assert summary([r for r in committed if r.suite != "mask-build"]) is None


def test_the_picture_needs_records_of_whole_models(committed, tmp_path):
    assert front_figure([r for r in committed if r.suite == "compare"], tmp_path) == ()
    assert front_figure([r for r in committed if r.suite == "end-to-end"], tmp_path) == ()
