"""`flexvarlen bench`: what it writes and says, and how it ends."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flexvarlen.bench.suites import SUITES
from flexvarlen.cli import app
from flexvarlen.report.records import read_records
from flexvarlen.runner.suite import DeviceLost, Finding
from tests.runner.test_runner import Squares


def named(side, variants):
    """What became of each variant, as its name says."""
    if "lost" in variants:
        raise DeviceLost("lost killed the device", [Finding("lost", "failed", "died")])
    words = {name: name.rpartition(":")[2] for name in variants}
    return [
        Finding(name, word if word in ("wrong", "oom") else "ok", None if name == "a" else name)
        for name, word in words.items()
    ]


@pytest.fixture
def suite(monkeypatch):
    """Stands in for the suite `kernels`."""
    made = Squares(2, named)
    made.name = "kernels"
    monkeypatch.setattr(sys.modules["flexvarlen.cli.bench"], "suite_of", lambda name: made)
    return made


def bench(*args):
    return CliRunner().invoke(app, ["bench", *map(str, args)])


@pytest.fixture
def run(suite, tmp_path):
    return lambda *args: bench("kernels", "--device", "cpu", "--out", tmp_path, *args)


def said(found):
    return " ".join(found.output.split())


def test_rows_go_to_the_file_and_tables_to_the_screen(suite, tmp_path):
    out = tmp_path / "mine.jsonl"
    found = bench("kernels", "--out", out, "--device", "cpu", "--commit", "abc")
    assert found.exit_code == 0, found.output
    rows = read_records([out])
    assert len(rows) == 4
    assert rows[0].environment["git_commit"] == "abc"
    assert "4 rows" in found.output
    assert "2 cases measured, 0 done before" in said(found)


def test_a_folder_gets_a_file_of_suite_and_device(run, suite, tmp_path):
    assert run().exit_code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["kernels-cpu.jsonl"]
    assert "0 cases measured, 2 done before" in said(run())
    assert len(suite.measured) == 2
    run("--again", "--cases", "s1")
    assert suite.measured[2:] == [(1, ("a", "b"))]


@pytest.mark.parametrize(
    ("variant", "code"),
    [("a", 0), ("oom", 0), ("wrong", 1), ("raw:wrong", 0), ("transformers:wrong", 0)],
)
def test_what_is_wrong_ends_with_1(run, variant, code):
    found = run("--variants", f"a, {variant}")
    assert found.exit_code == code, found.output


def test_what_was_wrong_in_cases_and_variants_left_out_is_no_finding(run):
    assert run("--variants", "a,wrong", "--cases", "s0").exit_code == 1
    assert run("--variants", "a", "--cases", "s0").exit_code == 0
    assert run("--variants", "a,wrong", "--cases", "s0").exit_code == 1  # again
    assert run("--cases", "s1").exit_code == 0


def test_a_lost_device_is_one_sentence_and_nothing_is_lost(run, tmp_path):
    found = run("--variants", "a,lost")
    assert found.exit_code == 2
    assert "lost killed the device. Results so far are kept; run again" in said(found)
    assert "Traceback" not in found.output
    assert len(read_records([tmp_path / "kernels-cpu.jsonl"])) == 1


def test_bench_list_names_every_suite():
    found = bench("list")
    assert found.exit_code == 0
    assert [line.split()[0] for line in found.output.splitlines()] == list(SUITES)


def test_list_measures_nothing(suite, tmp_path):
    found = bench("kernels", "--list", "--out", tmp_path / "none", "--device", "cpu")
    assert found.output.split("\n")[:2] == ["kernels s0", "kernels s1"]
    assert not suite.measured
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["kernels", "--cases", "["], "--cases must be a regular expression"),
        (["kernels", "--cases", "no such"], "--cases must match a case"),
        (["kernels", "--device", "tpu"], "--device must be"),
        (["all", "--out", "rows.jsonl"], "--out must be a folder for several suites"),
        (["kernels", "--out", f"{__file__}/rows.jsonl"], "--out must be a writable file"),
        (["all", "--variants", "fa2"], "--variants must be of one suite"),
        (["kernels", "--text", "no-such-file"], "--text must name a readable file"),
        (["kernels", "--text", __file__], "--text must be used with a suite that packs texts"),
        (["report", "no-such-file.jsonl"], "Records must be read from a text file, got 'no-such"),
        (["report", str(Path(__file__).parent)], "Is a directory); check the path."),
    ],
)
def test_mistake_is_one_sentence_and_exit_code_2(suite, args, words):
    device = [] if args[0] == "report" or "--device" in args else ["--device", "cpu"]
    found = bench(*args, *device)
    assert found.exit_code == 2, found.output
    assert words in said(found)
    assert "Traceback" not in found.output
    assert not suite.measured
