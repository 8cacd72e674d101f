"""flexvarlen.bench.contract.families: what leaks or errs is a wrong cell, what is refused none."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from flexvarlen.bench.contract import families

ARGUMENTS = ["--device", "cpu", "--sample", "--backends", "sdpa", "reference", "--families"]


def statuses(rows):
    found = {}
    for row in rows:
        found.setdefault((row.case["family"], row.case["backend"]), set()).add(row.status)
    return found


def test_a_sample_of_the_matrix(tmp_path):
    rows = families.main([*ARGUMENTS, "llama", "gemma2", "--out", str(tmp_path / "rows.jsonl")])
    assert len(rows) == 2 * 2 * len(families.SAMPLE)
    assert statuses(rows) == {
        ("llama", "sdpa"): {"ok"},
        ("llama", "reference"): {"ok"},
        ("gemma2", "sdpa"): {"unsupported"},  # softcap
        ("gemma2", "reference"): {"ok"},
    }
    assert all(row.measures["leaks"] == 0 for row in rows if row.status == "ok")
    table = families.families_section(rows)
    assert "| Gemma 2 | `gemma2` |" in table
    assert "**" not in table


def test_an_unpatched_model_leaks(monkeypatch):
    monkeypatch.setattr(families.fv, "patched", lambda model, backend: nullcontext())
    rows = families.main([*ARGUMENTS, "llama"])
    leaky = [row for row in rows if row.case["form"] == "2D mask of document ids"]
    assert {row.status for row in leaky} == {"wrong"}
    assert all(row.measures["leaks"] > 0 and "leak" in row.reason for row in leaky)
    assert "**" in families.families_section(rows)


@pytest.mark.parametrize("factor", [0.0, 0.5])
def test_an_error_is_a_wrong_cell(monkeypatch, factor):
    answer = families.answer

    def scaled(model, batches, cotangents, *, gradients):
        found = answer(model, batches, cotangents, gradients=gradients)
        if len(batches) > 1:  # each document alone
            return found
        return families.Answer([x * factor for x in found.logits], found.gradients)

    monkeypatch.setattr(families, "answer", scaled)
    assert {row.status for row in families.main([*ARGUMENTS, "qwen3"])} == {"wrong"}
