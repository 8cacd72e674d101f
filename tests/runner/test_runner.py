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

OPTIONS = Options(torch.device("cpu"), quick=True, say=lambda line: None)
PASSES = ("forward", "backward")


@dataclass(frozen=True)
class Square:
    side: int

    @property
    def name(self):
        return f"s{self.side}"

    def data(self):
        return asdict(self)


class Squares(Suite):
    """Cases of one number; `slow_s` is what each takes."""

    name = "squares"

    def __init__(self, count=3, slow_s=0.0):
        self.count, self.slow_s, self.measured = count, slow_s, []

    def cases(self, options):
        return [Square(side) for side in range(self.count)]

    def variants(self, case, options):
        return ["a", "b"]

    def measure(self, case, variants, options):
        self.measured.append((case.side, tuple(variants)))
        time.sleep(self.slow_s)
        return [
            Finding(name, "ok", None, {"ms_p50": float(case.side)}, pass_)
            for name in variants
            for pass_ in PASSES
        ]

    def section(self, rows):
        return f"{len(rows)} rows"


@pytest.fixture
def out(tmp_path):
    return tmp_path / "folder" / "rows.jsonl"


def test_rows_of_another_commit_are_reported(out):
    said = []
    options = replace(OPTIONS, say=said.append)
    for commit, notices in (("1111111", 0), ("1111111", 0), ("2222222", 1)):
        ended = run_suite(Squares(), options, RunRequest(out, commit=commit))
        assert ended.left == 0
        assert len(said) == notices
    assert "at commit 1111111, which are not measured again" in said[0]
    run_suite(Squares(), options, RunRequest(out, commit="2222222", again=True))
    assert len(said) == 1


@pytest.mark.parametrize(
    "change",
    [{"flexvarlen": "0.0.1"}, {"transformers": "4.0.0"}, {"git_dirty": True}],
    ids=lambda change: next(iter(change)),
)
def test_rows_of_another_version_or_of_uncommitted_changes_are_reported(out, monkeypatch, change):
    said = []
    clean = row_module.environment(torch.device("cpu")) | {"git_dirty": False}
    for environment, notices in ((clean | change, 0), (clean, 1)):
        monkeypatch.setattr(row_module, "environment", lambda device, it=environment: dict(it))
        run_suite(Squares(), replace(OPTIONS, say=said.append), RunRequest(out))
        assert len(said) == notices


def test_rows_of_uncommitted_changes_are_reported_after_more_changes(out, monkeypatch):
    said = []
    dirty = row_module.environment(torch.device("cpu")) | {"git_dirty": True}
    monkeypatch.setattr(row_module, "environment", lambda device: dict(dirty))
    for notices in (0, 1):
        run_suite(Squares(), replace(OPTIONS, say=said.append), RunRequest(out))
        assert len(said) == notices


def test_rows_say_case_variant_pass_environment_and_commit(out):
    ended = run_suite(Squares(2), OPTIONS, RunRequest(out, commit="abc"))
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


def test_what_is_done_is_not_measured_again(out):
    run_suite(Squares(2), OPTIONS, RunRequest(out))
    suite = Squares(3)
    assert run_suite(suite, OPTIONS, RunRequest(out)).done_before == 2
    assert suite.measured == [(2, ("a", "b"))]
    run_suite(suite, OPTIONS, RunRequest(out, again=True))
    assert len(suite.measured) == 4


def test_a_variant_that_is_missing_is_measured_among_the_others(out):
    run_suite(Squares(1), replace(OPTIONS, variants=("a",)), RunRequest(out))
    suite = Squares(1)
    run_suite(suite, OPTIONS, RunRequest(out))
    assert suite.measured == [(0, ("a", "b"))]
    run_suite(suite, replace(OPTIONS, variants=("b",)), RunRequest(out))
    assert len(suite.measured) == 1


def test_a_variant_that_is_added_is_measured_beside_those_of_before(out):
    """Tables show a case as its last run has it: the others would be gone from them."""
    run_suite(Squares(1), OPTIONS, RunRequest(out))
    suite = Squares(1)
    run_suite(suite, replace(OPTIONS, variants=("c",)), RunRequest(out))
    assert suite.measured == [(0, ("c", "a", "b"))]


def test_rows_of_another_gpu_are_no_answer(out, monkeypatch):
    run_suite(Squares(1), OPTIONS, RunRequest(out))
    found = row_module.environment
    monkeypatch.setattr(row_module, "environment", lambda device: found(device) | {"gpu": "other"})
    suite = Squares(1)
    run_suite(suite, OPTIONS, RunRequest(out))
    assert len(suite.measured) == 1


def test_skipped_for_want_of_time_is_no_answer(out):
    environment = row_module.environment(torch.device("cpu"))
    case = {"side": 0, "variant": "a", "pass": "forward"}
    append_records(out, [Record("squares", case, "skipped", "late", {}, environment)])
    append_records(out, [Record("squares", case | {"variant": "b"}, "ok", None, {}, environment)])
    suite = Squares(1)
    run_suite(suite, OPTIONS, RunRequest(out))
    assert len(suite.measured) == 1


def test_no_case_begins_when_time_is_up(out, monkeypatch):
    suite = Squares(3)
    # A clock on which each case takes a second.
    monkeypatch.setattr(runner.time, "perf_counter", lambda: float(len(suite.measured)))
    ended = run_suite(suite, OPTIONS, RunRequest(out, until_s=0.5))
    assert (ended.measured, ended.left) == (1, 2)
    assert run_suite(Squares(3), OPTIONS, RunRequest(out)).done_before == 1


def test_a_variant_that_killed_the_device_gets_no_second_chance(out):
    class Deadly(Squares):
        def measure(self, case, variants, options):
            found = super().measure(case, variants, options)
            if case.side == 1 and "b" in variants:
                fatal = {"fatal": True}
                died = [Finding("b", "failed", "died", fatal, pass_) for pass_ in PASSES]
                raise DeviceLost("b killed the device", died)
            return found

    with pytest.raises(DeviceLost, match="b killed"):
        run_suite(Deadly(3), OPTIONS, RunRequest(out))
    assert {row.case["side"] for row in read_records([out])} == {0, 1}
    suite = Deadly(3)
    run_suite(suite, OPTIONS, RunRequest(out))
    assert suite.measured == [(1, ("a",)), (2, ("a", "b"))]
    rows = {(row.case["side"], row.case["variant"]): row for row in read_records([out])}
    assert rows[1, "b"].status == "failed"
    assert rows[1, "b"].measures["fatal"]
    assert rows[1, "a"].status == "ok"
    with pytest.raises(DeviceLost):  # asked to measure again, it gets another chance
        run_suite(suite, OPTIONS, RunRequest(out, again=True))


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RuntimeError("cuDNN Frontend error"), "failed"),
        (AssertionError("sm90 only"), "failed"),
        (torch.OutOfMemoryError("90 GiB"), "oom"),
    ],
)
def test_a_case_whose_measure_raises_has_rows_and_the_others_go_on(out, error, status):
    class Broken(Squares):
        def measure(self, case, variants, options):
            if case.side == 1:
                raise error
            return super().measure(case, variants, options)

    assert run_suite(Broken(3), OPTIONS, RunRequest(out)).measured == 3
    rows = read_records([out])
    found = [row for row in rows if row.case["side"] == 1]
    assert [(row.case["variant"], row.status) for row in found] == [("a", status), ("b", status)]
    assert str(error) in found[0].reason
    assert {row.case["side"] for row in rows if row.status == "ok"} == {0, 2}


def test_a_lost_device_of_no_known_variant_fails_no_variant_for_good(out):
    class Lost(Squares):
        def measure(self, case, variants, options):
            if case.side == 1:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            return super().measure(case, variants, options)

    with pytest.raises(DeviceLost, match="s1 lost the device"):
        run_suite(Lost(3), OPTIONS, RunRequest(out))
    assert {row.case["side"] for row in read_records([out])} == {0}
    assert run_suite(Squares(3), OPTIONS, RunRequest(out)).measured == 2
    assert {row.status for row in read_records([out])} == {"ok"}


def test_records_of_a_run_replace_those_of_a_case_that_failed_as_a_whole(out, monkeypatch):
    """A failed case has records without passes: others than those of a run that measures it."""

    class Broken(Squares):
        def measure(self, case, variants, options):
            raise RuntimeError("cuDNN Frontend error")

    clock = iter(f"2026-01-01T00:00:0{second}Z" for second in range(9))
    found = row_module.environment
    monkeypatch.setattr(
        runner,
        "run_environment",
        lambda device, commit: found(device) | {"started_utc": next(clock)},
    )
    statuses = []
    for suite in (Squares(1), Broken(1), Squares(1)):
        run_suite(suite, OPTIONS, RunRequest(out, again=True))
        statuses.append([row.status for row in read_records([out])])
    assert statuses == [["ok"] * 4, ["failed"] * 2, ["ok"] * 4]


def test_records_of_a_run_are_those_of_its_cases_and_variants(out):
    run_suite(Squares(12), OPTIONS, RunRequest(out))
    asked = replace(OPTIONS, variants=("b",)), RunRequest(out, cases="s1")
    ended = run_suite(Squares(12), *asked)
    assert ended.counts == "0 cases measured, 3 done before"
    found = records_of_run(Squares(12), *asked)
    assert {(row.case["side"], row.case["variant"]) for row in found} == {
        (side, "b") for side in (1, 10, 11)
    }


def test_a_variant_that_the_suite_does_not_know_is_the_users_mistake(out):
    class Strict(Squares):
        def measure(self, case, variants, options):
            raise UnknownVariant("variants must be a or b, got 'c'; choose one.")

    with pytest.raises(ValueError, match="variants must be a or b"):
        run_suite(Strict(1), OPTIONS, RunRequest(out))
    assert not out.exists()


def test_a_variant_without_a_finding_is_a_mistake_of_the_suite(out):
    class Forgets(Squares):
        def measure(self, case, variants, options):
            return super().measure(case, variants[:1], options)

    with pytest.raises(AssertionError, match="no finding of"):
        run_suite(Forgets(1), OPTIONS, RunRequest(out))
    assert {row.case["variant"] for row in read_records([out])} == {"a"}  # it is not lost


CHILD = """
import sys
from pathlib import Path
from tests.runner.test_runner import OPTIONS, RunRequest, Squares, run_suite
print("begun", flush=True)
run_suite(Squares(1000, slow_s=0.02), OPTIONS, RunRequest(Path(sys.argv[1])))
"""


def test_a_kill_loses_at_most_the_case_in_flight(out):
    """SIGKILL at moments of any kind; each run goes on where the last was killed."""
    seen = 0
    for wait_s in (0.3, 0.51):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(out)], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout.readline() == "begun\n"
        begin = time.perf_counter()
        while not out.exists() or len(out.read_text().splitlines()) <= seen:
            assert time.perf_counter() - begin < 60, "no row came"
            time.sleep(0.01)
        time.sleep(wait_s)
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        lines = out.read_text().splitlines()
        sides = [json.loads(line)["case"]["side"] for line in lines]
        assert len(lines) > seen
        assert sides == [side for side in range(len(lines) // 4) for _ in range(4)]  # no half case
        seen = len(lines)
    assert run_suite(Squares(seen // 4 + 1), OPTIONS, RunRequest(out)).measured == 1


def test_a_line_cut_off_by_a_lost_machine_is_reported_and_costs_its_case_alone(out):
    run_suite(Squares(2), OPTIONS, RunRequest(out))
    whole = out.read_text()
    out.write_text(whole[:-20])
    suite = Squares(2)
    with pytest.warns(UserWarning, match="line 8 of rows.jsonl is incomplete"):
        run_suite(suite, OPTIONS, RunRequest(out))
    assert suite.measured == [(1, ("a", "b"))]
    with pytest.warns(UserWarning, match="is incomplete"):
        rows = read_records([out])
    assert len(rows) == 8
    assert rows[-1].case == {"side": 1, "variant": "b", "pass": "backward"}


def test_a_reason_with_a_line_separator_is_one_row(out):
    class Odd(Squares):
        def measure(self, case, variants, options):
            return [Finding(name, "failed", "one\u2028two\x85three") for name in variants]

    run_suite(Odd(1), OPTIONS, RunRequest(out))
    assert [row.reason for row in read_records([out])] == ["one\u2028two\x85three"] * 2


def test_a_full_disk_leaves_no_half_row(out, monkeypatch):
    run_suite(Squares(1), OPTIONS, RunRequest(out))
    before = out.read_text()
    write = row_module.os.write
    monkeypatch.setattr(row_module.os, "write", lambda to, data: write(to, data[: len(data) // 2]))
    with pytest.raises(OSError, match="must fit on the disk"):
        run_suite(Squares(2), OPTIONS, RunRequest(out))
    assert out.read_text() == before


def test_a_file_of_something_else_is_a_sentence(out):
    out.parent.mkdir()
    out.write_text('{"loss": 3.2}\n')
    with pytest.raises(ValueError, match=r"rows\.jsonl must contain records"):
        run_suite(Squares(1), OPTIONS, RunRequest(out))


def test_progress_counts_the_cases_of_this_run(out):
    run_suite(Squares(1), OPTIONS, RunRequest(out))
    steps = []
    run_suite(Squares(3), OPTIONS, RunRequest(out), lambda *step: steps.append(step))
    assert steps == [(0, 2, "s1"), (1, 2, "s2"), (2, 2, "")]


@pytest.mark.parametrize("pattern", ["s[", "no such case"])
def test_cases_that_nothing_finds_are_a_sentence(pattern):
    with pytest.raises(ValueError, match="cases must"):
        chosen_cases([Squares(2)], OPTIONS, pattern)


def test_cases_are_chosen_by_name():
    suite = Squares(12)
    assert [case.side for case in chosen_cases([suite], OPTIONS, "s1")[suite]] == [1, 10, 11]
    assert list(chosen_cases([suite, Squares(1)], OPTIONS, "s1")) == [suite]
