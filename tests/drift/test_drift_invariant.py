"""The batch-invariant mode shows zero, bit for bit, and what is not zero is not called so."""

import math
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import nn

import flexvarlen as fv
from flexvarlen.attention.backends.sdpa import SdpaBackend
from flexvarlen.drift.difference import Difference
from flexvarlen.drift.model import invariance as invariance_module
from flexvarlen.drift.model.fixed_shapes import Pieces, fixed_shapes
from flexvarlen.drift.model.invariance import _joined, invariance, invariant_variant
from flexvarlen.drift.model.run import run_packed
from flexvarlen.drift.report.files import DriftReport
from flexvarlen.drift.report.verdicts import plain_sentences
from flexvarlen.equivalence.models import build_model
from tests.drift.drift_models import (
    LENGTHS,
    check_invariant,
    markdown,
    row_dependent_linear,
    rows_of,
    setting_of,
)

MODELS = ["llama", "qwen3"]


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    return build_model(request.param)[0]


@pytest.fixture(scope="module")
def llama():
    return build_model("llama")[0]


@pytest.fixture
def row_dependent(monkeypatch):
    """Linear layers whose result depends on how many rows they get, with any BLAS."""
    monkeypatch.setattr(nn.Linear, "forward", row_dependent_linear)


@pytest.mark.parametrize("lengths", [LENGTHS, (130, 1, 200, 57)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_invariant_mode_is_bitwise_zero_forward_and_backward(model, lengths, dtype):
    check_invariant(model, lengths, dtype)


def test_invariant_mode_needs_nothing_of_the_matrix_product(model, row_dependent):
    check_invariant(model, LENGTHS, torch.float32)


def test_without_fixed_shapes_it_is_not(model, monkeypatch, row_dependent):
    monkeypatch.setattr(invariance_module, "fixed_shapes", lambda *_: nullcontext())
    setting = setting_of(model, (130, 1, 200, 57))
    found = invariance(setting, invariant_variant(setting, "sdpa"), piece=32, sample=9)
    assert found["equal_logits"] < 1
    assert found["equal_hidden"] < 1
    assert found["equal_gradients"] < 0.99


def test_attention_that_breaks_its_promise_passes_as_invariant(llama, monkeypatch):
    right = SdpaBackend.attend

    def wrong(self, q, k, v, sinks, call, mask, plan):
        out, lse = right(self, q, k, v, sinks, call, mask, plan)
        return out * (1 + q.shape[0] * 1e-4), lse

    monkeypatch.setattr(SdpaBackend, "attend", wrong)
    rows = rows_of(llama, what=["none", "invariant"], train=True, sample=2, piece=32)
    assert (rows["all"].status, rows["none"].status) == ("ok", "ok")
    row = rows["invariant"]
    assert row.status == "wrong"
    for part in ("logits", "hidden states", "own gradients of 2 of 5 documents"):
        assert f"{part} differ in " in row.reason
    assert f"by at most {row.measures['logits_max_abs']:.1e}" in row.reason
    assert f"by at most {row.measures['any_hidden_max_abs']:.1e}" in row.reason
    assert f"by at most {row.measures['document_gradients_max_abs']:.1e}" in row.reason
    said = " ".join(plain_sentences(list(rows.values())))
    assert f"sdpa is wrong: {row.reason}" in said
    assert "with everything batch invariant" not in said
    assert "sdpa (wrong)" in markdown(rows)


def test_nan_is_called_invariant():
    model, _ = build_model("llama")
    model.model.norm.weight.data.fill_(math.nan)
    rows = rows_of(model, what=["none", "invariant"])
    assert rows["invariant"].measures["equal_logits"] == 1
    for row in rows.values():
        assert row.status == "wrong"
        assert row.reason.startswith("not finite: 100% of the logits of the run;")


def test_joined_difference_keeps_a_nan_and_weights_by_elements():
    small = Difference.between(torch.tensor([1.0]), torch.tensor([2.0]))
    large = Difference.between(torch.ones(3), torch.ones(3))
    joined = _joined([large, small])
    assert (joined.equal, joined.max_abs, joined.elements) == (0.75, 1.0, 4)
    nan = Difference.between(torch.tensor([math.nan]), torch.tensor([2.0]))
    for parts in ([small, nan], [nan, small]):
        assert math.isnan(_joined(parts).max_abs)


def test_sentence_says_how_many_documents_and_hidden_states(llama):
    rows = rows_of(llama, train=True, what=["invariant"], sample=2, piece=16)
    said = " ".join(plain_sentences(list(rows.values())))
    assert (
        "with everything batch invariant, packed and alone: logits, hidden states and own "
        "gradients of 2 of 5 documents have the same bits; a step takes" in said
    )
    measures = rows["invariant"].measures | {"equal_hidden": 0.5, "any_hidden_max_abs": 0.25}
    row = replace(rows["invariant"], measures=measures)
    said = " ".join(plain_sentences([row]))
    assert "documents have the same bits; hidden states differ" in said
    assert "2.5e-01" in DriftReport((row,)).markdown()


def test_attention_is_asked_for_both_promises(llama, monkeypatch):
    right, asked = SdpaBackend.attend, []

    def spy(self, q, k, v, sinks, call, mask, plan):
        asked.append((call.deterministic, call.batch_invariant))
        return right(self, q, k, v, sinks, call, mask, plan)

    monkeypatch.setattr(SdpaBackend, "attend", spy)
    setting = setting_of(llama)
    invariance(setting, invariant_variant(setting, "sdpa"), piece=32, sample=1)
    assert set(asked) == {(True, True)}


def test_fixed_shapes_give_the_same_numbers(model):
    setting = setting_of(model, dtype=torch.float64)
    variant = setting.variant("sdpa")
    plain = run_packed(variant, setting.batch)
    with fixed_shapes(variant.model, LENGTHS, 16):
        found = run_packed(variant, setting.batch)
    assert torch.allclose(found.logits, plain.logits, atol=1e-10)
    assert found.gradients.keys() == plain.gradients.keys()
    for name, gradient in plain.gradients.items():
        assert torch.allclose(found.gradients[name], gradient, atol=1e-10), name


def test_invariant_row_has_its_cost(llama):
    rows = rows_of(llama, train=True, what=["invariant"], sample=2, piece=16)
    measures = rows["invariant"].measures
    assert rows["invariant"].status == "ok"
    assert measures["equal_gradients"] == 1
    assert len(measures["gradient_documents"]) == 2
    assert measures["cost"] == measures["ms_p50"] / rows["all"].measures["ms_p50"]
    assert "share" not in measures


def test_backend_that_cannot_be_invariant_is_a_row_with_its_reason(llama):
    rows = rows_of(llama, "reference", what=["invariant"], train=True)
    assert (rows["invariant"].status, rows["all"].status) == ("unsupported", "ok")
    reason = fv.why_not("reference", batch_invariant=True, deterministic=True)
    assert rows["invariant"].reason == reason


def test_pieces_begin_with_their_documents():
    pieces = Pieces.of([3, 1, 4], torch.device("cpu"), tokens=2)
    x = torch.arange(1.0, 9.0)[:, None]
    entered = [piece[:, 0].tolist() for piece in pieces.enter(x)]
    assert entered == [[1, 2], [3, 0], [4, 0], [5, 6], [7, 8]]
    assert torch.equal(pieces.leave(pieces.enter(x)), x)
