"""`flexvarlen drift`, and `--fail-above` of `compare`: exit codes, sentences, files, resuming."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from flexvarlen.cli import app
from flexvarlen.report.records import read_records
from flexvarlen.runner import run as runner
from tests.verify.planted import plant, raising, wrong_scale

CPU = ["--device", "cpu"]
OP = ["op", "--suite", "cpu", *CPU, "--backend", "reference,sdpa"]
OP += ["--comparisons", "exact,run-run"]
MODEL = ["model", "--model", "qwen3@1", "--tokens", "48", "--backend", "sdpa,reference", *CPU]
MODEL += ["--comparisons", "packed-alone,backend-backend"]

LOST = RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.fixture
def run(tmp_path):
    def run(*args):
        return CliRunner().invoke(app, ["drift", *args, "--out", str(tmp_path / "out")])

    return run


def records_in(folder):
    return read_records([folder / "out" / "records.jsonl"])


def said(result):
    return " ".join(result.output.split())


def test_op_writes_records_and_a_table(run, tmp_path):
    result = run(*OP, "--no-train", "--seed", "3", "--commit", "abcdef0")
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "records.jsonl",
        "report.md",
    ]
    assert "| sdpa | float32 | ok |" in (tmp_path / "out" / "report.md").read_text()
    records = records_in(tmp_path)
    assert {r.case["name"] for r in records} == {"37,91", "causal 64,64, window 24"}
    assert {r.case["variant"] for r in records} == {"reference", "sdpa"}
    assert {r.case["seed"] for r in records} == {3}
    assert not any("dq_relative" in r.measures for r in records)
    assert {r.environment["git_commit"] for r in records} == {"abcdef0"}
    assert "all errors are within the acceptance rule" in said(result)


def test_options_of_op_are_lost(run, tmp_path):
    result = run(*OP, "--dtype", "float32,bfloat16", "--comparisons", "batch-serial")
    assert result.exit_code == 0, result.output
    records = records_in(tmp_path)
    assert {r.case["dtype"] for r in records} == {"float32", "bfloat16"}
    assert {r.case["comparison"] for r in records} == {"batch-serial"}
    assert all("dq_relative" in r.measures for r in records)


def test_wrong_backend_ends_with_0(run, monkeypatch):
    plant(monkeypatch, wrong_scale)
    result = run(*OP)
    assert result.exit_code == 1, result.output
    assert "reference is wrong: out: largest error" in said(result)


def test_passed_limit_ends_with_0(run):
    assert run(*OP, "--fail-above", "out_relative=0.1").exit_code == 0
    result = run(*OP, "--fail-above", "out_relative=1e-12", "--fail-above", "relative=9")
    assert result.exit_code == 1
    assert "fail-above out_relative=1e-12: out_relative is" in said(result)
    assert "relative=9" not in said(result)


def test_model_writes_records_and_resumes(run, tmp_path, monkeypatch):
    result = run(*MODEL, "--fail-above", "logits_relative=0.01")
    assert result.exit_code == 0, result.output
    assert "4 comparisons of models" in said(result)
    before = records_in(tmp_path)
    assert [r.case["comparison"] for r in before[::2]] == ["packed-alone", "backend-backend"]
    monkeypatch.setattr("flexvarlen.verify.models.build_model", None)
    again = run(*MODEL)
    assert again.exit_code == 0, again.output
    assert "4 comparisons of models" in said(again)
    assert records_in(tmp_path) == before


def test_killed_run_measures_all_again(run, tmp_path, monkeypatch):
    append, calls = runner.append_records, []

    def killed(path, records):
        if len(calls) == 2:
            raise KeyboardInterrupt
        calls.append(path)
        append(path, records)

    monkeypatch.setattr(runner, "append_records", killed)
    assert run(*OP).exit_code != 0
    kept = records_in(tmp_path)
    assert len(kept) == 4  # two of four cases, two backends each
    monkeypatch.undo()
    assert run(*OP).exit_code == 0
    assert records_in(tmp_path)[:4] == kept
    assert len(records_in(tmp_path)) == 8
    run(*OP, "--again", "--commit", "abcdef0")
    assert {r.environment["git_commit"] for r in records_in(tmp_path)} == {"abcdef0"}


def test_earlier_records_of_another_variant_are_no_finding(run, monkeypatch):
    plant(monkeypatch, wrong_scale)  # into reference
    assert run(*OP).exit_code == 1
    monkeypatch.undo()
    result = run(*OP, "--backend", "sdpa")
    assert result.exit_code == 0, result.output
    assert "0 cases measured, 4 done before" in said(result)
    assert run(*OP).exit_code == 1


def test_earlier_records_of_another_case_or_machine_count(run, tmp_path, monkeypatch):
    plant(monkeypatch, wrong_scale)
    assert run(*OP).exit_code == 1
    monkeypatch.undo()
    assert run(*OP, "--seed", "7").exit_code == 0
    path = tmp_path / "out" / "records.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines).replace('"gpu": null', '"gpu": "another"') + "\n")
    assert run(*OP).exit_code == 0


def test_earlier_record_of_a_variant_that_is_not_asked_for_counts(run, monkeypatch):
    plant(monkeypatch, wrong_scale)
    assert run(*OP).exit_code == 1
    result = run(*OP, "--backend", "sdpa")
    assert result.exit_code == 0, result.output
    assert "reference" not in said(result)


def test_nothing_compared_ends_with_0(run):
    result = run(*OP, "--backend", "fa3")
    assert result.exit_code == 2, result.output
    assert "Nothing was compared." in said(result)


def test_error_in_a_table_is_a_traceback(run, monkeypatch):
    def broken(records):
        raise KeyError("dtype")

    monkeypatch.setattr("flexvarlen.verify.compare.drift_report.tables", broken)
    monkeypatch.setattr("flexvarlen.verify.compare.drift_report.DriftReport.save", lambda *_: None)
    result = run(*OP)
    assert result.exit_code == 2
    assert "KeyError" in said(result)


@pytest.mark.parametrize("command", [OP, MODEL], ids=lambda args: args[0])
def test_lost_device_ends_with_a_traceback(run, monkeypatch, tmp_path, command):
    plant(monkeypatch, raising(LOST))
    result = run(*command)
    assert result.exit_code == 2, result.output
    assert "reference lost the device" in said(result)
    assert "run again to continue" in said(result)
    lost = [r for r in records_in(tmp_path) if r.measures.get("fatal")]
    assert {r.case["variant"] for r in lost} == {"reference"}
    monkeypatch.undo()
    result = run(*command)  # without it in that case
    assert result.exit_code in (1, 2), result.output  # what failed stays a finding
    assert any(r.status == "ok" for r in records_in(tmp_path))


def test_options_of_model_are_lost(run, tmp_path):
    text = tmp_path / "own.txt"
    text.write_text("\f".join(f"document {i} " * (i + 1) for i in range(9)))
    options = ["--no-train", "--dtype", "bfloat16", "--text", str(text)]
    result = run(*MODEL, *options, "--seed", "4")
    assert result.exit_code == 0, result.output
    records = records_in(tmp_path)
    assert {(r.case["dtype"], r.case["seed"]) for r in records} == {("bfloat16", 4)}
    assert not any("gradient_relative" in r.measures for r in records)
    assert {r.case["other"] for r in records} == {None, "sdpa"}
    assert all("own.txt" in r.measures["source"] for r in records)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["op", "--suite", "gpu"], "--suite must be one of"),
        (["op", "--backend", "flsh"], "--backend must be"),
        (["op", "--comparisons", "exat"], "--comparisons must be"),
        (["op", "--dtype", "float32,int8"], "--dtype must be"),
        (["op", "--device", "tpu"], "--device must be"),
        (["op", "--fail-above", "relative=-1"], "--fail-above must be MEASURE=VALUE"),
        (["model", "--model", "lama"], "--model must be"),
        (["model", "--model", "qwen3:9t"], "size of qwen3 must be"),
        (["model", "--model", "qwen3", "--model", "no/such"], "--model must be a folder or hub"),
        (["model", "--text", "no-such-file"], "--text must name"),
        (["model", "--comparisons", "packed"], "--comparisons must be"),
    ],
)
def test_mistake_is_found_late(run, tmp_path, args, words):
    result = run(*args, *([] if "--device" in args else CPU))
    assert result.exit_code == 2, result.output
    assert words in said(result)
    assert "Traceback" not in result.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", [OP, MODEL], ids=lambda args: args[0])
@pytest.mark.parametrize("out", ["file", "file/below"])
def test_out_that_cannot_be_made_is_found_late(tmp_path, command, out):
    (tmp_path / "file").write_text("")
    result = CliRunner().invoke(app, ["drift", *command, "--out", str(tmp_path / out)])
    assert result.exit_code == 2
    assert "--out must be a writable file" in said(result)
    assert "Traceback" not in result.output


def test_file_of_something_else_is_a_traceback(run, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "records.jsonl").write_text('{"x": 1}\n')
    result = run(*OP)
    assert (result.exit_code, said(result)[:25]) == (2, "records.jsonl must contai")


def test_importing_the_command_brings_plotting_or_comparison_along():
    heavy = ["matplotlib", "flexvarlen.verify.compare", "flexvarlen.verify.compare.drift_tables"]
    code = f"import sys, flexvarlen.cli; sys.exit(any(m in sys.modules for m in {heavy}))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# ---- compare ----


def compare(tmp_path, *args):
    small = ["compare", "--model", "qwen3@1", "--tokens", "48", "--no-train", *CPU]
    return CliRunner().invoke(app, [*small, "--out", str(tmp_path / "out"), *args])
