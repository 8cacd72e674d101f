"""`flexvarlen drift`, and `--fail-above` of `compare`: exit codes, sentences, files."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from flexvarlen.backends.flex import FlexBackend
from flexvarlen.backends.reference import ReferenceBackend
from flexvarlen.backends.sdpa import SdpaBackend
from flexvarlen.cli import app
from flexvarlen.drift.report import page
from flexvarlen.drift.report.files import DriftReport

CPU = ["--device", "cpu"]
HEADS = ["--heads", "2/1", "--head-dim", "8", *CPU]
OP = ["op", "--lengths", "5,3; 7", *HEADS, "--backends", "reference,sdpa", "--no-compile"]
MODEL = ["model", "--model", "qwen3@1", "--tokens", "48", "--backends", "sdpa,reference", *CPU]
MODEL += ["--comparisons", "packed-alone,backend-backend"]
TRAIN = ["train", "--model", "qwen3@1", "--tokens", "64", "--steps", "4", *CPU]
TRAIN += ["--backends", "reference"]
PACKED = [*TRAIN, "--baseline", "sdpa"]  # where documents alone do not matter: in half the time


@pytest.fixture(autouse=True)
def _no_plots(request, monkeypatch):
    """A second a run; test_drift_report.py draws them."""
    if "plots" not in request.fixturenames:
        monkeypatch.setattr(page, "pictures", lambda rows: [])


@pytest.fixture
def plots():
    """The page of this test has them."""


@pytest.fixture
def run(tmp_path):
    def run(*args):
        return CliRunner().invoke(app, ["drift", *args, "--out", str(tmp_path / "out")])

    return run


def rows_in(folder):
    return DriftReport.read(folder / "out").rows


def said(result):
    return " ".join(result.output.split())


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
    assert "in one call, against one call a document, 2 cases: the same bits" in said(result)


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

    def wrong(self, q, k, v, mask, plan, options):
        return attend(self, q, k, v, mask, plan, replace(options, scale=2 * options.scale))

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


def test_rerun_appends_to_the_rows_of_another(run, tmp_path):
    run(*OP, "--no-train", "--comparisons", "place")
    first = rows_in(tmp_path)
    again = run("op", "--lengths", "9", *HEADS, "--backends", "sdpa", "--comparisons", "place")
    assert "rows of an earlier run are replaced" in said(again)
    assert {row.case["name"] for row in rows_in(tmp_path)} == {"9"}
    resumed = run(*OP, "--no-train", "--comparisons", "place", "--resume")
    assert "1 rows of an earlier run are kept" in said(resumed)
    assert len(rows_in(tmp_path)) == len(first) + 1
    lines = (tmp_path / "out" / "rows.jsonl").read_text().splitlines()
    assert len(lines) == len(first) + 1


def test_resume_runs_again_what_is_complete(run, monkeypatch, tmp_path):
    run(*OP, "--no-train", "--comparisons", "place")

    def ran(*_args, **_options):
        pytest.fail("ran again")

    monkeypatch.setattr(SdpaBackend, "attend", ran)
    result = run(*OP, "--no-train", "--comparisons", "place", "--resume")
    assert result.exit_code == 0, result.output
    assert len(rows_in(tmp_path)) == 4


def test_resume_takes_pairs_for_done(run, tmp_path):
    """They come last: a run that was stopped before them lacks them alone."""
    run(*OP, "--no-train", "--comparisons", "place")
    both = [*OP, "--no-train", "--comparisons", "place,backend-backend", "--resume"]
    run(*both)
    found = [row.case["comparison"] for row in rows_in(tmp_path)]
    assert "backend-backend" in found
    lines = (tmp_path / "out" / "rows.jsonl").read_text()
    run(*both)
    assert (tmp_path / "out" / "rows.jsonl").read_text() == lines


@pytest.mark.parametrize("status", ["failed", "oom"])
def test_resume_takes_a_failure_for_done(run, tmp_path, status):
    run(*OP, "--no-train", "--comparisons", "place")
    path = tmp_path / "out" / "rows.jsonl"
    path.write_text(path.read_text().replace('"status": "ok"', f'"status": "{status}"', 1))
    run(*OP, "--no-train", "--comparisons", "place", "--resume")
    assert {row.status for row in rows_in(tmp_path)} == {"ok"}


def test_resume_runs_a_finished_backend_again(run, monkeypatch, tmp_path):
    """A model takes minutes a backend: a run that is stopped must get on."""
    small = ["model", "--model", "qwen3@1", "--tokens", "48", *CPU, "--no-train"]
    small += ["--comparisons", "packed-alone", "--no-attribution"]
    run(*small, "--backends", "sdpa")
    before = rows_in(tmp_path)

    def ran(*_args, **_options):
        pytest.fail("ran again")

    monkeypatch.setattr(SdpaBackend, "attend", ran)
    result = run(*small, "--backends", "sdpa,reference", "--resume")
    assert result.exit_code == 0, result.output
    added = rows_in(tmp_path)[len(before) :]
    assert {row.case["backend"] for row in added} == {"reference"}


def test_resume_of_all_compiles_what_a_whole_run_leaves_out(run, monkeypatch, tmp_path):
    def ran(*_args, **_options):
        raise RuntimeError("it ran")

    monkeypatch.setattr(FlexBackend, "attend", ran)
    small = ["model", "--model", "qwen3@1", "--tokens", "32", *CPU, "--no-train"]
    small += ["--no-attribution", "--comparisons", "backend-backend"]

    def statuses():
        return {r.case["backend"]: r.status for r in rows_in(tmp_path) if not r.case["index"]}

    run(*small, "--backends", "sdpa,reference")
    result = run(*small, "--resume")
    assert result.exit_code == 0, result.output
    found = statuses()
    assert (found["sdpa"], found["reference"], found["flex"]) == ("ok", "ok", "skipped")
    run(*small, "--backends", "flex", "--resume")  # what is named is not left out
    assert statuses() == found | {"flex": "failed"}


def test_lost_device_ends_with_a_traceback(run, monkeypatch, tmp_path):
    attend = ReferenceBackend.attend

    def broken(self, q, k, v, mask, plan, options):
        if len(q) == 8:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with")
        return attend(self, q, k, v, mask, plan, options)

    monkeypatch.setattr(ReferenceBackend, "attend", broken)
    small = [*OP, "--no-train", "--comparisons", "exact,run-run"]
    result = run(*small, "--backends", "sdpa,reference")
    assert result.exit_code == 1, result.output
    assert isinstance(result.exception, SystemExit)
    assert "the device is lost after reference, exact, in 5,3: RuntimeError: CUDA" in said(result)
    assert "--resume goes on" in said(result)
    assert "reference failed: RuntimeError: CUDA error" in said(result)
    before = rows_in(tmp_path)
    assert [(row.case["backend"], row.status) for row in before] == [
        *[("sdpa", "ok")] * 2,
        ("reference", "failed"),
    ]
    assert (tmp_path / "out" / "report.html").exists()
    again = run(*small, "--backends", "sdpa,reference", "--resume")
    assert "is lost" not in said(again)
    rows = rows_in(tmp_path)
    assert {(r.case["name"], r.case["backend"], r.case["comparison"]) for r in rows} == {
        *((name, "sdpa", what) for name in ("5,3", "7") for what in ("exact", "run-run")),
        *(("7", "reference", what) for what in ("exact", "run-run")),
        ("5,3", "reference", "exact"),
    }
    assert again.exit_code == 1, again.output  # its row is still there
    assert [row.status for row in rows].count("failed") == 1


def test_resume_takes_another_training_for_this_one(run, tmp_path):
    run(*PACKED)
    run(*PACKED, "--lr", "0.01", "--resume")
    found = rows_in(tmp_path)
    assert {row.measures["lr"] for row in found if "lr" in row.measures} == {0.01}


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

    def nan(self, q, k, v, mask, plan, options):
        out, lse = attend(self, q, k, v, mask, plan, options)
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


def test_out_is_a_file(run, tmp_path):
    (tmp_path / "out").write_text("")
    result = run(*OP)
    assert result.exit_code == 2
    assert "out must be a folder" in said(result)


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
