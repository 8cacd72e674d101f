"""`flexvarlen drift --resume`: what is there is not run again, and what is not there is."""

# ruff: noqa: F811
# (fixtures are arguments by the names that they are imported by)

from __future__ import annotations

import pytest

from flexvarlen.attention.backends.flex import FlexBackend
from flexvarlen.attention.backends.reference import ReferenceBackend
from flexvarlen.attention.backends.sdpa import SdpaBackend
from flexvarlen.drift.op import comparisons
from flexvarlen.drift.op.backend_run import BackendRun
from tests.drift.drift_commands import CPU, HEADS, OP, PACKED, no_plots, rows_in, run, said  # noqa: F401


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


def refuse_compiled(monkeypatch):
    def compiled(self):
        raise NotImplementedError("no compiled kernel here")

    monkeypatch.setattr(BackendRun, "compiled", compiled)


def without(folder, word):
    """Take the rows with this word out of the file: as if the run had been killed before."""
    path = folder / "out" / "rows.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    kept = [line for line in lines if word not in line]
    assert len(kept) < len(lines)
    path.write_text("".join(kept))


def test_resume_takes_one_comparison_refused_for_a_refused_backend(run, monkeypatch, tmp_path):
    refuse_compiled(monkeypatch)
    small = [
        *OP,
        "--no-train",
        "--compile",
        "--comparisons",
        "exact,eager-compiled,backend-backend",
    ]
    run(*small)
    assert {r.status for r in rows_in(tmp_path) if r.case["comparison"] == "eager-compiled"} == {
        "unsupported"
    }
    without(tmp_path, "backend-backend")
    run(*small, "--resume")
    pairs = [row for row in rows_in(tmp_path) if row.case["comparison"] == "backend-backend"]
    assert [row.case["name"] for row in pairs] == ["5,3", "7"]


def test_resume_waits_for_pairs_of_a_refused_backend(run, monkeypatch, tmp_path):
    monkeypatch.setattr(ReferenceBackend, "why_not", lambda self, request: "not here.")
    small = [*OP, "--no-train", "--comparisons", "place,backend-backend"]
    run(*small)
    assert len(rows_in(tmp_path)) == 4
    monkeypatch.setattr(SdpaBackend, "attend", lambda *_: pytest.fail("ran again"))
    result = run(*small, "--resume")
    assert result.exit_code == 0, result.output


def test_resume_takes_skipped_for_compiled(run, monkeypatch, tmp_path):
    small = [*OP, "--no-train", "--compile", "--comparisons", "eager-compiled"]
    monkeypatch.setattr(comparisons, "QUICKLY_COMPILED", ("reference",))
    run(*small)
    assert "skipped" in {row.status for row in rows_in(tmp_path)}
    lines = (tmp_path / "out" / "rows.jsonl").read_text()
    run(*small, "--resume")  # left out again: nothing to do
    assert (tmp_path / "out" / "rows.jsonl").read_text() == lines
    monkeypatch.setattr(comparisons, "QUICKLY_COMPILED", ("reference", "sdpa"))
    run(*small, "--resume")
    assert {row.status for row in rows_in(tmp_path)} == {"ok"}


def test_resume_takes_the_forward_alone_for_both_passes(run, tmp_path):
    small = [*OP, "--comparisons", "place"]
    run(*small, "--no-train")
    run(*small, "--resume")
    found = rows_in(tmp_path)
    assert [row.case["train"] for row in found] == [False] * 4 + [True] * 4
    assert all("dq_relative" in row.measures for row in found if row.case["train"])


def test_resume_takes_another_seed_for_this_one(run, tmp_path):
    small = [*OP, "--no-train", "--comparisons", "place"]
    run(*small)
    run(*small, "--seed", "3", "--resume")
    assert [row.case["seed"] for row in rows_in(tmp_path)] == [0] * 4 + [3] * 4


def test_resume_takes_rows_of_before_train_and_seed_for_done(run, tmp_path):
    small = [*OP, "--no-train", "--comparisons", "place"]
    run(*small)
    path = tmp_path / "out" / "rows.jsonl"
    path.write_text(path.read_text().replace(', "train": false, "seed": 0', ""))
    assert not any("seed" in row.case for row in rows_in(tmp_path))
    run(*small, "--resume")
    assert len([row for row in rows_in(tmp_path) if "seed" in row.case]) == 4


def test_resume_of_a_model_takes_the_forward_or_another_baseline_for_done(run, tmp_path):
    small = ["model", "--model", "qwen3@1", "--tokens", "48", *CPU, "--backends", "reference"]
    small += ["--comparisons", "packed-alone,backend-backend"]

    def whole():
        rows = [row for row in rows_in(tmp_path) if row.case.get("scope") == "batch"]
        return {(r.case["comparison"], r.case["other"], r.case["train"]) for r in rows}

    run(*small, "--no-train")
    before = {("packed-alone", None, False), ("backend-backend", "sdpa", False)}
    assert whole() == before
    run(*small, "--no-train", "--baseline", "reference", "--resume")
    before |= {("backend-backend", "reference", False)}
    assert whole() == before
    run(*small, "--resume")
    assert whole() == before | {("packed-alone", None, True), ("backend-backend", "sdpa", True)}
    shares = [row for row in rows_in(tmp_path) if row.suite == "drift-attribution"]
    assert {row.case["train"] for row in shares} == {False, True}
    with_gradients = {row.case["train"] for row in shares if "gradient_relative" in row.measures}
    assert with_gradients == {True}


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


def test_resume_takes_another_training_for_this_one(run, tmp_path):
    run(*PACKED)
    run(*PACKED, "--lr", "0.01", "--resume")
    found = rows_in(tmp_path)
    assert {row.measures["lr"] for row in found if "lr" in row.measures} == {0.01}
