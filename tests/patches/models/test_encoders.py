"""Bidirectional encoders: labels, positions and poolers of their own; encoders that are decoders.

That packed equals one by one is tested for all families in test_families.py.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModel, AutoModelForTokenClassification, BertModel, Gemma3TextModel

import flexvarlen as fv
from flexvarlen.measure import watch_compilation
from tests.oracle import assert_as_accurate
from tests.patches.models.contract import CASES, ENCODERS
from tests.tiny_models import LENGTHS, config_of, documents, new_model, one_row


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
    exact, baseline = CASES["roberta"].alone("packed_layout")
    model = fv.patch_model(new_model("roberta"), "sdpa")
    with torch.no_grad():
        logits = model(batch.ids, position_ids=batch.position_ids).logits[0]
    assert_as_accurate(logits, exact.logits, baseline.logits, 2)


def test_roberta_takes_positions_that_count_padding():
    """From 0 in a row that is padded on the left: they are shifted, as those of other rows."""
    model, batch = fv.patch_model(new_model("roberta"), "sdpa"), one_row()
    ids, positions = batch.ids[:, :12], torch.arange(12)[None]
    mask = (positions >= 5).long()
    with torch.no_grad():
        found, shifted = (
            model(ids, attention_mask=mask, position_ids=x).logits[:, 5:]
            for x in (positions, positions + 2)
        )
    assert torch.equal(found, shifted)


# ---- what pools the row ----


def bert(**changes):
    torch.manual_seed(0)
    return AutoModel.from_config(config_of("bert", **changes)).eval()


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


def test_one_graph_pools_any_documents():
    """A graph pools each slot of the layout."""
    torch._dynamo.reset()
    model, ids = fv.patch_model(bert(num_hidden_layers=1), "sdpa"), one_row().ids
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    sizes = {"total_tokens": 256, "capacity": 8, "max_seqlen_bound": 256}
    with watch_compilation() as stats, torch.no_grad():
        for lengths in (LENGTHS, (256,), (100, 60, 7)):
            layout = fv.PackedLayout.from_lengths(lengths, **sizes)
            found, expected = (m(ids, packed_layout=layout) for m in (compiled, model))
            pooled, real = found.pooler_output, layout.real_tokens()
            assert pooled.shape == (8, expected.pooler_output.shape[1])
            torch.testing.assert_close(pooled[: len(lengths)], expected.pooler_output)
            hidden = (x.last_hidden_state[0, real] for x in (found, expected))
            torch.testing.assert_close(*hidden, atol=1e-4, rtol=1e-4)
    assert (stats.compilations, stats.graph_breaks) == (1, 0)


def test_pooled_row_in_a_tuple():
    model = fv.patch_model(bert(), "sdpa")
    with pytest.raises(ValueError, match=r"return_dict must stay True"):
        model(one_row().ids, cu_seq_lens_q=one_row().cu_seqlens, return_dict=False)


# ---- decoders ----


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
