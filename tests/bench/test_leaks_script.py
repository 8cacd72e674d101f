"""`bench.leaks`: plain transformers' known leaks are seen, and ours is right in every form."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flexvarlen.bench import report
from flexvarlen.bench.contract import leaks
from flexvarlen.bench.contract.batch_forms import FORMS, LENGTHS
from flexvarlen.rows import read_rows

# Forms in which plain transformers, eager and sdpa, is right.
RIGHT_IN_PLAIN = {
    "position_ids, use_cache=False",
    "two packed rows",
    "first document continues at position 100",
    "a later document starts at position 2",
    "right padding",
    "left padding",
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    path = tmp_path_factory.mktemp("leaks") / "leaks.jsonl"
    made = leaks.main(["--device", "cpu", "--backend", "sdpa", "reference", "--out", str(path)])
    assert read_rows([path]) == made
    return made


def _of(rows, implementation):
    return [row for row in rows if row.case["implementation"] == implementation]


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
def test_ours_is_right_in_every_form(rows, backend):
    ours = _of(rows, f"flexvarlen:{backend}")
    assert len(ours) == len(FORMS) * len(leaks.CONFIGS)
    for row in ours:
        assert row.status == "ok", (row.case, row.reason)
        # fp32 on logits up to 16, weights 25 times as large as usual: the peer itself is at 7e-5.
        assert row.measures["max_error"] <= row.measures["limit"] < 1e-3


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_known_leaks_of_plain_transformers_are_seen(rows, implementation):
    theirs = _of(rows, f"transformers:{implementation}")
    assert {row.case["form"] for row in theirs if row.status == "ok"} == RIGHT_IN_PLAIN
    for row in theirs:
        if row.case["form"] not in RIGHT_IN_PLAIN:
            assert row.status == "wrong"
            assert row.measures["max_error"] > 1


def test_a_missing_kernel_has_its_row_and_reason(rows):
    flash = _of(rows, "transformers:flash_attention_2")
    assert len(flash) == len(FORMS) * len(leaks.CONFIGS)
    assert all(row.status == "unsupported" and row.reason for row in flash)


def test_the_table_has_every_form_and_marks_leaks(rows):
    table = report.leaks_section(rows)
    for form in FORMS:
        assert f"| {form.name} |" in table
    (line,) = [line for line in table.splitlines() if line.startswith("| 2D mask of document ids")]
    assert line.count("**") == 4  # eager and sdpa
    assert "not run here (1)" in table


def test_machines_have_tables_of_their_own(rows):
    there = [replace(row, environment=row.environment | {"gpu": "NVIDIA H200"}) for row in rows]
    text = report.leaks_section([*rows, *there])
    assert text.count("Largest error of packed logits") == 2
    assert "not run here (1), " not in text
    alone = [report.leaks_section(of_one) for of_one in (rows, there)]
    assert text == "\n\n".join(alone)


def test_forms_cover_all_tokens():
    import torch

    ids = torch.arange(sum(LENGTHS))
    for form in FORMS:
        batch = form.batch(ids)
        tokens = batch.inputs["input_ids"]
        found = torch.cat([tokens[row, place] for row, place in batch.places])
        assert torch.equal(found, ids), form.name
