"""Bidirectional encoders: packed equals one by one, with labels of their own and no pooled row.

The oracle is the unpatched model in fp64, a document at a time; the baseline is the same in fp32.
"""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModel,
    AutoModelForTokenClassification,
    BertLMHeadModel,
    BertModel,
    Gemma3TextModel,
)

import flexvarlen as fv
from flexvarlen.measure import watch_compilation
from flexvarlen.patches.models.families import BY_TYPE
from tests import forms
from tests.oracle import assert_as_accurate
from tests.tiny_models import (
    LENGTHS,
    VOCABULARY,
    config_of,
    documents,
    new_model,
    one_row,
    padded_rows,
    two_rows,
)

ENCODERS = [name for name, family in BY_TYPE.items() if family.task == "MaskedLM"]
FIRST = {"bert": 0, "roberta": 2, "modernbert": 0}


@cache
def labels():
    """Of each document, `[L]`, -100 at most tokens; each first token has one."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for length in LENGTHS:
        own = torch.randint(3, VOCABULARY, (length,), generator=generator)
        kept = torch.rand(length, generator=generator) < 0.4
        kept[0] = True
        made.append(own.masked_fill(~kept, -100))
    return made


def labels_of(batch):
    """`labels` in the batch's rows: [B, S], -100 at padding."""
    of_batch = torch.full_like(batch.ids, -100)
    of_batch[batch.document_ids > 0] = torch.cat([labels()[i] for i, _ in batch.order])
    return of_batch


def one_by_one(model, order):
    """Logits of the documents, the mean loss over all labels, and the gradients."""
    logits, loss, count = [], 0.0, 0
    for index, _ in order:
        out = model(input_ids=documents()[index][None]).logits[0]
        wide = out if out.dtype == torch.float64 else out.float()
        loss = loss + cross_entropy(wide, labels()[index], reduction="sum")
        count += int((labels()[index] != -100).sum())
        logits.append(out.detach())
    (loss / count).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return torch.cat(logits), (loss / count).detach(), gradients


@cache
def exact_and_baseline(name, order):
    baseline = one_by_one(new_model(name), order)
    return one_by_one(new_model(name).double(), order), baseline


FORMS = {
    "position_ids": ("position_ids",),
    "cu_seq_lens_alone": ("cu_seq_lens",),
    "document_id_mask": ("document_ids",),
    "mask_of_ones": ("position_ids", "ones"),
    "padding_mask": ("padding_mask_and_position_ids",),
    "packed_layout": ("packed_layout",),
    "seq_idx": ("seq_idx",),
}


def given_to(name, form, batch):
    """The keyword arguments; positions count from the encoder's first one."""
    way, *beside = FORMS[form]
    inputs = forms.given(way, batch, *beside)
    if "position_ids" in inputs:
        inputs["position_ids"] = inputs["position_ids"] + FIRST[name]
    return inputs


BATCHES = {
    "one_row": (one_row, ("position_ids", "cu_seq_lens_alone", "mask_of_ones")),
    "two_rows": (two_rows, ("position_ids", "document_id_mask")),
    "left_padding": (
        lambda: padded_rows(left=True, packed=True),
        ("padding_mask", "document_id_mask"),
    ),
    "right_padding": (lambda: padded_rows(left=False, packed=True), ("document_id_mask",)),
}
CASES = [(rows, form) for rows, (_, forms) in BATCHES.items() for form in forms]


@pytest.mark.parametrize(("rows", "form"), CASES)
@pytest.mark.parametrize("name", ENCODERS)
def test_packed_equals_one_by_one(name, rows, form):
    """A causal mask, a window one too wide, a masked label, positions of the row."""
    batch = BATCHES[rows][0]()
    exact, baseline = exact_and_baseline(name, batch.order)
    model = fv.patch_model(new_model(name), "sdpa").train()
    out = model(batch.ids, labels=labels_of(batch), **given_to(name, form, batch))
    out.loss.backward()
    logits = batch.of_documents(out.logits.detach())
    assert_as_accurate(logits, exact[0], baseline[0], 2, "logits")
    moved = 2 * (logits.double() - exact[0]).abs().max().item()
    assert abs(out.loss.item() - exact[1].item()) <= moved + 1e-6 * exact[1].item()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert gradients.keys() == exact[2].keys()
    for name, gradient in gradients.items():
        assert_as_accurate(gradient, exact[2][name], baseline[2][name], 3, name)


@pytest.mark.parametrize("backend", ["reference", pytest.param("flex", marks=pytest.mark.slow)])
def test_other_backends(backend):
    batch = one_row()
    exact, baseline = exact_and_baseline("modernbert", batch.order)
    model = fv.patch_model(new_model("modernbert"), backend)
    with torch.no_grad():
        logits = model(batch.ids, packed_layout=fv.PackedLayout.from_lengths(LENGTHS)).logits[0]
    assert_as_accurate(logits, exact[0], baseline[0], 2)


@pytest.mark.parametrize("name", ENCODERS)
def test_by_the_plugin_name_alone(name):
    """BERT embeds its positions before any layer is called; ModernBERT's layers get none."""
    batch = one_row()
    model = new_model(name, implementation="flexvarlen_doc")
    for form in ("cu_seq_lens_alone", "packed_layout", "seq_idx", "position_ids"):
        with pytest.raises(NotImplementedError, match=r"outside the attention layers.*patch_model"):
            model(batch.ids, **given_to(name, form, batch))


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.sampled(1)
def test_one_graph_for_any_documents(name):
    torch._dynamo.reset()
    model = fv.patch_model(new_model(name), "sdpa")
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    sizes = {"total_tokens": 256, "capacity": 8, "max_seqlen_bound": 256}
    with watch_compilation() as stats, torch.no_grad():
        for lengths in (LENGTHS, (256,), (100, 60, 96)):
            layout = fv.PackedLayout.from_lengths(lengths, **sizes)
            found = compiled(input_ids=one_row().ids, packed_layout=layout).logits
            expected = model(input_ids=one_row().ids, packed_layout=layout).logits
            torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
    assert (stats.compilations, stats.graph_breaks) == (1, 0)


def token_classifier(name):
    torch.manual_seed(0)
    return AutoModelForTokenClassification.from_config(config_of(name)).eval()


@pytest.mark.parametrize("name", ENCODERS)
def test_label_of_a_first_token_masked(name):
    """Of a classified token the label is its own: the first of each document too."""
    model, batch = token_classifier(name), one_row()
    classes = batch.ids % 2
    with torch.no_grad():
        alone = [model(documents()[i][None]).logits[0].double() for i, _ in batch.order]
        expected = cross_entropy(torch.cat(alone), classes[0])
        loss = fv.patch_model(model)(batch.ids, labels=classes, cu_seq_lens_q=batch.cu_seqlens).loss
    torch.testing.assert_close(loss.double(), expected, atol=1e-5, rtol=1e-5)


def test_roberta_takes_a_collators_positions():
    """They begin at 0, where RoBERTa has the vectors of its padding."""
    batch = one_row()
    exact, baseline = exact_and_baseline("roberta", batch.order)
    model = fv.patch_model(new_model("roberta"), "sdpa")
    with torch.no_grad():
        logits = model(batch.ids, position_ids=batch.position_ids).logits[0]
    assert_as_accurate(logits, exact[0], baseline[0], 2)


# ---- what pools the row ----


def bert():
    torch.manual_seed(0)
    return AutoModel.from_config(config_of("bert")).eval()


def test_the_pooler_reads_the_first_document_alone():
    """It takes a row's first token: each document must have its own, padding none."""
    model, batch = bert(), one_row()
    with torch.no_grad():
        alone = [model(documents()[i][None]) for i, _ in batch.order]
        fv.patch_model(model, "sdpa")
        packed = model(batch.ids, cu_seq_lens_q=batch.cu_seqlens)
    pooled = torch.cat([x.pooler_output for x in alone])
    torch.testing.assert_close(packed.pooler_output, pooled, atol=1e-4, rtol=1e-4)
    assert packed[1] is packed.pooler_output
    hidden = torch.cat([x.last_hidden_state[0] for x in alone])
    torch.testing.assert_close(packed.last_hidden_state[0], hidden, atol=1e-4, rtol=1e-4)


def test_pooler_in_a_compiled_graph():
    """A graph pools each slot of the layout."""
    torch._dynamo.reset()
    batch, model = one_row(), bert()
    lengths = batch.cu_seqlens.diff().tolist()
    layout = fv.PackedLayout.from_lengths(lengths, capacity=8)
    with torch.no_grad():
        eager = fv.patch_model(model, "sdpa")(batch.ids, packed_layout=layout).pooler_output
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        pooled = compiled(batch.ids, packed_layout=layout).pooler_output
    assert pooled.shape == (8, eager.shape[1])
    torch.testing.assert_close(pooled[: len(lengths)], eager)


def test_pooled_row_in_a_tuple():
    model = fv.patch_model(bert(), "sdpa")
    with pytest.raises(ValueError, match=r"return_dict must stay True"):
        model(one_row().ids, cu_seq_lens_q=one_row().cu_seqlens, return_dict=False)


# ---- decoders, dropout ----


def test_an_encoder_set_to_decode():
    model = BertLMHeadModel(config_of("bert", is_decoder=True))
    with pytest.raises(NotImplementedError, match="is_decoder=True"):
        fv.patch_model(model)


def test_a_decoder_that_became_an_encoder():
    """EmbeddingGemma: Gemma 3 with attention both ways, in windows on both sides."""
    torch.manual_seed(0)
    config = config_of("gemma3_text", use_bidirectional_attention=True)
    baseline = Gemma3TextModel._from_config(config, attn_implementation="eager").eval()
    exact, batch = copy.deepcopy(baseline).double(), one_row()
    with torch.no_grad():
        alone = [
            torch.cat([m(documents()[i][None]).last_hidden_state[0] for i, _ in batch.order])
            for m in (exact, baseline)
        ]
        fv.patch_model(baseline, "sdpa")
        out = baseline(batch.ids, position_ids=batch.position_ids)
    assert_as_accurate(out.last_hidden_state[0], *alone, 2)
    assert out.past_key_values is None


def test_cross_attention_is_not_self_attention():
    """Queries and keys of one length, of other tokens."""
    config = config_of("bert", is_decoder=True, add_cross_attention=True)
    model = BertModel(config).eval()
    model.set_attn_implementation("flexvarlen_doc")
    ids = documents()[1][None]
    with pytest.raises(NotImplementedError, match="patch_model"):
        model(ids, encoder_hidden_states=torch.zeros(1, ids.shape[1], config.hidden_size))


def test_a_pooler_that_is_set_after_patching():
    """It reads each document's first token; without one the model gives no pooled output."""
    batch, model = one_row(), fv.patch_model(bert(), "sdpa")
    given = {"input_ids": batch.ids, "packed_layout": fv.PackedLayout.from_lengths(LENGTHS)}
    pooler, model.pooler = model.pooler, None
    with torch.no_grad():
        assert model(**given).pooler_output is None
        model.pooler = pooler
        assert len(model(**given).pooler_output) == len(LENGTHS)
