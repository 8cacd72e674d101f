"""flexvarlen.bench.diff: what is slower is found, and noise is not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flexvarlen.bench.diff import diff
from flexvarlen.report.records import Record, append_records

WHERE = {"gpu": "G", "torch": "2.11", "git_commit": "aaa", "started_utc": "1"}


def record(low=1.0, middle=1.0, high=1.0, name="ms", **more):
    measures = {f"{name}_p20": low, f"{name}_p50": middle, f"{name}_p80": high} | more
    return Record("scaling", {"variant": "fa2", "tokens": 8192}, "ok", None, measures, WHERE)


@pytest.fixture
def compared(tmp_path):
    def compare(before, after, **options):
        for name, records in (("before", before), ("after", after)):
            (tmp_path / name).unlink(missing_ok=True)
            append_records(tmp_path / name, records)
        return diff([tmp_path / "before"], [tmp_path / "after"], **options)

    return compare


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        (record(0.9, 1.0, 1.1), record(1.2, 1.3, 1.4), "slower"),
        (record(1.2, 1.3, 1.4), record(0.9, 1.0, 1.1), "faster"),
        (record(0.9, 1.0, 1.1), record(1.0, 1.3, 1.4), "unchanged"),  # the ranges overlap
        (record(), record(1.01, 1.01, 1.01), "unchanged"),  # below the threshold
        (record(name="tokens_per_s"), record(2.0, 2.0, 2.0, name="tokens_per_s"), "faster"),
        (record(repeats=2), record(2.0, 2.0, 2.0, repeats=9), "not comparable"),
        (record(), replace(record(), status="failed", reason="no"), "worse"),
        (replace(record(), status="oom"), record(), "better"),
        (record(), record(name="other_ms"), "not comparable"),
    ],
)
def test_verdicts(compared, before, after, verdict):
    found = compared([before], [after])
    assert [change.verdict for change in found.changes] == [verdict]
    assert found.slower == (verdict in ("slower", "worse"))
    assert f"1 {verdict}. " in found.markdown()
    assert f"| {verdict} | fa2 | G |" in found.markdown()


def test_a_peak_of_memory_needs_a_gpu(compared):
    found = compared([record(peak_mib=100.0)], [record(peak_mib=103.0)])
    assert {x.measure: x.verdict for x in found.changes} == {
        "ms": "unchanged",
        "peak_mib": "larger",
    }
    assert found.slower
    cpu = {"cpu": "C"}
    found = compared(*([replace(record(peak_mib=x), environment=cpu)] for x in (100.0, 999.0)))
    assert [x.measure for x in found.changes] == ["ms"]


def test_other_cases_machines_and_commits(compared):
    elsewhere = replace(record(), environment=WHERE | {"gpu": "H", "git_commit": "bbb"})
    found = compared([record()], [elsewhere])
    assert [x.verdict for x in found.changes] == ["lost", "new"]
    assert found.environments == {"gpu": ("G", "H"), "git_commit": ("aaa", "bbb")}
    assert compared([record()], [record()]).environments == {}
    with pytest.raises(ValueError, match="after must hold records"):
        compared([record()], [])
