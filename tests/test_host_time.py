"""bench.host_time: a row a kernel and pass, and what is wrong is not timed."""

from __future__ import annotations

import pytest

from bench import host_time
from bench.rows import read_rows

ARGUMENTS = ["--kernels", "flex", "--rounds", "3", "--calls", "2", "--documents", "8", "9"]


def rows_of(path):
    host_time.main([*ARGUMENTS, "--device", "cpu", "--out", str(path)])
    return {row.case["passes"]: row for row in read_rows([path])}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return rows_of(tmp_path_factory.mktemp("rows") / "rows.jsonl")


def test_the_difference_is_that_of_the_rounds(rows):
    row = rows["forward"]
    assert row.status == "ok"
    m = row.measures
    assert m["ours_us_p20"] <= m["ours_us_p50"] <= m["ours_us_p80"]
    assert m["more_us_p20"] <= m["ours_us_p80"] - m["raw_us_p20"]
    assert rows["forward and backward"].status == "unsupported"  # flex on the CPU


def test_the_table_shows_all_passes(rows):
    text = host_time.host_time_section(list(rows.values()))
    m = rows["forward"].measures
    assert f"| `flex` | {m['ours_us_p50']:.0f} − {m['raw_us_p50']:.0f} = " in text
    assert text.rstrip().endswith("| – | – |")


def test_other_outputs_are_not_timed(monkeypatch, tmp_path):
    attention = host_time.fv.packed_attention
    monkeypatch.setattr(host_time.fv, "packed_attention", lambda *a, **k: attention(*a, **k) + 1)
    row = rows_of(tmp_path / "rows.jsonl")["forward"]
    assert (row.status, row.measures) == ("wrong", {})
