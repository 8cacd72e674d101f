"""A device that is lost ends `flexvarlen drift` with one sentence; its rows are kept."""

# ruff: noqa: F811
# (fixtures are arguments by the names that they are imported by)

from __future__ import annotations

import pytest

from flexvarlen.attention.backends.reference import ReferenceBackend
from flexvarlen.drift.model import comparisons as model_comparisons
from tests.drift.drift_commands import CPU, OP, TRAIN, no_plots, rows_in, run, said  # noqa: F401


def test_lost_device_ends_with_a_traceback(run, monkeypatch, tmp_path):
    attend = ReferenceBackend.attend

    def broken(self, q, k, v, sinks, call, mask, plan):
        if len(q) == 8:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with")
        return attend(self, q, k, v, sinks, call, mask, plan)

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


def lose(monkeypatch, *, after):
    """The device is lost in `reference`, after so many calls."""
    attend, calls = ReferenceBackend.attend, []

    def broken(self, q, k, v, sinks, call, mask, plan):
        calls.append(0)
        if len(calls) > after:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with")
        return attend(self, q, k, v, sinks, call, mask, plan)

    monkeypatch.setattr(ReferenceBackend, "attend", broken)


def in_one_sentence(result, where):
    assert result.exit_code == 1, result.output
    assert isinstance(result.exception, SystemExit)
    assert said(result).count("the device is lost after") == 1
    assert f"the device is lost after {where}: RuntimeError: CUDA" in said(result)
    assert "The rows are kept: --resume goes on, without it in this case." in said(result)


@pytest.mark.parametrize("after", [0, 1], ids=["the packed row", "alone"])
def test_lost_device_fails_the_other_backends_of_a_model(run, monkeypatch, tmp_path, after):
    lose(monkeypatch, after=after)
    small = ["model", "--model", "qwen3@1", "--tokens", "48", *CPU, "--no-attribution"]
    small += ["--no-train", "--comparisons", "packed-alone,backend-backend"]
    small += ["--backends", "sdpa,reference,transformers:sdpa"]
    result = run(*small)
    in_one_sentence(result, "reference, packed-alone, of qwen3 tiny, 1 layers")

    def ended():
        return [row for row in rows_in(tmp_path) if row.case["scope"] == "batch"]

    before = ended()
    assert [(row.case["backend"], row.status) for row in before] == [
        *[("sdpa", "ok")] * 2,
        ("reference", "failed"),
    ]
    assert before[-1].measures == {"device_lost": True}
    again = run(*small, "--resume")
    assert "is lost" not in said(again)
    added = ended()[len(before) :]
    assert [(r.case["backend"], r.status) for r in added] == [("transformers:sdpa", "ok")] * 2


@pytest.mark.parametrize("after", [0, 20, 40], ids=["alone", "the row", "while timed"])
def test_lost_device_fails_the_attribution_of_others(run, monkeypatch, tmp_path, after):
    small = ["model", "--model", "qwen3@1", "--tokens", "48", *CPU, "--no-train"]
    small += ["--comparisons", "packed-alone", "--backends", "reference,sdpa"]
    run(*small, "--no-attribution")
    lose(monkeypatch, after=after)

    def shares():
        return [row for row in rows_in(tmp_path) if row.suite == "drift-attribution"]

    in_one_sentence(run(*small, "--resume"), "reference, attribution, of qwen3 tiny, 1 layers")
    before = shares()
    assert {row.case["backend"] for row in before} == {"reference"}
    assert [row.status for row in before].count("failed") == 1
    (lost,) = (row for row in before if "device_lost" in row.measures)
    assert lost.status == "failed"
    assert all("share" in row.measures for row in before if row.status == "ok")
    timed = any("why_not_timed" in row.measures for row in before)
    assert timed == (after == 40)
    again = run(*small, "--resume")
    assert "is lost" not in said(again)
    assert {row.case["backend"] for row in shares()[len(before) :]} == {"sdpa"}


def test_lost_device_fails_the_trainings_of_others(run, monkeypatch, tmp_path):
    lose(monkeypatch, after=0)
    small = [*TRAIN, "--backends", "reference,sdpa"]
    in_one_sentence(run(*small), "reference, seed 0, of qwen3 tiny, 1 layers")
    before = rows_in(tmp_path)
    assert [row.status for row in before] == ["ok"] * 4 + ["failed"]
    assert before[-1].measures["device_lost"]
    again = run(*small, "--resume")
    assert "is lost" not in said(again)
    assert "sdpa against unpacked: within seed noise" in said(again)
    assert again.exit_code == 1, again.output  # its row is still there


def test_lost_device_calls_the_baseline_a_mistake(run, monkeypatch, tmp_path):
    lose(monkeypatch, after=0)
    result = run(*TRAIN, "--backends", "sdpa", "--baseline", "reference")
    in_one_sentence(result, "reference, seed 0, of qwen3 tiny, 1 layers")
    (row,) = rows_in(tmp_path)
    assert (row.status, row.measures["device_lost"]) == ("failed", True)


def test_lost_device_of_transformers_own_ends_with_0(run, monkeypatch):
    right = model_comparisons.run_packed

    def run_packed(variant, batch, **options):
        if variant.name == "transformers:sdpa":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return right(variant, batch, **options)

    monkeypatch.setattr(model_comparisons, "run_packed", run_packed)
    small = ["model", "--model", "qwen3@1", "--tokens", "48", *CPU, "--no-attribution"]
    small += ["--no-train", "--comparisons", "packed-alone", "--backends", "transformers:sdpa,sdpa"]
    in_one_sentence(run(*small), "transformers:sdpa, packed-alone, of qwen3 tiny, 1 layers")
