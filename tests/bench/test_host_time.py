"""flexvarlen.bench.attention.host_time: a row a kernel and pass, and what is wrong is not timed."""

from __future__ import annotations

import dataclasses

import pytest

from flexvarlen.bench.attention import host_time
from flexvarlen.rows import read_rows

ARGUMENTS = ["--kernels", "flex", "--rounds", "3", "--calls", "2", "--documents", "8", "9"]


def rows_of(path):
    host_time.main([*ARGUMENTS, "--device", "cpu", "--out", str(path)])
    return {row.case["passes"]: row for row in read_rows([path])}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return rows_of(tmp_path_factory.mktemp("rows") / "rows.jsonl")


def test_the_difference_is_that_of_the_rounds(monkeypatch, tmp_path):
    """Ours and the raw call are timed in turn; each round has its own difference."""
    times = iter([10.0, 1.0, 20.0, 3.0, 60.0, 8.0])
    monkeypatch.setattr(host_time.Run, "microseconds", lambda self, call: next(times))
    m = rows_of(tmp_path / "rows.jsonl")["forward"].measures
    assert (m["ours_us_p50"], m["raw_us_p50"], m["more_us_p50"]) == (20.0, 3.0, 17.0)
    assert m["more_us_p20"] < 17.0 < m["more_us_p80"]


def test_the_table_shows_all_passes(rows):
    text = host_time.host_time_section(list(rows.values()))
    assert rows["forward and backward"].status == "unsupported"  # flex on the CPU
    m = rows["forward"].measures
    assert f"| `flex` | {m['ours_us_p50']:.0f} − {m['raw_us_p50']:.0f} = " in text
    assert text.rstrip().endswith("| – | – |")


def test_auto_is_held_against_the_kernel_that_it_takes(tmp_path):
    path = tmp_path / "rows.jsonl"
    more = ["--kernels", "auto", "--device", "cpu", "--out", str(path)]
    host_time.main([*ARGUMENTS, *more])
    rows = read_rows([path])
    assert [row.status for row in rows] == ["ok"] * 3
    assert "| `auto` | " in host_time.host_time_section(rows)


def test_the_table_names_every_run(rows):
    old, new = list(rows.values())[:2]
    older = dataclasses.replace(
        old, environment=old.environment | {"git_commit": "abcdef0", "git_dirty": None}
    )
    text = host_time.host_time_section([older, new])
    assert "abcdef0" in text
    assert text.count(" (`flex`)") == 2


def test_other_outputs_are_not_timed(monkeypatch, tmp_path):
    attention = host_time.fv.packed_attention
    monkeypatch.setattr(host_time.fv, "packed_attention", lambda *a, **k: attention(*a, **k) + 1)
    row = rows_of(tmp_path / "rows.jsonl")["forward"]
    assert (row.status, row.measures) == ("wrong", {})
