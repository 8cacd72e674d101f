"""Suites leaks, families and capabilities: known leaks are seen, and ours is right everywhere."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import transformers

from flexvarlen.bench.suites.contract import capabilities, families, forms, leaks
from flexvarlen.bench.suites.contract.batch_forms import FORMS, LENGTHS
from flexvarlen.bench.suites.contract.forms import FormsCase
from flexvarlen.bench.suites.contract.tiny_images import IMAGE, IMAGES
from flexvarlen.runner.failures import Unsupported
from flexvarlen.runner.suite import Options
from tests.bench.quick import CPU, QUICK, records_of

LLAMA = FormsCase("llama", "float32", 16)

# Forms in which plain transformers, eager and sdpa, is right.
RIGHT_IN_PLAIN = {
    "position_ids, use_cache=False",
    "position_ids, cu_seq_lens_*, max_length_* and seq_idx",
    "two packed rows",
    "first document continues at position 100",
    "a later document starts at position 2",
    "right padding",
    "left padding",
}


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    folder = tmp_path_factory.mktemp("leaks")
    return records_of(leaks.SUITE, folder, cases="^(llama|qwen3)$", options=Options(CPU))


def of(records, variant):
    return [r for r in records if r.case["variant"] == variant]


def test_ours_is_right_in_every_form_or_refuses_its_cache(records):
    assert {r.case["transformers"] for r in records} == {transformers.__version__}
    ours = of(records, "flexvarlen:sdpa")
    assert len(ours) == len(FORMS) * 2
    cached = {form.name for form in FORMS if form.cached}
    refused = [r for r in ours if r.status == "unsupported"]
    assert {r.case["pass"] for r in refused} == cached
    right = [r for r in ours if r not in refused]
    assert {(r.status, r.measures["leaks"]) for r in right} == {("ok", 0)}


@pytest.mark.parametrize("variant", ["transformers:eager", "transformers:sdpa"])
def test_known_leaks_of_plain_transformers_are_seen(records, variant):
    theirs = of(records, variant)
    assert {r.case["pass"] for r in theirs if r.status == "ok"} == RIGHT_IN_PLAIN
    wrong = [r for r in theirs if r.case["pass"] not in RIGHT_IN_PLAIN]
    assert all(r.status == "wrong" and r.measures["error"] > 1 for r in wrong)


def test_a_missing_kernel_has_its_record_and_reason(records):
    flash = of(records, "transformers:flash_attention_2")
    assert len(flash) == len(FORMS) * 2
    assert all(r.status == "unsupported" and r.reason for r in flash)


@pytest.mark.parametrize("model", leaks.HYBRID)
def test_plain_hybrid_models_leak_in_every_packed_form_and_ours_in_none(model):
    """The cache that transformers documents for such a model leaks too; ours refuses it."""
    cached = next(form for form in FORMS if form.cached)
    models = forms.TinyModels(replace(LLAMA, model=model), CPU)
    assert models.recurrent
    shown = [cached, *(form for form in FORMS if form.name in forms.QUICK_FORMS)]
    for form in shown:
        found = leaks.SUITE.finding(models, form, "transformers:sdpa")
        packed = form.name != "left padding"
        assert found.status == ("wrong" if packed else "ok"), form.name
        assert (found.measures["leaks"] > 0) == packed
        if form is not cached:
            ours = leaks.SUITE.finding(models, form, "flexvarlen:sdpa")
            assert (ours.status, ours.measures["leaks"]) == ("ok", 0), form.name
    with pytest.raises(Unsupported, match="rows of one document each"):
        leaks.SUITE.finding(models, cached, "flexvarlen:sdpa")


@pytest.mark.parametrize("model", IMAGES)
def test_plain_models_with_images_leak_and_ours_do_not(model):
    models = forms.TinyModels(replace(LLAMA, model=model), CPU)
    form = next(form for form in FORMS if form.name.endswith("attention_mask of ones"))
    assert (models.batch(form, models.ids).inputs["input_ids"] == IMAGE).sum() == 12
    assert leaks.SUITE.finding(models, form, "transformers:sdpa").measures["leaks"] > 0
    ours = leaks.SUITE.finding(models, form, "flexvarlen:sdpa")
    assert (ours.status, ours.measures["leaks"]) == ("ok", 0)


def test_forms_cover_all_tokens():
    ids = torch.arange(sum(LENGTHS))
    for form in FORMS:
        batch = form.batch(ids)
        tokens = batch.inputs["input_ids"]
        found = torch.cat([tokens[row, span] for row, span in batch.slices])
        assert torch.equal(found, ids), form.name


def test_a_backend_is_right_or_refuses_in_each_family():
    found = {}
    for model in ("llama", "gemma2"):
        for finding in families.SUITE.measure(
            replace(LLAMA, model=model), ["sdpa", "reference"], QUICK
        ):
            found.setdefault((model, finding.variant), set()).add(finding.status)
    assert found == {
        ("llama", "sdpa"): {"ok"},
        ("llama", "reference"): {"ok"},
        ("gemma2", "sdpa"): {"unsupported"},  # softcap
        ("gemma2", "reference"): {"ok"},
    }


def test_an_unpatched_model_leaks(monkeypatch):
    monkeypatch.setattr(forms, "attending", lambda model, variant: nullcontext(model))
    found = families.SUITE.measure(LLAMA, ["sdpa"], QUICK)
    (leaky,) = [f for f in found if f.pass_ == "2D mask of document ids"]
    assert leaky.status == "wrong"
    assert leaky.measures["leaks"] > 0


@pytest.mark.parametrize("what", ["logits", "gradients"])
def test_an_error_is_wrong(monkeypatch, what):
    answer = forms.TinyModels.answer

    def scaled(self, model, batches, *, gradients):
        found = answer(self, model, batches, gradients=gradients)
        if len(batches) > 1:  # each document alone
            return found
        if what == "logits":
            return replace(found, logits=[0.5 * x for x in found.logits])
        return replace(found, gradients={k: 0.5 * x for k, x in found.gradients.items()})

    monkeypatch.setattr(forms.TinyModels, "answer", scaled)
    assert {f.status for f in families.SUITE.measure(LLAMA, ["sdpa"], QUICK)} == {"wrong"}


def test_every_backend_says_what_it_can_do(tmp_path):
    found = {r.case["variant"]: r for r in records_of(capabilities.SUITE, tmp_path)}
    assert set(found) == set(capabilities.BACKENDS)
    assert found["sdpa"].measures["why_not"]["sliding window"] is None
    assert found["fa2"].status == "unsupported"
    text = capabilities.SUITE.section(list(found.values()))
    assert "| `sdpa` | yes |" in text
    assert "| `fa2` | not here |" in text
