"""`flexvarlen drift`, and `--fail-above` of `compare`: exit codes, sentences, files."""

# ruff: noqa: F811
# (fixtures are arguments by the names that they are imported by)

from __future__ import annotations

import math
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from flexvarlen.attention.backends.reference import ReferenceBackend
from flexvarlen.cli import app
from tests.drift.drift_commands import CPU, MODEL, OP, PACKED, TRAIN, no_plots, rows_in, run, said  # noqa: F401


@pytest.fixture
def plots():
    """The page of this test has them."""


def test_op_writes_rows_tables_and_page(run, plots, tmp_path):
    result = run(*OP, "--no-train", "--seed", "3", "--commit", "abcdef0")
    assert result.exit_code == 0, result.output
    written = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert written == ["report.html", "report.md", "rows.jsonl"]
    assert "<img" in (tmp_path / "out" / "report.html").read_text()
    rows = rows_in(tmp_path)
    assert {row.case["name"] for row in rows} == {"5,3", "7"}
    assert {row.case["backend"] for row in rows} == {"reference", "sdpa"}
    assert {(row.case["num_heads"], row.case["num_kv_heads"]) for row in rows} == {(2, 1)}
    assert all(row.case["causal"] and row.case["window"] is None for row in rows)
    assert not any(row.case["comparison"] == "eager-compiled" for row in rows)
    assert not any("dq_relative" in row.measures for row in rows)
    assert {row.environment["git_commit"] for row in rows} == {"abcdef0"}
    assert "in one call, against one call a document, 2 cases:" in said(result)


def test_options_of_op_reach_the_rows(run, tmp_path):
    options = ["--dtype", "float32,bfloat16", "--no-causal", "--window", "4"]
    result = run(*OP, *options, "--comparisons", "place")
    assert result.exit_code == 0, result.output
    rows = rows_in(tmp_path)
    assert {row.case["dtype"] for row in rows} == {"float32", "bfloat16"}
    assert {(row.case["causal"], row.case["window"]) for row in rows} == {(False, 4)}
    assert {row.case["comparison"] for row in rows} == {"place"}
    assert all("dq_relative" in row.measures for row in rows)


def test_wrong_backend_passes(run, monkeypatch):
    attend = ReferenceBackend.attend

    def wrong(self, q, k, v, sinks, call, mask, plan):
        return attend(self, q, k, v, sinks, call._replace(scale=2 * call.scale), mask, plan)

    monkeypatch.setattr(ReferenceBackend, "attend", wrong)
    result = run(*OP, "--comparisons", "exact")
    assert result.exit_code == 1, result.output
    assert "reference is wrong" in said(result)


def test_limit_ends_op_with_1_and_names_the_row(run):
    small = [*OP, "--comparisons", "exact"]
    assert run(*small, "--fail-above", "out_relative=0.1").exit_code == 0
    result = run(*small, "--fail-above", "out_relative=1e-12", "--fail-above", "relative=9")
    assert result.exit_code == 1
    assert "fail-above out_relative=1e-12: out_relative is" in said(result)
    assert "backend=" in said(result)
    assert "relative=9" not in said(result)


def test_model_writes_rows_and_says_where_runs_part(run, tmp_path):
    result = run(*MODEL, "--no-compile", "--fail-above", "logits_relative=0.01")
    assert result.exit_code == 0, result.output
    rows = rows_in(tmp_path)
    assert {row.suite for row in rows} == {"drift-model", "drift-attribution"}
    assert {row.case["comparison"] for row in rows if row.suite == "drift-model"} == {
        "packed-alone",
        "backend-backend",
    }
    assert "packed against each document alone: sdpa: " in said(result)
    before = (tmp_path / "out" / "rows.jsonl").read_text()
    again = run(*MODEL, "--no-compile", "--resume")
    assert again.exit_code == 0, again.output
    assert (tmp_path / "out" / "rows.jsonl").read_text() == before


def test_options_of_model_reach_the_rows(run, tmp_path):
    text = tmp_path / "own.txt"
    text.write_text("\f".join(f"document {i} " * (i + 1) for i in range(9)))
    options = ["--no-attribution", "--no-train", "--dtype", "bfloat16", "--text", str(text)]
    result = run(*MODEL, *options, "--baseline", "reference", "--seed", "4")
    assert result.exit_code == 0, result.output
    rows = rows_in(tmp_path)
    assert {row.suite for row in rows} == {"drift-model"}
    assert {(row.case["dtype"], row.case["seed"]) for row in rows} == {("bfloat16", 4)}
    whole = [row for row in rows if row.case["scope"] == "batch"]
    assert not any("gradient_relative" in row.measures for row in whole)
    others = {row.case["other"] for row in whole if row.case["comparison"] == "backend-backend"}
    assert others == {"reference"}


def test_limit_of_model_counts_attribution(run, tmp_path):
    """A backend against itself is 0; what attribution moves on purpose is no user's drift."""
    options = ["model", "--model", "qwen3@1", "--tokens", "48", *CPU, "--no-train"]
    options += ["--backends", "reference", "--baseline", "reference"]
    options += ["--comparisons", "backend-backend", "--fail-above", "logits_relative=0"]
    result = run(*options)
    shares = [row for row in rows_in(tmp_path) if row.suite == "drift-attribution"]
    assert max(row.measures.get("logits_relative", 0) for row in shares) > 0
    assert result.exit_code == 0, result.output


def test_train_within_seed_noise_ends_with_0(run, tmp_path):
    result = run(*TRAIN, "--fail-above", "sigmas=1")
    assert result.exit_code == 0, result.output
    assert "reference against unpacked: within seed noise" in said(result)
    assert [row.case["variant"] for row in rows_in(tmp_path)][-1] == "verdict"
    again = run(*TRAIN, "--resume")
    assert "6 rows of an earlier run are kept" in said(again)


def test_training_with_nan_ends_with_0(run, monkeypatch):
    attend = ReferenceBackend.attend

    def nan(self, q, k, v, sinks, call, mask, plan):
        out, lse = attend(self, q, k, v, sinks, call, mask, plan)
        return out * math.nan, lse

    monkeypatch.setattr(ReferenceBackend, "attend", nan)
    result = run(*PACKED)
    assert result.exit_code == 1, result.output
    assert "reference against sdpa: beyond seed noise" in said(result)


def test_options_of_train_reach_the_rows(run, tmp_path):
    options = ["--baseline", "sdpa", "--seeds", "3,5,8", "--lr", "1e-4", "--dtype", "bfloat16"]
    result = run(*TRAIN, *options)
    assert result.exit_code == 0, result.output
    rows = rows_in(tmp_path)
    assert [row.case["seed"] for row in rows[:3]] == [3, 5, 8]
    assert {row.measures["baseline"] for row in rows} == {"sdpa"}
    assert rows[0].measures["lr"] == 1e-4
    assert {row.case["dtype"] for row in rows} == {"bfloat16"}


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["op", "--suite", "gpu"], "suite must be one of"),
        (["op", "--suite", "cpu", "--lengths", "5"], "suite must not be given together"),
        (["op", "--lengths", "5,0"], "lengths must be"),
        (["op", "--lengths", "5;"], "lengths must be"),
        (["op", "--heads", "3/2", "--lengths", "5"], "heads must be"),
        (["op", "--backends", "flsh"], "backends must be"),
        (["op", "--comparisons", "exat"], "comparisons must be"),
        (["op", "--dtype", "float32,int8"], "dtype must be"),
        (["op", "--device", "tpu"], "device must be"),
        (["op", "--fail-above", "kl_mean=1"], "choose among out_max_abs"),
        (["model", "--fail-above", "dq_relative=1"], "choose among logits_max_abs"),
        (["model", "--model", "lama"], "model must be"),
        (["model", "--text", "no-such-file"], "text must name"),
        (["model", "--baseline", "flsh"], "backends must be"),
        (["model", "--comparisons", "packed"], "comparisons must be"),
        (["train", "--fail-above", "loss=1"], "choose among sigmas"),
        (["train", "--seeds", "0,x,2"], "seeds must be numbers"),
        (["train", "--seeds", "0,1"], "seeds must be at least 3"),
        (["train", "--backends", "flsh"], "backends must be"),
        (["train", "--baseline", "flex"], "baseline must be a variant that trains here"),
    ],
)
def test_mistake_is_one_sentence_and_exit_code_2(run, tmp_path, args, words):
    result = run(*args, *([] if "--device" in args else CPU))
    assert result.exit_code == 2, result.output
    assert words in said(result)
    assert "Traceback" not in result.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", [OP, MODEL, TRAIN], ids=lambda args: args[0])
@pytest.mark.parametrize("out", ["file", "file/below"])
def test_out_cannot_be_made(tmp_path, command, out):
    """Found only once all was measured, and lost."""
    (tmp_path / "file").write_text("")
    result = CliRunner().invoke(app, ["drift", *command, "--out", str(tmp_path / out)])
    assert result.exit_code == 2
    assert "out must be a folder" in said(result)
    assert "Traceback" not in result.output


def test_importing_the_command_brings_no_plotting_or_comparison_along():
    heavy = ["matplotlib", "flexvarlen.equivalence", "flexvarlen.drift.report.files"]
    code = f"import sys, flexvarlen.cli; sys.exit(any(m in sys.modules for m in {heavy}))"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


# ---- compare ----


def compare(tmp_path, *args):
    small = ["compare", "--model", "qwen3@1", "--tokens", "48", "--no-train", *CPU]
    return CliRunner().invoke(app, [*small, "--out", str(tmp_path / "out"), *args])


def test_limit_of_compare_names_the_row(tmp_path):
    options = ["--backends", "sdpa", "--fail-above"]
    assert compare(tmp_path, *options, "logits_max=0.1").exit_code == 0
    result = compare(tmp_path, *options, "logits_max=1e-12")
    assert result.exit_code == 1, result.output
    assert "fail-above logits_max=1e-12: logits_max is" in said(result)
    assert "qwen3 tiny, 1 layers, sdpa." in said(result)


def test_transformers_own_leak_fails_a_limit_of_compare(tmp_path):
    options = ["--backends", "sdpa,transformers:sdpa", "--fail-above", "leaked_documents=0"]
    assert compare(tmp_path, *options).exit_code == 0


def test_unknown_limit_of_compare_is_a_sentence(tmp_path):
    result = compare(tmp_path, "--fail-above", "logit_max=1")
    assert result.exit_code == 2
    assert "choose among logits_max, logits_mean" in said(result)
