"""Suite preference, small on the CPU: what is checked, and what is counted."""

from __future__ import annotations

import gc
import math
import re
import sys
from dataclasses import replace

import pytest
import torch

from flexvarlen.bench.suites.training import preference, preference_trainers, texts
from flexvarlen.bench.suites.training.preference_tables import table
from flexvarlen.layout.token_map import Padding
from tests.bench.quick import QUICK, records_of

pytest.importorskip("trl", reason="needs TRL: pip install -c constraints.txt trl")

SUITE = preference.SUITE


@pytest.fixture(autouse=True)
def few_texts(monkeypatch):
    """Twelve topics: a BPE of them is trained in no time."""
    some = tuple(sorted(texts.topics(), key=len)[:12])
    monkeypatch.setattr(texts, "topics", lambda: some)


def measured(folder, *variants, cases="dpo$"):
    return records_of(SUITE, folder, *variants, cases=cases)


def test_every_trainer_gives_the_padded_runs_loss_and_gradients(tmp_path):
    eager = r"^(dpo|grpo|reward|classification)$"
    records = measured(tmp_path, "padded-sdpa", "auto", "padded-fa2", cases=eager)
    for task in preference_trainers.TASKS:
        found = {r.case["variant"]: r for r in records if r.case["task"] == task}
        assert [found[x].status for x in ("padded-sdpa", "auto")] == ["ok", "ok"]
        assert found["padded-fa2"].status == "unsupported"
        measures = found["auto"].measures
        assert measures["tokens_real"] < measures["tokens_padded"]
        assert measures["gradients"] == 14
        assert 0 < measures["gradient_error"] < 0.1
        assert measures["error_over_allowed"] <= 1
        if task == "dpo":
            assert measures["reference_loss"] == pytest.approx(math.log(2))
        assert measures["samples_per_s"] == pytest.approx(
            found["auto"].case["samples"] / measures["ms_p50"] * 1e3
        )


def test_shared_prompts_run_once(tmp_path):
    records = measured(
        tmp_path, "padded-sdpa", "auto+shared", cases="^(dpo|grpo|grpo-16|grpo-(hybrid|experts).*)$"
    )
    found = [r for r in records if r.case["variant"] == "auto+shared"]
    assert [r.status for r in found] == ["ok"] * 5
    for record in found:
        m, case = record.measures, record.case
        assert m["attends"] == "sdpa"
        group = case["group"] if case["task"] == "grpo" else 2
        rows = case["samples"] * (1 if case["task"] == "grpo" else 2)
        assert m["tokens_run"] == m["tokens_real"] - 40 * (rows - rows // group)


def test_a_row_that_gives_other_outputs_is_wrong(tmp_path, monkeypatch):
    def smaller(self, x, padding=0):
        found = whole(self, x, padding)
        return 0.8 * found if found.is_floating_point() else found

    whole = Padding.leave
    monkeypatch.setattr(Padding, "leave", smaller)
    found = {r.case["variant"]: r for r in measured(tmp_path, "padded-sdpa", "auto")}
    assert found["padded-sdpa"].status == "ok"
    assert found["auto"].status == "wrong"
    assert re.match("the (loss|gradient of .*): .* is more than", found["auto"].reason)
    assert "samples_per_s" not in found["auto"].measures


def test_a_wrong_reference_model_is_found(tmp_path):
    case = replace(SUITE.cases(QUICK)[0], shortest=128, longest=500, layers=2)
    run = preference._Run(case, QUICK, str(tmp_path))
    trainer = run.make("auto")
    assert run.verdict(run.eagerly(trainer, run.batches[0])[0])[1] is None

    def smaller(module, args, output):
        output["last_hidden_state"] = 0.8 * output["last_hidden_state"]

    trainer.ref_model.base_model.register_forward_hook(smaller)
    assert "is more than" in run.verdict(run.eagerly(trainer, run.batches[0])[0])[1]


def test_without_trl_the_cases_are_unsupported(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "trl", None)
    (record,) = measured(tmp_path, "auto", cases="reward")
    assert record.status == "unsupported"
    assert "trl" in record.reason
    assert "unsupported" in SUITE.section([record])


def fp32_parameters():
    gc.collect()
    found = (x for x in gc.get_objects() if type(x) is torch.nn.Parameter)
    return sum(x.dtype == torch.float32 for x in found)


def test_the_reference_leaves_no_model_behind(tmp_path):
    before = fp32_parameters()
    run = preference._Run(SUITE.cases(QUICK)[0], QUICK, str(tmp_path))
    assert fp32_parameters() <= before
    assert len(run.reference.gradients) == 14


@pytest.mark.slow
def test_compiled_on_other_batches(tmp_path):
    (record,) = measured(tmp_path, "auto@128", cases="compiled")
    assert record.status == "ok"
    assert record.measures["compilations"] > 0
    assert "recompilations" in table([record]).header
