"""`flexvarlen drift`: exit codes, sentences, files, resuming."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from flexvarlen.cli import app
from flexvarlen.report.records import read_records
from tests.planted import plant
from tests.verify.planted import raising, wrong_scale

CPU = ["--device", "cpu"]
OP = ["op", "--suite", "cpu", *CPU, "--backend", "reference,sdpa"]
OP += ["--comparisons", "exact,run-run"]
MODEL = ["model", "--model", "qwen3@1", "--tokens", "48", "--backend", "sdpa,reference", *CPU]
MODEL += ["--comparisons", "packed-alone,backend-backend"]

LOST = RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


@pytest.fixture
def run(out):
    return lambda *args: CliRunner().invoke(app, ["drift", *args, "--out", str(out)])


def records_in(out):
    return read_records([out / "records.jsonl"])


def said(result):
    return " ".join(result.output.split())


def test_options_of_op_are_lost(run, out):
    options = ["--no-train", "--seed", "3", "--commit", "abcdef0", "--dtype", "float32,bfloat16"]
    result = run(*OP, *options)
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in out.iterdir()) == ["records.jsonl", "report.md"]
    assert "| sdpa | float32 | ok |" in (out / "report.md").read_text()
    records = records_in(out)
    assert {r.case["name"] for r in records} == {"37,91", "causal 64,64, window 24"}
    assert {r.case["variant"] for r in records} == {"reference", "sdpa"}
    assert {r.case["comparison"] for r in records} == {"exact", "run-run"}
    assert {r.case["dtype"] for r in records} == {"float32", "bfloat16"}
    assert {r.case["seed"] for r in records} == {3}
    assert not any("dq_relative" in r.measures for r in records)
    assert {r.environment["git_commit"] for r in records} == {"abcdef0"}
    assert "all errors are within the acceptance rule" in said(result)


def test_passed_limit_ends_with_0(run):
    assert run(*OP, "--fail-above", "dq_relative=0.1").exit_code == 0
    result = run(*OP, "--fail-above", "out_relative=1e-12", "--fail-above", "relative=9")
    assert result.exit_code == 1
    assert "fail-above out_relative=1e-12: out_relative is" in said(result)
    assert "relative=9" not in said(result)


def test_options_of_model_are_lost_or_a_run_that_is_done_is_run_again(
    run, out, tmp_path, monkeypatch
):
    text = tmp_path / "own.txt"
    text.write_text("\f".join(f"document {i} " * (i + 1) for i in range(9)))
    options = ["--no-train", "--dtype", "bfloat16", "--text", str(text), "--seed", "4"]
    options += ["--fail-above", "logits_relative=0.1"]
    result = run(*MODEL, *options)
    assert result.exit_code == 0, result.output
    assert "4 comparisons of models" in said(result)
    records = records_in(out)
    assert [r.case["comparison"] for r in records[::2]] == ["packed-alone", "backend-backend"]
    assert {(r.case["dtype"], r.case["seed"]) for r in records} == {("bfloat16", 4)}
    assert not any("gradient_relative" in r.measures for r in records)
    assert {r.case["other"] for r in records} == {None, "sdpa"}
    assert all("own.txt" in r.measures["source"] for r in records)
    monkeypatch.setattr("flexvarlen.verify.models.build_model", None)
    again = run(*MODEL, *options)
    assert again.exit_code == 0, again.output
    assert "4 comparisons of models" in said(again)
    assert records_in(out) == records


def test_finding_ends_with_0_or_one_of_another_variant_case_or_machine_with_1(
    run, out, monkeypatch
):
    with monkeypatch.context() as planted:
        plant(planted, wrong_scale)
        result = run(*OP)
        assert result.exit_code == 1, result.output
        assert "sdpa is wrong: out: largest error" in said(result)
    result = run(*OP, "--backend", "reference")
    assert result.exit_code == 0, result.output
    assert "0 cases measured, 4 done before" in said(result)
    assert "sdpa" not in said(result)
    assert run(*OP).exit_code == 1
    assert run(*OP, "--seed", "7").exit_code == 0
    path = out / "records.jsonl"
    found = path.read_text()
    path.write_text(found.replace('"gpu": null', '"gpu": "another"'))
    assert run(*OP).exit_code == 0
    path.write_text(found)
    assert run(*OP, "--again").exit_code == 0


def test_nothing_compared_ends_with_0(run):
    result = run(*OP, "--backend", "fa3")
    assert result.exit_code == 2, result.output
    assert "Nothing was compared." in said(result)


def test_lost_device_ends_with_a_traceback(run, out, monkeypatch):
    with monkeypatch.context() as planted:
        plant(planted, raising(LOST))
        result = run(*OP)
    assert result.exit_code == 2, result.output
    assert "sdpa lost the device" in said(result)
    assert "run again to continue" in said(result)
    lost = [r for r in records_in(out) if r.measures.get("fatal")]
    assert {r.case["variant"] for r in lost} == {"sdpa"}
    result = run(*OP)  # without it in that case
    assert result.exit_code == 1, result.output  # what failed stays a finding
    assert any(r.status == "ok" for r in records_in(out))


def test_file_of_something_else_is_a_traceback(run, out):
    out.mkdir()
    (out / "records.jsonl").write_text('{"x": 1}\n')
    result = run(*OP)
    assert (result.exit_code, said(result)[:25]) == (2, "records.jsonl must contai")
