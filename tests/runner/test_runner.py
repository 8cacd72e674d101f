"""The runner of benchmarks: nothing that was measured is lost, nothing is measured twice."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace

import pytest
import torch

import flexvarlen.report.records as row_module
from flexvarlen.report.records import Record, append_records, read_records
from flexvarlen.runner import run as runner
from flexvarlen.runner.run import RunRequest, chosen_cases, records_of_run, run_suite
from flexvarlen.runner.suite import DeviceLost, Finding, Options, Suite, UnknownVariant

CPU = torch.device("cpu")
OPTIONS = Options(CPU, quick=True, say=lambda line: None)
PASSES = ("forward", "backward")


@dataclass(frozen=True)
class Square:
    side: int

    @property
    def name(self):
        return f"s{self.side}"

    def data(self):
        return asdict(self)


def findings(side, variants):
    measures = {"ms_p50": float(side)}
    return [Finding(name, "ok", None, measures, pass_) for name in variants for pass_ in PASSES]


class Squares(Suite):
    """Cases of one number, each of which takes `slow_s` and gives `find(side, variants)`."""

    name = "squares"

    def __init__(self, count=3, find=findings, slow_s=0.0):
        self.count, self.find, self.slow_s, self.measured = count, find, slow_s, []

    def cases(self, options):
        return [Square(side) for side in range(self.count)]

    def variants(self, case, options):
        return ["a", "b"]

    def measure(self, case, variants, options):
        self.measured.append((case.side, tuple(variants)))
        time.sleep(self.slow_s)
        return self.find(case.side, variants)

    def section(self, rows):
        return f"{len(rows)} rows"


def raising(error, at=1):
    """What the case `at` raises."""

    def find(side, variants):
        if side == at:
            raise error
        return findings(side, variants)

    return find


@pytest.fixture
def out(tmp_path):
    return tmp_path / "folder" / "rows.jsonl"


@pytest.fixture
def run(out):
    """Run a suite into `out`."""

    def run(suite, variants=None, say=OPTIONS.say, **request):
        options = replace(OPTIONS, variants=variants, say=say)
        return run_suite(suite, options, RunRequest(out, **request))

    return run


@pytest.mark.parametrize(
    ("before", "now", "notices"),
    [
        ({}, {}, 0),
        ({"git_commit": "1111111"}, {}, 1),
        ({"flexvarlen": "0.0.1"}, {}, 1),
        ({"transformers": "4.0.0"}, {}, 1),
        ({"git_dirty": True}, {}, 1),
        ({"git_dirty": True}, {"git_dirty": True}, 1),  # there may be more changes
    ],
)
def test_rows_of_another_version_or_of_uncommitted_changes_are_reported(
    run, monkeypatch, before, now, notices
):
    said = []
    clean = row_module.environment(CPU) | {"git_dirty": False, "git_commit": "2222222"}
    for change, expected in ((before, 0), (now, notices)):
        monkeypatch.setattr(row_module, "environment", lambda device, it=clean | change: dict(it))
        assert run(Squares(), say=said.append).left == 0
        assert len(said) == expected
    for sentence in said:
        commit = before.get("git_commit", "2222222")
        assert f"at commit {commit}" in sentence
        assert "which are not measured again" in sentence
    run(Squares(), say=said.append, again=True)
    assert len(said) == notices


def test_rows_say_case_variant_pass_environment_and_commit(run, out):
    ended = run(Squares(2), commit="abc")
    assert (ended.measured, ended.done_before, ended.left) == (2, 0, 0)
    rows = read_records([out])
    assert [row.case for row in rows[:3]] == [
        {"side": 0, "variant": "a", "pass": "forward"},
        {"side": 0, "variant": "a", "pass": "backward"},
        {"side": 0, "variant": "b", "pass": "forward"},
    ]
    assert {row.environment["git_commit"] for row in rows} == {"abc"}
    assert rows[0].environment["torch"] == torch.__version__
    assert rows[-1].measures == {"ms_p50": 1.0}


def test_what_is_done_is_not_measured_again(run):
    run(Squares(2))
    suite = Squares(3)
    assert run(suite).done_before == 2
    assert suite.measured == [(2, ("a", "b"))]
    run(suite, again=True)
    assert len(suite.measured) == 4


@pytest.mark.parametrize(
    ("before", "now", "measured"),
    [
        (("a",), None, ("a", "b")),  # the one that is missing among the others
        (None, ("b",), None),
        (None, ("c",), ("c", "a", "b")),  # tables show a case as its last run has it
    ],
)
def test_variants_are_measured_beside_those_of_before(run, before, now, measured):
    run(Squares(1), before)
    suite = Squares(1)
    run(suite, now)
    assert suite.measured == ([] if measured is None else [(0, measured)])


@pytest.mark.parametrize(("status", "gpu"), [("skipped", None), ("ok", "another")])
def test_a_case_skipped_for_want_of_time_or_of_another_gpu_is_no_answer(run, out, status, gpu):
    for variant, found in (("a", status), ("b", "ok")):
        case = {"side": 0, "variant": variant, "pass": "forward"}
        append_records(out, [Record("squares", case, found, None, {}, {"gpu": gpu})])
    suite = Squares(1)
    run(suite)
    assert len(suite.measured) == 1


def test_no_case_begins_when_time_is_up(run, monkeypatch):
    suite = Squares(3)
    # A clock on which each case takes a second.
    monkeypatch.setattr(runner.time, "perf_counter", lambda: float(len(suite.measured)))
    ended = run(suite, until_s=0.5)
    assert (ended.measured, ended.left) == (1, 2)
    assert run(Squares(3)).done_before == 1


def test_a_variant_that_killed_the_device_gets_no_second_chance(run, out):
    def deadly(side, variants):
        if side == 1 and "b" in variants:
            died = [Finding("b", "failed", "died", {"fatal": True}, pass_) for pass_ in PASSES]
            raise DeviceLost("b killed the device", died)
        return findings(side, variants)

    with pytest.raises(DeviceLost, match="b killed"):
        run(Squares(3, deadly))
    assert {row.case["side"] for row in read_records([out])} == {0, 1}
    suite = Squares(3, deadly)
    run(suite)
    assert suite.measured == [(1, ("a",)), (2, ("a", "b"))]
    rows = {(row.case["side"], row.case["variant"]): row for row in read_records([out])}
    assert rows[1, "b"].status == "failed"
    assert rows[1, "b"].measures["fatal"]
    assert rows[1, "a"].status == "ok"
    with pytest.raises(DeviceLost):  # asked to measure again, it gets another chance
        run(suite, again=True)


def test_a_case_whose_measure_raises_has_rows_and_the_others_go_on(run, out):
    assert run(Squares(3, raising(AssertionError("sm90 only")))).measured == 3
    rows = read_records([out])
    found = [(row.case["variant"], row.status) for row in rows if row.case["side"] == 1]
    assert found == [("a", "failed"), ("b", "failed")]
    assert {row.reason for row in rows} == {None, "AssertionError: sm90 only"}
    assert {row.case["side"] for row in rows if row.status == "ok"} == {0, 2}


def test_a_lost_device_of_no_known_variant_fails_no_variant_for_good(run, out):
    lost = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(DeviceLost, match="s1 lost the device"):
        run(Squares(3, raising(lost)))
    assert {row.case["side"] for row in read_records([out])} == {0}
    assert run(Squares(3)).measured == 2
    assert {row.status for row in read_records([out])} == {"ok"}


def test_records_of_a_run_replace_those_of_a_case_that_failed_as_a_whole(run, out, monkeypatch):
    """A failed case has records without passes: others than those of a run that measures it."""
    clock = iter(f"2026-01-01T00:00:0{second}Z" for second in range(9))
    found = row_module.environment
    monkeypatch.setattr(
        runner,
        "run_environment",
        lambda device, commit: found(device) | {"started_utc": next(clock)},
    )
    broken, statuses = raising(RuntimeError("cuDNN Frontend error"), at=0), []
    for find in (findings, broken, findings):
        run(Squares(1, find), again=True)
        statuses.append([row.status for row in read_records([out])])
    assert statuses == [["ok"] * 4, ["failed"] * 2, ["ok"] * 4]


def test_records_of_a_run_are_those_of_its_cases_and_variants(run, out):
    run(Squares(12))
    assert run(Squares(12), ("b",), cases="s1").counts == "0 cases measured, 3 done before"
    asked = replace(OPTIONS, variants=("b",)), RunRequest(out, cases="s1")
    found = records_of_run(Squares(12), *asked)
    assert {(row.case["side"], row.case["variant"]) for row in found} == {
        (side, "b") for side in (1, 10, 11)
    }


def test_a_variant_that_the_suite_does_not_know_is_the_users_mistake(run, out):
    unknown = UnknownVariant("variants must be a or b, got 'c'; choose one.")
    with pytest.raises(ValueError, match="variants must be a or b"):
        run(Squares(1, raising(unknown, at=0)))
    assert not out.exists()


def test_a_variant_without_a_finding_is_a_mistake_of_the_suite(run, out):
    with pytest.raises(AssertionError, match="no finding of"):
        run(Squares(1, lambda side, variants: findings(side, variants[:1])))
    assert {row.case["variant"] for row in read_records([out])} == {"a"}  # it is not lost


CHILD = """
import sys
from pathlib import Path
from tests.runner.test_runner import OPTIONS, RunRequest, Squares, run_suite
run_suite(Squares(1000, slow_s=0.02), OPTIONS, RunRequest(Path(sys.argv[1])))
"""


def test_a_kill_loses_more_than_the_case_in_flight(run, out):
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(out)])
    begin = time.perf_counter()
    # Of 4 lines each: one that is written alone is seen as half a case.
    while not out.exists() or len(out.read_text().splitlines()) < 42:
        assert time.perf_counter() - begin < 120, "no row came"
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait()
    sides = [json.loads(line)["case"]["side"] for line in out.read_text().splitlines()]
    done = len(sides) // 4
    assert sides == [side for side in range(done) for _ in range(4)]  # no half case
    assert run(Squares(done + 1)).measured == 1


def test_a_line_cut_off_by_a_lost_machine_is_reported_and_costs_its_case_alone(run, out):
    run(Squares(2))
    out.write_text(out.read_text()[:-20])
    suite = Squares(2)
    with pytest.warns(UserWarning, match="line 8 of rows.jsonl is incomplete"):
        run(suite)
    assert suite.measured == [(1, ("a", "b"))]
    with pytest.warns(UserWarning, match="is incomplete"):
        rows = read_records([out])
    assert len(rows) == 8
    assert rows[-1].case == {"side": 1, "variant": "b", "pass": "backward"}


def test_a_reason_with_a_line_separator_is_one_row(run, out):
    reason = "one\u2028two\x85three"
    run(Squares(1, lambda side, variants: [Finding(name, "failed", reason) for name in variants]))
    assert [row.reason for row in read_records([out])] == [reason] * 2


def test_a_full_disk_leaves_no_half_row(run, out, monkeypatch):
    run(Squares(1))
    before = out.read_text()
    write = row_module.os.write
    monkeypatch.setattr(row_module.os, "write", lambda to, data: write(to, data[: len(data) // 2]))
    with pytest.raises(OSError, match="must fit on the disk"):
        run(Squares(2))
    assert out.read_text() == before


def test_progress_counts_the_cases_of_this_run(run, out):
    run(Squares(1))
    steps = []
    run_suite(Squares(3), OPTIONS, RunRequest(out), lambda *step: steps.append(step))
    assert steps == [(0, 2, "s1"), (1, 2, "s2"), (2, 2, "")]


def test_cases_are_chosen_by_name():
    suite = Squares(12)
    assert [case.side for case in chosen_cases([suite], OPTIONS, "s1")[suite]] == [1, 10, 11]
    assert list(chosen_cases([suite, Squares(1)], OPTIONS, "s1")) == [suite]
