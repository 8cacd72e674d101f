"""Suite preference, small on the CPU: what is checked, and what is counted."""

from __future__ import annotations

import gc
import math
import re
import sys
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from flexvarlen.bench.suites.training import (
    preference,
    preference_images,
    preference_trainers,
    texts,
)
from flexvarlen.bench.suites.training.preference_tables import table
from flexvarlen.layout.token_map import Padding
from tests.bench.quick import QUICK, records_of
from tests.slow import with_slow

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
    tasks = ("dpo", "grpo", "reward", "classification")
    eager = f"^({'|'.join(tasks)})$"
    records = measured(tmp_path, "padded-sdpa", "auto", "padded-fa2", cases=eager)
    for task in tasks:
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


@pytest.mark.parametrize(
    "case",
    with_slow(
        ["dpo", "grpo", "grpo-16", "grpo-hybrid-4096", "grpo-experts-4096"],
        ["grpo-16", "grpo-hybrid-4096", "grpo-experts-4096"],  # the models: test_trainers.py
    ),
)
def test_shared_prompts_run_once(tmp_path, case):
    _, record = measured(tmp_path, "padded-sdpa", "auto+shared", cases=f"^{case}$")
    assert (record.case["variant"], record.status) == ("auto+shared", "ok")
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
    case = replace(SUITE.cases(QUICK)[0], samples=2, shortest=128, longest=500)
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


# ---- images ----


@pytest.mark.parametrize(
    ("case", "own"),
    [
        pytest.param("images", "auto+packed", marks=pytest.mark.slow),  # as in the next test
        ("grpo-images", "auto+shared"),
    ],
)
def test_documents_with_images_run_as_the_padded_batch(tmp_path, case, own):
    records = measured(tmp_path, cases=f"^{case}$")
    ok = {r.case["variant"]: r.measures for r in records if r.status == "ok"}
    assert set(ok) == {"padded-sdpa", "auto", own}
    for variant, m in ok.items():
        assert m["loss"] == pytest.approx(ok["padded-sdpa"]["reference_loss"], rel=1e-3)
        expected = m["tokens_padded" if variant == "padded-sdpa" else "tokens_real"]
        assert m["tokens_run"] <= expected < m["tokens_padded"] + 1
        assert (m["tokens_run"] < expected) == (variant == "auto+shared")
        assert m["text_samples_per_s"] == pytest.approx(8e3 / (m["ms_p50"] - m["ms_tower"]))
        assert "syncs_in_layers" not in m
    section = SUITE.section(records)
    assert "ms of the tower" in section
    assert f"{records[0].case['images']} images of 4 to 24 tokens" in section


def test_other_images_are_wrong(tmp_path, monkeypatch):
    def flipped(trainer, draws):
        batch = packed(trainer, draws)
        return batch | {"pixel_values": batch["pixel_values"].flip(0)}

    packed = preference_images.packed
    images = replace(preference_trainers.TASKS["images"], packed=flipped)
    monkeypatch.setitem(preference_trainers.TASKS, "images", images)
    found = measured(tmp_path, "padded-sdpa", "auto+packed", cases="^images$")
    assert [r.status for r in found] == ["ok", "wrong"]


def test_images_have_the_tokens_that_they_say():
    case = next(x for x in preference.CASES if x.name == "images")
    draws, counts = preference_trainers.Draws(case), []
    for _ in range(30):
        found = preference_images.document(draws, 9, 4)
        runs = found["image_grid_thw"].prod(-1) // 4
        assert found["mm_token_type_ids"].sum() == runs.sum()
        assert len(found["input_ids"]) == runs.sum() + 4 * 2 + 9
        assert found["pixel_values"].shape == (4 * runs.sum(), 3 * 2 * 16 * 16)
        counts += runs.tolist()
    assert 240 < min(counts) < 400
    assert 1300 < max(counts) < 1550


def test_the_geometry_is_qwen3_vl_2bs():
    case = next(x for x in preference.CASES if x.name == "images")
    model = preference_trainers.TASKS["images"].new_model(case, torch.device("meta"))
    assert sum(x.numel() for x in model.parameters()) == pytest.approx(2.13e9, rel=0.01)


def test_syncs_are_counted_within_layers_alone(monkeypatch):
    class Layer(torch.nn.Module):
        def forward(self, x):
            sync()
            return x

    def sync():
        if modes[-1] == "warn":
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)

    modes = ["default"]
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    base = torch.nn.Module()
    base.layers = torch.nn.ModuleList([Layer(), Layer()])
    model = SimpleNamespace(base_model=base)

    def step():
        for layer in base.layers:
            sync()
            layer(torch.ones(1))

    assert preference_images.syncs_in_layers(model, step) == 2
    assert modes[-1] == "default"
