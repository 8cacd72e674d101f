"""A head that takes one output of a row, over a base model that is patched by itself."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForQuestionAnswering, AutoModelForSequenceClassification

import flexvarlen as fv
from tests import forms
from tests.oracle import assert_as_accurate
from tests.tiny_models import config_of, exact_and_peer, new_model, one_row, padded_rows

BATCH = one_row()
FORMS = {
    name: forms.given(name, BATCH)
    for name in ("packed_layout", "cu_seq_lens", "position_ids", "document_ids", "seq_idx")
}
HEADS = {
    "classifier": AutoModelForSequenceClassification,
    "questions": AutoModelForQuestionAnswering,
}


def head_over_patched_base(kind, head="classifier"):
    torch.manual_seed(0)
    model = HEADS[head].from_config(config_of(kind)).eval()
    fv.patch_model(model.base_model, "sdpa")
    return model


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("kind", "head"),
    [
        ("llama", "classifier"),
        ("qwen3", "classifier"),
        ("qwen2", "questions"),
        ("roberta", "classifier"),
        ("modernbert", "classifier"),
        ("bert", "questions"),
    ],
)
def test_one_output_for_several_documents(kind, head, form):
    model = head_over_patched_base(kind, head)
    with pytest.raises(ValueError, match=r"pools each row.*got several; pass one document per row"):
        model(BATCH.ids, **FORMS[form])
    with torch.no_grad():  # the base model itself gives each token's hidden state
        assert model.base_model(BATCH.ids, **FORMS[form]).last_hidden_state.shape[1] == 256


def test_a_subclass_of_the_users_own():
    parent = type(head_over_patched_base("llama"))

    class Reward(parent):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs).logits

    model = Reward(config_of("llama")).eval()
    fv.patch_model(model.model, "sdpa")
    with pytest.raises(ValueError, match="Reward pools each row"):
        model(BATCH.ids, **FORMS["packed_layout"])


def test_in_a_compiled_graph():
    model = head_over_patched_base("llama")
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    with pytest.raises(RuntimeError, match="pools each row"), torch.no_grad():
        compiled(BATCH.ids, **FORMS["position_ids"])
    torch._dynamo.reset()


@pytest.mark.parametrize(("kind", "left"), [("llama", False), ("llama", True), ("roberta", False)])
def test_one_document_a_row_is_as_before(kind, left):
    batch, model = padded_rows(left=left), head_over_patched_base(kind)
    padding = batch.document_ids == 0
    ids = batch.ids.masked_fill(padding, model.config.pad_token_id)
    inputs = {"input_ids": ids, "attention_mask": (~padding).long()}
    with torch.no_grad():
        found = model(**inputs).logits
        fv.unpatch_model(model.base_model)
        expected = model(**inputs).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_labels_of_a_causal_head_over_a_patched_base():
    """Its wrapper would mask them; without it they would cross documents."""
    model = new_model("llama")
    fv.patch_model(model.model, "sdpa")
    with pytest.raises(ValueError, match=r"labels must go to a patched model.*the whole model"):
        model(BATCH.ids, labels=BATCH.ids, **FORMS["position_ids"])
    exact, peer = exact_and_peer("llama", BATCH.order)
    with torch.no_grad():
        logits = model(BATCH.ids, **FORMS["position_ids"]).logits[0]
        assert_as_accurate(logits, exact.logits, peer.logits, 2)
        fv.patch_model(model, "sdpa")
        loss = model(BATCH.ids, labels=BATCH.ids, **FORMS["position_ids"]).loss
    assert loss.item() == pytest.approx(exact.loss.item(), rel=1e-5)
