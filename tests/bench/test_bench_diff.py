"""Two files of rows: what got slower is said, what only spreads is not."""

from __future__ import annotations

import dataclasses

import pytest

from flexvarlen.bench.diff import diff
from flexvarlen.rows import Row, append_rows

WHERE = {"gpu": "G", "torch": "2.11", "git_commit": "aaa", "started_utc": "1"}


def row(*times, status="ok", variant="fa2", name="device_ms", where=WHERE, suite="scaling", **case):
    measures = {f"{name}_p{p}": x for p, x in zip((20, 50, 80), times, strict=False)}
    reason = None if status == "ok" else f"it is {status}"
    case = {"tokens": 8192, "causal": True, **case, "variant": variant, "pass": "forward"}
    return Row(suite, case, status, reason, measures if times else {}, where)


@pytest.fixture
def compared(tmp_path):
    def compare(before, after, **options):
        files = [tmp_path / "before.jsonl", tmp_path / "after.jsonl"]
        for path, rows in zip(files, (before, after), strict=True):
            path.unlink(missing_ok=True)
            append_rows(path, rows)
        return diff(files[:1], files[1:], **options)

    return compare


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        ((0.9, 1.0, 1.1), (1.2, 1.3, 1.4), "slower"),
        ((1.2, 1.3, 1.4), (0.9, 1.0, 1.1), "faster"),
        ((0.9, 1.0, 1.1), (1.05, 1.3, 1.4), "unchanged"),  # the bands overlap
        ((1.2, 1.3, 1.4), (0.9, 1.0, 1.25), "unchanged"),
        ((1.0, 1.0, 1.0), (1.015, 1.015, 1.015), "unchanged"),  # too little
        ((1.015, 1.015, 1.015), (1.0, 1.0, 1.0), "unchanged"),
        ((1.0, 1.0, 1.0), (1.025, 1.025, 1.025), "slower"),
    ],
)
def test_spread_and_threshold_both_decide(compared, before, after, verdict):
    found = compared([row(*before)], [row(*after)])
    (change,) = found.changes
    assert change.verdict == verdict
    assert change.ratio == pytest.approx(after[1] / before[1])
    assert found.slower == (verdict == "slower")


def test_another_threshold_is_another_verdict(compared):
    before, after = [row(1.0, 1.0, 1.0)], [row(1.1, 1.1, 1.1)]
    assert compared(before, after).slower
    found = compared(before, after, threshold=0.2)
    assert not found.slower
    assert "more than 0.2" in found.markdown()
    with pytest.raises(ValueError, match="threshold must be"):
        compared(before, after, threshold=-1)


def test_more_tokens_a_second_are_faster(compared):
    slow, fast = (row(*[x] * 3, name="tokens_per_s") for x in (100.0, 200.0))
    assert [x.verdict for x in compared([slow], [fast]).changes] == ["faster"]
    assert compared([fast], [slow]).slower


def test_a_row_that_is_right_no_more_is_worse(compared):
    done = row(1.0, 1.0, 1.0)
    for status in ("wrong", "failed", "oom", "unsupported"):
        found = compared([done], [row(status=status)])
        assert [x.verdict for x in found.changes] == ["worse"]
        assert found.slower
        assert f"ok → {status}: it is {status}" in found.markdown()
    better = compared([row(status="oom")], [done])
    assert [x.verdict for x in better.changes] == ["better"]
    assert not better.slower
    same = compared([row(status="oom")], [row(status="oom")])
    assert [x.verdict for x in same.changes] == ["unchanged"]
    other = compared([row(status="oom")], [row(status="unsupported")])
    assert [x.verdict for x in other.changes] == ["not comparable"]


def test_new_and_lost_rows_are_said_and_other_gpus_are_others(compared):
    here = row(1.0, 1.0, 1.0)
    there = dataclasses.replace(here, environment=WHERE | {"gpu": "H"})
    found = compared([here], [there])
    assert [(x.verdict, x.machine) for x in found.changes] == [("lost", "G"), ("new", "H")]
    assert not found.slower
    assert "| gpu | G | H |" in found.markdown()
    found = compared([here, row(1.0, 1.0, 1.0, tokens=1)], [here, row(1.0, 1.0, 1.0, variant="x")])
    assert [x.verdict for x in found.changes] == ["lost", "new", "unchanged"]


def test_environments_stand_first(compared):
    after = WHERE | {"torch": "2.12", "git_commit": "bbb", "started_utc": "2"}
    found = compared([row(1.0, 1.0, 1.0)], [row(1.0, 1.0, 1.0, where=after)])
    assert found.environments == {"torch": ("2.11", "2.12"), "git_commit": ("aaa", "bbb")}
    assert found.markdown().index("| torch | 2.11 | 2.12 |") < found.markdown().index("unchanged")
    same = compared([row(1.0, 1.0, 1.0)], [row(1.0, 1.0, 1.0, where=WHERE | {"started_utc": "2"})])
    assert same.markdown().startswith("Both on the same machine")


def test_every_timing_of_a_row_has_its_verdict_and_the_hosts_has_none_beside_the_devices(compared):
    def both(forward, backward, host):
        measures = {
            f"{name}_p{p}": x
            for name, x in (("forward_ms", forward), ("backward_ms", backward), ("host_ms", host))
            for p in (20, 50, 80)
        }
        return dataclasses.replace(row(), measures=measures)

    found = compared([both(1.0, 1.0, 1.0)], [both(2.0, 0.5, 9.0)])
    assert {x.timing: x.verdict for x in found.changes} == {
        "forward_ms": "slower",
        "backward_ms": "faster",
    }
    assert [x.verdict for x in found.changes] == ["slower", "faster"]  # the worst first


def test_what_has_no_timing_is_not_called_unchanged(compared):
    found = compared([row()], [row(1.0, 1.0, 1.0)])
    assert [(x.verdict, x.reason) for x in found.changes] == [
        ("not comparable", "no timing in both")
    ]


@pytest.mark.parametrize("repeats", [("repeats", "ms"), ("device_repeats", "device_ms")])
def test_a_time_of_two_repeats_is_no_verdict(compared, repeats):
    count, name = repeats

    def of(times, number):
        found = row(*[times] * 3, name=name)
        return dataclasses.replace(found, measures=found.measures | {count: number})

    for before, after in ((1, 15), (15, 2), (2, 2)):
        found = compared([of(1.0, before)], [of(2.0, after)])
        (change,) = found.changes
        assert (change.verdict, change.ratio) == ("not comparable", 2.0)
        assert f"of {before} and {after} repeats" in found.markdown()
        assert not found.slower
    assert compared([of(1.0, 3)], [of(2.0, 3)]).slower


def test_a_peak_of_memory_has_its_verdict(compared):
    def of(mib, where=WHERE):
        found = row(1.0, 1.0, 1.0, where=where)
        return dataclasses.replace(found, measures=found.measures | {"peak_mib": mib})

    for before, after, verdict in (
        (100.0, 103.0, "larger"),
        (103.0, 100.0, "smaller"),
        (100.0, 101.0, "unchanged"),
        (0, 0, "unchanged"),
        (0, 1, "larger"),
    ):
        found = compared([of(before)], [of(after)])
        assert {x.timing: x.verdict for x in found.changes} == {
            "device_ms": "unchanged",
            "peak_mib": verdict,
        }
        assert found.slower == (verdict == "larger")
    assert "| larger | fa2 | G | peak_mib | 0 | 1 | – |" in found.markdown()
    (alone,) = compared([of(None)], [of(1.0)]).changes
    assert alone.timing == "device_ms"
    on_cpu = WHERE | {"gpu": None, "cpu": "C"}  # growth of the process: a lower bound
    (alone,) = compared([of(1.0, on_cpu)], [of(9.0, on_cpu)]).changes
    assert alone.timing == "device_ms"


def test_a_table_a_suite_names_what_tells_its_cases_apart(compared):
    rows = [row(1.0, 2.0, 3.0), row(1.0, 2.0, 3.0, tokens=1), row(1.0, 2.0, 3.0, suite="padding")]
    text = compared(rows, rows).markdown()
    assert "3 unchanged." in text
    assert "scaling:\n\n| verdict | variant | tokens | machine |" in text
    assert "padding:\n\n| verdict | variant | machine |" in text
    assert "| unchanged | fa2 | 8192 | G | device_ms | 2 (1–3) | 2 (1–3) | 1.000 |" in text


def test_a_file_without_rows_is_an_error(compared):
    with pytest.raises(ValueError, match=r"after must hold rows, got none in after\.jsonl"):
        compared([row(1.0, 1.0, 1.0)], [])
