"""A head that takes one output of a row: patched, or over a base model that is patched alone."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

import flexvarlen as fv
from tests import forms
from tests.oracle import assert_as_accurate
from tests.tiny_models import config_of, documents, exact_and_peer, new_model, one_row, padded_rows

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


# ---- a patched head gives one output per document ----

LABELS = torch.tensor([0, 1, 1, 0, 1, 0])


def classifier(kind, **changes):
    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_config(config_of(kind, **changes)).eval()


def one_by_one_logits(model):
    with torch.no_grad():
        return torch.cat([model(documents()[i][None]).logits for i, _ in BATCH.order])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["llama", "qwen3", "bert", "roberta", "modernbert"])
def test_a_classifier_gives_a_row_per_document(kind, form):
    model = classifier(kind)
    alone = one_by_one_logits(model)
    out = fv.patch_model(model, "sdpa")(BATCH.ids, **FORMS[form], labels=LABELS)
    torch.testing.assert_close(out.logits, alone, atol=1e-4, rtol=1e-4)
    expected = torch.nn.functional.cross_entropy(alone, LABELS)
    torch.testing.assert_close(out.loss, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_between_documents_has_no_row(side):
    batch = padded_rows(left=side == "left", packed=True)
    model = classifier("qwen3")
    with torch.no_grad():
        alone = torch.cat([model(documents()[i][None]).logits for i, _ in batch.order])
        fv.patch_model(model, "sdpa")
        logits = model(batch.ids, attention_mask=batch.document_ids).logits
    torch.testing.assert_close(logits, alone, atol=1e-4, rtol=1e-4)


def test_a_classifier_s_gradients():
    model = classifier("llama").train()
    losses = [
        torch.nn.functional.cross_entropy(model(documents()[i][None]).logits, label[None])
        for (i, _), label in zip(BATCH.order, LABELS, strict=True)
    ]
    torch.stack(losses).mean().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    fv.patch_model(model, "sdpa")
    model(BATCH.ids, **FORMS["packed_layout"], labels=LABELS).loss.backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_a_classifier_under_torch_compile(kind):
    """It finds the documents outside of the graph: one graph break, and the same logits."""
    model = classifier(kind)
    alone = one_by_one_logits(model)
    torch._dynamo.reset()
    compiled = torch.compile(fv.patch_model(model, "sdpa"), backend="aot_eager")
    with torch.no_grad():
        for form in ("packed_layout", "position_ids"):
            logits = compiled(BATCH.ids, **FORMS[form]).logits
            torch.testing.assert_close(logits, alone, atol=1e-4, rtol=1e-4)
    torch._dynamo.reset()


def test_one_document_and_padding_after_it():
    """The head must not take the padding for the document's last token."""
    model = classifier("qwen3", pad_token_id=60)
    ids = torch.cat([documents()[0], torch.zeros(3, dtype=torch.long)])[None]
    layout = fv.PackedLayout.from_lengths([5], total_tokens=8)
    with torch.no_grad():
        alone = model(documents()[0][None]).logits
        logits = fv.patch_model(model, "sdpa")(ids, packed_layout=layout).logits
    torch.testing.assert_close(logits, alone, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["qwen3", "roberta"])
def test_packed_embeddings(kind):
    """They are not a padded batch's, whose padding a head would look for among the ids."""
    model = classifier(kind)
    alone = one_by_one_logits(model)
    fv.patch_model(model, "sdpa", unpad=True)
    embeds = model.get_input_embeddings()(BATCH.ids)
    logits = model(inputs_embeds=embeds, **FORMS["packed_layout"]).logits
    torch.testing.assert_close(logits, alone, atol=1e-4, rtol=1e-4)


def test_a_row_of_padding_alone():
    model = fv.patch_model(classifier("llama"), "sdpa")
    layout = fv.PackedLayout.from_lengths([0, 0], total_tokens=256)
    with pytest.raises(ValueError, match="must hold a document, got padding alone"):
        model(BATCH.ids, packed_layout=layout)


def test_a_classifier_that_keeps_the_documents():
    parent = type(classifier("qwen3"))

    class Forgets(parent):
        def forward(self, input_ids, labels=None, **kwargs):
            return super().forward(input_ids, labels=labels)

    model = Forgets(config_of("qwen3"))
    model.set_attn_implementation("sdpa")
    fv.patch_model(model.eval(), "sdpa")
    with pytest.raises(ValueError, match=r"must pass its \*\*kwargs on to its base model"):
        model(BATCH.ids, **FORMS["packed_layout"])


def test_a_classifier_without_a_padding_token():
    """transformers' head would take the last token of a row, which may be padding."""
    model = fv.patch_model(classifier("llama", pad_token_id=None), "sdpa")
    with pytest.raises(ValueError, match=r"config\.pad_token_id must be set"):
        model(BATCH.ids, **FORMS["packed_layout"])


@pytest.mark.parametrize("form", FORMS)
def test_questions_to_packed_documents(form):
    torch.manual_seed(0)
    model = fv.patch_model(AutoModelForQuestionAnswering.from_config(config_of("qwen2")), "sdpa")
    with pytest.raises(ValueError, match=r"pools each row.*got several"):
        model(BATCH.ids, **FORMS[form])


@pytest.mark.parametrize("form", FORMS)
def test_labels_of_a_token_classifier_are_the_tokens_own(form):
    torch.manual_seed(0)
    model = AutoModelForTokenClassification.from_config(config_of("llama")).eval()
    classes = BATCH.ids % 2
    with torch.no_grad():
        alone = torch.cat([model(documents()[i][None]).logits[0] for i, _ in BATCH.order])
        out = fv.patch_model(model, "sdpa")(BATCH.ids, **FORMS[form], labels=classes)
    torch.testing.assert_close(out.logits[0], alone, atol=1e-4, rtol=1e-4)
    expected = torch.nn.functional.cross_entropy(alone, classes[0])
    torch.testing.assert_close(out.loss, expected, atol=1e-5, rtol=1e-5)
