"""Models that draw a mask of their own over images: never lost in silence."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

import flexvarlen as fv
from tests.patches.models.test_refused_families import paligemma
from tests.tiny_models import config_of, new_model


@pytest.mark.parametrize("make", [lambda: new_model("gemma3"), paligemma], ids=["gemma3", "pali"])
def test_overlay_lost_by_the_plugin_name_alone(make):
    """One document per row keeps transformers' own mask; several are refused."""
    model = make()
    ids = torch.arange(3, 19)[None]
    types = (ids > 9).long()
    with torch.no_grad():
        causal = model(ids, use_cache=False).logits
        expected = model(ids, token_type_ids=types, use_cache=False).logits
        model.set_attn_implementation("flexvarlen_doc")
        found = model(ids, token_type_ids=types, use_cache=False).logits
    assert (expected - causal).abs().max() > 0.01
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
    positions = torch.cat([torch.arange(6), torch.arange(10)])[None]
    with pytest.raises(ValueError, match="a packed batch must not have"):
        model(ids, token_type_ids=types, position_ids=positions, use_cache=False)


# Both nest the overlay in one way.
@pytest.mark.parametrize(
    "make",
    [
        create_causal_mask,
        pytest.param(create_sliding_window_causal_mask, marks=pytest.mark.slow),
    ],
)
def test_overlay_lost_in_a_graph_by_the_plugin_name_alone(make):
    """transformers 5.24 nests the overlay in its mask function, which no graph can look into."""
    config = config_of("gemma3_text")
    config._attn_implementation = "flexvarlen_doc"
    mask_of = torch.compile(make, backend="eager", fullgraph=True)
    for tokens in (16, 12):
        positions = torch.cat([torch.arange(6), torch.arange(tokens - 6)])[None]
        rows = (config, torch.zeros(1, tokens, 8), None, None, positions)
        assert mask_of(*rows) is None
        mask, said = None, ""
        try:
            mask = mask_of(*rows, block_sequence_ids=(positions > 3).long() - 1)
        except RuntimeError as error:
            said = str(error)
        # Layers refuse a 4D mask beside several documents.
        assert "images and prefixes" in said or mask.ndim == 4


def test_text_users_get_the_class_with_images():
    model = AutoModelForCausalLM.from_config(config_of("gemma3"))
    assert type(model).__name__ == "Gemma3ForConditionalGeneration"
    fv.patch_model(model, "reference")
    assert model.config.vision_config._attn_implementation == "sdpa"
