"""A head with one output per row or document: patched, or over a base that is patched alone."""

from __future__ import annotations

import itertools

import peft
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMultipleChoice,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
)
from transformers.modeling_outputs import SequenceClassifierOutput

import flexvarlen as fv
from flexvarlen.patches.parts import base_of
from tests import forms
from tests.contract_oracle import gradients_of
from tests.patches.forward.padded_runs import assert_gradients_close
from tests.tiny_models import config_of, documents, one_row, padded_rows

BATCH = one_row()
FORMS = {
    name: forms.given(name, BATCH)
    for name in ("packed_layout", "cu_seq_lens", "position_ids", "document_ids", "seq_idx")
}
HEADS = {
    "classifier": AutoModelForSequenceClassification,
    "questions": AutoModelForQuestionAnswering,
    "choices": AutoModelForMultipleChoice,
}


@pytest.mark.parametrize(
    "family", [("llama", "qwen3", "llama4_text"), ("bert", "modernbert"), ("mamba2",)]
)
def test_head_over_a_base_that_is_patched_alone(family):
    """It would neither mask labels nor pool by document, and Mamba-2's drops the documents."""
    for kind in (*family, family[0]):  # the second of a class, and of another
        heads = (AutoModelForCausalLM, *HEADS.values())
        if kind in ("bert", "modernbert"):
            heads = heads[1:]
        for head in (x for x in heads if type(config_of(kind)) in x._model_mapping):
            model = head.from_config(config_of(kind)).eval()
            base = fv.patch_model(base_of(model), "sdpa")
            for inputs in ({"labels": BATCH.ids}, *FORMS.values()):
                with pytest.raises(ValueError, match=r"must be patched too.*on the whole model"):
                    model(BATCH.ids, **inputs)
            with pytest.raises(ValueError, match="must be patched too"):  # labels by position
                model(BATCH.ids, None, BATCH.position_ids, None, None, BATCH.ids)
            with torch.no_grad():  # the base model itself gives each token's hidden state
                out = base(BATCH.ids, **FORMS["packed_layout"])
                assert out.last_hidden_state.shape[1] == 256
                fv.unpatch_model(base)
                model(BATCH.ids[None] if head is HEADS["choices"] else BATCH.ids)


def test_heads_that_share_a_patched_base():
    """One head is patched with the base, another is not."""
    for kind, head in (("llama", "classifier"), ("bert", "questions"), ("qwen3", "classifier")):
        torch.manual_seed(0)
        first = HEADS[head].from_config(config_of(kind)).eval()
        second = HEADS[head].from_config(config_of(kind)).eval()
        setattr(second, second.base_model_prefix, first.base_model)
        fv.patch_model(first, "sdpa")
        with pytest.raises(ValueError, match="must be patched too"):
            second(BATCH.ids, position_ids=BATCH.position_ids)


@pytest.mark.parametrize("how", ["peft", "compiled_base", "compiled"])
def test_head_over_a_patched_base_that_is_wrapped(how):
    torch._dynamo.reset()
    model = AutoModelForCausalLM.from_config(config_of("llama", num_hidden_layers=1))
    base = fv.patch_model(model.model, "sdpa")
    if how == "peft":
        model.model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"]))
    elif how == "compiled_base":
        model.model = torch.compile(base)
    call = torch.compile(model, backend="eager") if how == "compiled" else model
    with pytest.raises(Exception, match="must be patched too"), torch.no_grad():
        call(BATCH.ids, position_ids=BATCH.position_ids, labels=BATCH.ids)
    torch._dynamo.reset()


# ---- a patched head gives one output per document ----

LABELS = torch.tensor([0, 1, 1, 0, 1, 0])


def classifier(kind, **changes):
    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_config(config_of(kind, **changes)).eval()


def one_by_one_logits(model):
    return torch.cat([model(documents()[i][None]).logits for i, _ in BATCH.order])


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        *(("llama", form) for form in FORMS),
        *(("roberta", form) for form in FORMS),
        *((kind, "packed_layout") for kind in ("qwen3", "bert", "modernbert")),
        *((kind, "packed_layout") for kind in ("qwen3_windows", "phi3", "qwen3_5_text")),
    ],
)
def test_a_classifier_gives_a_row_per_document(kind, form):
    model = classifier(kind)
    alone = one_by_one_logits(model)
    expected = torch.nn.functional.cross_entropy(alone, LABELS)
    expected.backward()
    gradients = gradients_of(model)
    model.zero_grad()
    out = fv.patch_model(model, "sdpa")(BATCH.ids, **FORMS[form], labels=LABELS)
    torch.testing.assert_close(out.logits, alone, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(out.loss, expected, atol=1e-4, rtol=1e-4)
    out.loss.backward()
    assert_gradients_close(gradients_of(model), gradients, 1e-3, 1e-6)


def test_a_classifier_whose_router_has_a_loss():
    """It classifies documents; transformers adds the router's loss to next tokens alone."""
    model = classifier("mixtral", output_router_logits=True)
    alone = one_by_one_logits(model)
    out = fv.patch_model(model, "sdpa")(BATCH.ids, **FORMS["packed_layout"], labels=LABELS)
    torch.testing.assert_close(out.logits, alone, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(out.loss, torch.nn.functional.cross_entropy(alone, LABELS))


def test_a_classifier_under_torch_compile():
    """It finds the documents outside of the graph: one graph break, and the same logits."""
    model = classifier("llama", num_hidden_layers=1)
    alone = one_by_one_logits(model)
    torch._dynamo.reset()
    compiled = torch.compile(fv.patch_model(model, "sdpa"), backend="eager")
    with torch.no_grad():
        for form in ("packed_layout", "position_ids"):
            logits = compiled(BATCH.ids, **FORMS[form]).logits
            torch.testing.assert_close(logits, alone, atol=1e-4, rtol=1e-4)
    torch._dynamo.reset()


AFTER = {"packed_layout": fv.PackedLayout.from_lengths([5], total_tokens=8)}
BEFORE = {"attention_mask": torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2]])}


@pytest.mark.parametrize(
    ("kind", "inputs", "bounds"),
    [("qwen3", AFTER, [(0, 5)]), ("roberta", BEFORE, [(3, 5), (5, 8)])],
)
def test_padding_beside_documents(kind, inputs, bounds):
    """It is no document's last token, and RoBERTa's positions are not counted from it."""
    model, ids = classifier(kind), torch.arange(3, 11)[None]
    with torch.no_grad():
        alone = torch.cat([model(ids[:, start:end]).logits for start, end in bounds])
        logits = fv.patch_model(model, "sdpa")(ids, **inputs).logits
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


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_documents_of_the_padding_token(kind):
    """An empty text with pad = eos: padding must not be on the side that the head then reads."""
    model = classifier(kind, pad_token_id=2)
    model.get_input_embeddings().weight.data.normal_()  # as in a checkpoint: not zero at padding
    for lengths in ([3, 1, 2, 1], [1, 4, 1], [2]):
        texts = [torch.full((n,), 2) if i % 2 else torch.arange(3, 3 + n) for i, n in
                 enumerate(lengths, start=len(lengths) % 2)]  # fmt: skip
        with torch.no_grad():
            fv.unpatch_model(model)
            alone = torch.cat([model(text[None]).logits for text in texts])
            fv.patch_model(model, "sdpa")
            layout = fv.PackedLayout.from_lengths(lengths)
            logits = model(torch.cat(texts)[None], packed_layout=layout).logits
        torch.testing.assert_close(logits, alone, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_subclass_that_pools_by_the_mask(kind):
    """It reads `attention_mask.sum(1) - 1`: rows must begin with their documents."""
    parent = type(classifier(kind))

    class Reward(parent):
        def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
            hidden = self.model(input_ids, attention_mask=attention_mask, **kwargs)
            last = attention_mask.sum(1) - 1
            pooled = hidden.last_hidden_state[torch.arange(len(last)), last]
            return SequenceClassifierOutput(logits=self.score(pooled))

    torch.manual_seed(0)
    model = Reward._from_config(config_of(kind)).eval()
    with torch.no_grad():
        alone = [model(x[None], torch.ones_like(x[None])).logits for x in documents()]
        fv.patch_model(model, "sdpa")
        for form in FORMS.values():
            logits = model(BATCH.ids, **form).logits
            expected = torch.cat([alone[i] for i, _ in BATCH.order])
            torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("unpad", [False, True])
@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_labels_of_documents_by_name_and_count(kind, unpad):
    """One label for all documents would be broadcast, and labels of tokens may fit by chance."""
    model = fv.patch_model(classifier(kind, num_labels=1), "sdpa", unpad=unpad)
    documents_of_row = {"packed_layout": fv.PackedLayout.from_lengths([3, 2, 4, 1])}
    mask = (torch.arange(5) < torch.tensor([3, 2, 4, 1])[:, None]).long()
    for ids, given in (
        (torch.randint(3, 50, (1, 10)), documents_of_row),
        (torch.randint(3, 50, (4, 5)), {"attention_mask": mask}),
    ):
        for wrong in (torch.tensor([0.5]), torch.tensor(0.5), torch.rand(1, 10), torch.rand(3, 1)):
            with pytest.raises(ValueError, match="labels must be one for each of the 4 documents"):
                model(ids, labels=wrong, **given)
        assert model(ids, labels=torch.rand(4), **given).logits.shape == (4, 1)


@pytest.mark.parametrize("outputs", [1, 2, 9])
@pytest.mark.parametrize("lengths", [(9,), (1,), (2,), (1, 1), (4, 5)])
def test_labels_of_the_tokens_of_documents(lengths, outputs):
    """Those of PackedCollator may have the shape of several outputs of one document."""
    model = fv.patch_model(classifier("llama", num_labels=outputs), "sdpa")
    batch = fv.PackedCollator()([torch.randint(3, 50, (n,)).tolist() for n in lengths])
    padded = {"input_ids": batch["input_ids"], "attention_mask": torch.ones_like(batch["labels"])}
    with torch.no_grad():
        for inputs in (batch, padded) if len(lengths) == 1 else (batch,):
            with pytest.raises(ValueError, match=f"one for each of the {len(lengths)} documents"):
                model(**{**inputs, "labels": batch["labels"]})
            labels = torch.zeros(len(lengths), dtype=torch.long if outputs > 1 else torch.float)
            assert model(**{**inputs, "labels": labels}).loss.isfinite()


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_labels_whose_shape_is_that_of_the_tokens(kind):
    for batch, lengths, count in ((2, [4, 2], 4), (1, [6], 6), (2, [2, 1], 2)):
        model = classifier(kind, num_labels=count, problem_type="multi_label_classification")
        documents = sum(n > 0 for n in lengths)
        ids = torch.randint(3, 50, (batch, count))
        labels = torch.arange(documents * count).view(documents, count) % 2.0
        layout = fv.PackedLayout.from_lengths(lengths, total_tokens=ids.numel())
        starts = layout.cu_seqlens.tolist()
        with torch.no_grad():
            tokens = [ids.view(1, -1)[:, a:b] for a, b in itertools.pairwise(starts) if a < b]
            alone = torch.cat([model(x).logits for x in tokens[:documents]])
            loss = fv.patch_model(model, "sdpa")(ids, packed_layout=layout, labels=labels).loss
        expected = torch.nn.functional.binary_cross_entropy_with_logits(alone, labels)
        torch.testing.assert_close(loss, expected)


def test_a_row_of_padding_alone():
    model = fv.patch_model(classifier("llama"), "sdpa")
    layout = fv.PackedLayout.from_lengths([0, 0], total_tokens=256)
    with pytest.raises(ValueError, match="must hold a document, got padding alone"):
        model(BATCH.ids, packed_layout=layout)


def test_a_classifier_without_a_padding_token():
    """transformers' head would take the last token of a row, which may be padding."""
    model = fv.patch_model(classifier("llama", pad_token_id=None), "sdpa")
    with pytest.raises(ValueError, match=r"config\.pad_token_id must be set"):
        model(BATCH.ids, **FORMS["packed_layout"])


@pytest.mark.parametrize(("kind", "form"), [*(("qwen2", x) for x in FORMS), ("bert", "seq_idx")])
def test_questions_to_packed_documents(kind, form):
    """Also under a subclass with a forward of its own."""
    parent = type(HEADS["questions"].from_config(config_of(kind)))

    class Own(parent):
        def forward(self, input_ids=None, attention_mask=None, start_positions=None, **kwargs):
            return self.base_model(input_ids, attention_mask=attention_mask, **kwargs)[0]

    for each in (parent, Own):
        model = fv.patch_model(each._from_config(config_of(kind)), "sdpa")
        with pytest.raises(ValueError, match=rf"{each.__name__} pools each row.*got several"):
            model(BATCH.ids, **FORMS[form])


@pytest.mark.parametrize("unpad", [False, True])
@pytest.mark.parametrize("kind", ["bert", "roberta", "modernbert"])
def test_choices_in_padded_rows(kind, unpad):
    """Each choice is a row, in which the head must not read padding; Trainer counts the items."""
    torch.manual_seed(0)
    model = HEADS["choices"].from_config(config_of(kind)).eval()
    right, left = padded_rows(left=False), padded_rows(left=True)
    alone = torch.cat([model(documents()[i][None, None]).logits[0] for i, _ in right.order])
    fv.patch_model(model, "sdpa", unpad=unpad)

    def given(batch, choices):
        """Ids and mask `[B, choices, S]`."""
        mask = forms.real_tokens(batch)
        ids = batch.ids.masked_fill(mask == 0, model.config.pad_token_id)
        inputs = {"input_ids": ids, "attention_mask": mask}
        return {name: x.unflatten(0, (-1, choices)) for name, x in inputs.items()}

    for choices in (1, 2):
        others = {"labels": torch.zeros(2 // choices).long(), "num_items_in_batch": torch.tensor(4)}
        with pytest.raises(ValueError, match="must not hide the first token of a row"):
            model(**given(left, choices), **others)
        inputs = given(right, choices)
        variants = [inputs]
        if kind != "roberta":  # whose positions begin elsewhere
            variants.append({**inputs, "position_ids": torch.arange(128)[None]})
        if not unpad:  # refused
            embeddings = model.get_input_embeddings()(inputs["input_ids"])
            mask = inputs["attention_mask"]
            variants.append({"inputs_embeds": embeddings, "attention_mask": mask})
        for each in variants:
            out = model(**each, **others)
            expected = alone.view_as(out.logits)
            loss = torch.nn.functional.cross_entropy(expected, others["labels"])
            torch.testing.assert_close(out.logits, expected, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(out.loss, loss, atol=1e-4, rtol=1e-4)
    ids, numbers = inputs["input_ids"], torch.arange(128) // 8 + 1
    with pytest.raises(ValueError, match="MultipleChoice pools each row"):
        model(ids, attention_mask=numbers.expand_as(ids))
