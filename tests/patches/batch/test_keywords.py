"""Names of arguments: what would tell documents to nobody raises; what a model takes does not."""

from __future__ import annotations

import inspect

import pytest
import torch
import transformers
from transformers import PreTrainedModel, Qwen3ForCausalLM

import flexvarlen as fv
from flexvarlen.bench.suites.contract.tiny_configs import tiny_config
from flexvarlen.patches.batch.unsupported_keywords import _LOSS_MASKS, _OURS_BY_OTHER_NAMES
from flexvarlen.patches.models.families import FAMILIES
from tests.patches.batch.models import NAME, PATCHED, model_of
from tests.tiny_models import config_of, one_row, shared_model

ROW = one_row()
LENGTHS = ROW.cu_seqlens.diff()
LAYOUT = fv.PackedLayout.from_lengths(LENGTHS.tolist())
NAMES = {
    "seq_lengths": LENGTHS,
    "seq_lens": LENGTHS,
    "seqlens": LENGTHS,
    "lengths": LENGTHS,
    "cu_seq_lens": ROW.cu_seqlens,
    "cu_seq_len_q": ROW.cu_seqlens,
    "cu_seq_len_k": ROW.cu_seqlens,
    "segment_ids": ROW.document_ids,
    "sequence_ids": ROW.document_ids,
    "sequence_id": ROW.document_ids,
    "doc_ids": ROW.document_ids,
    "document_id": ROW.document_ids,
    "layout": LAYOUT,
    "positions": ROW.position_ids,
    "input_pos": ROW.position_ids,
    "block_mask": fv.document_block_mask(LAYOUT),
    "document_ids": ROW.document_ids,
    "cu_seqlens": ROW.cu_seqlens,
    "cu_seqlens_q": ROW.cu_seqlens,
    "cu_seqlens_k": ROW.cu_seqlens,
    "packed_layouts": LAYOUT,
    "tree_kv_index": ROW.position_ids,
}
RIGHT_NAMES = {  # which the sentence gives for these
    "document_ids": "attention_mask",
    "cu_seqlens": "cu_seq_lens_q",
    "cu_seqlens_k": "cu_seq_lens_k",
    "packed_layouts": "packed_layout",
    "tree_kv_index": "packed_layout=PackedLayout.from_tree",
}


@pytest.mark.parametrize(
    ("how", "name"),
    [
        *((PATCHED, name) for name in NAMES),
        *((NAME, name) for name in ("seq_lengths", "layout", *RIGHT_NAMES)),
    ],
)
def test_a_name_that_nobody_reads(how, name):
    """The documents would see one another; the sentence says which names are read."""
    model = model_of(how)
    words = rf"packed_layout, cu_seq_lens_q, .*seq_idx\), got {name}=, .*; pass "
    words += RIGHT_NAMES.get(name, "")
    with pytest.raises(ValueError, match=words):
        model(ROW.ids, **{name: NAMES[name]})
    assert model(ROW.ids, **{name: None}).logits.isfinite().all()


@pytest.mark.parametrize("name", _LOSS_MASKS)
def test_a_mask_of_the_loss(name):
    words = f"{name} must be applied to the labels"
    with fv.patched(shared_model("llama"), "sdpa") as model, pytest.raises(ValueError, match=words):
        model(ROW.ids, labels=ROW.ids, **{name: torch.ones_like(ROW.ids)})


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_no_argument_of_a_model_is_refused(family):
    """Nor of a part of it that is a model."""
    with torch.device("meta"):
        auto_class = getattr(transformers, f"AutoModelFor{family.task}")
        model = auto_class.from_config(tiny_config(family.model_type))
    taken = {
        name
        for part in model.modules()
        if isinstance(part, PreTrainedModel)
        for name in inspect.signature(type(part).forward).parameters
    }
    assert "input_ids" in taken
    assert not taken & {*_OURS_BY_OTHER_NAMES, *_LOSS_MASKS}
    assert not {"token_type_ids", "cache_position", "seq_idx"} & set(_OURS_BY_OTHER_NAMES)


class WithSegments(Qwen3ForCausalLM):
    """A user's, with an argument for itself."""

    def forward(self, input_ids=None, segment_ids=None, **kwargs):
        embedded = self.get_input_embeddings()(input_ids)
        if segment_ids is not None:
            embedded = embedded + segment_ids[..., None]
        return super().forward(inputs_embeds=embedded, **kwargs)


def test_an_argument_of_a_users_own():
    torch.manual_seed(0)
    config = config_of("qwen3", num_hidden_layers=1)
    config._attn_implementation = "sdpa"
    model = fv.patch_model(WithSegments(config).eval(), "sdpa")
    with torch.no_grad():
        plain, segmented = (
            model(ROW.ids, position_ids=ROW.position_ids, **more).logits
            for more in ({}, {"segment_ids": ROW.document_ids})
        )
    assert not torch.equal(plain, segmented)
    with pytest.raises(ValueError, match="got doc_ids="):
        model(ROW.ids, doc_ids=ROW.document_ids)
