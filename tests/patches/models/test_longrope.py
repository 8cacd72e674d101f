"""RoPE whose frequencies depend on a document's length: longrope, and `dynamic` with an alpha."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from transformers import AutoModelForCausalLM

import flexvarlen as fv
from flexvarlen.patches.models.rope import LONG
from tests.oracle import assert_as_accurate
from tests.tiny_models import LENGTHS, config_of, new_model, one_by_one, one_row


def logits(model, **given):
    with torch.no_grad():
        return model(one_row().ids, **given).logits


@pytest.mark.parametrize("ids", [[[7]], [[7], [9]]])
def test_longrope_on_one_token(ids):
    ids = torch.tensor(ids)
    positions = torch.zeros_like(ids)
    model = new_model("phi3")
    with torch.no_grad():
        expected = model(ids, position_ids=positions).logits
        found = fv.patch_model(model, "sdpa")(ids, position_ids=positions).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_frequencies_of_longrope_are_moved_once():
    model = fv.patch_model(new_model("phi3"), "sdpa")
    rotary = model.base_model.rotary_emb
    positions = torch.arange(8)[None]
    tables = rotary(torch.ones(1, 8, 1), positions)
    rotary.to("meta")(torch.ones(1, 8, 1, device="meta"), positions.to("meta"))
    assert getattr(rotary, LONG).device.type == "meta"
    assert all(x.device.type == "cpu" for x in tables)


def test_longrope_patched_on_the_meta_device():
    """What to_empty leaves in a buffer is garbage; no init_weights knows ours."""
    expected = logits(fv.patch_model(new_model("phi3"), "sdpa"))
    with torch.device("meta"):
        model = fv.patch_model(AutoModelForCausalLM.from_config(config_of("phi3")).eval(), "sdpa")
    model.to_empty(device="cpu").init_weights()
    model.load_state_dict(new_model("phi3").state_dict())
    assert torch.equal(logits(model), expected)


def test_a_pickle_of_longrope_asks_to_be_patched():
    model = fv.patch_model(new_model("phi3"), "sdpa")
    layout = fv.PackedLayout.from_lengths(LENGTHS)
    expected = logits(model, packed_layout=layout)
    loaded = pickle.loads(pickle.dumps(model))
    with pytest.raises(ValueError, match="call patch_model"):
        logits(loaded)
    assert torch.equal(logits(fv.patch_model(loaded, "sdpa"), packed_layout=layout), expected)


def test_frequencies_of_dynamic_rope_with_an_alpha():
    """Documents of 98 tokens are longer than the model's 64 positions, the others are not."""
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0, "alpha": 9.0}
    sizes = {"max_position_embeddings": 64}
    model, batch = new_model("hunyuan_v1_dense", rope_parameters=rope, **sizes), one_row()
    if model.model.rotary_emb.rope_type == "dynamic":  # before transformers gave it another name
        with pytest.raises(NotImplementedError, match="got dynamic"):
            fv.patch_model(model, "sdpa")
        return
    baseline = one_by_one(model, batch.order).logits
    exact = one_by_one(copy.deepcopy(model).double(), batch.order).logits
    found = logits(fv.patch_model(model, "sdpa"), position_ids=batch.position_ids)
    assert_as_accurate(found[0], exact, baseline, 2)
    fv.unpatch_model(model).set_attn_implementation("flexvarlen_doc")
    with pytest.raises(NotImplementedError, match="patch_model"):
        logits(model, position_ids=batch.position_ids, use_cache=False)
