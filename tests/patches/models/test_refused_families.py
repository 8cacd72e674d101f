"""Families that are refused, as documents would leak through more than attention, or a mask.

A refusal of a batch with images is in test_image_masks.py.
"""

from __future__ import annotations

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    MambaConfig,
    MiniMaxConfig,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
)

import flexvarlen as fv
from flexvarlen.bench.suites.contract.tiny_sizes import TINY
from flexvarlen.patches.models.families import BY_TYPE
from flexvarlen.patches.models.unsupported import STATEFUL
from flexvarlen.patches.models.verified import require_verified
from tests.tiny_models import config_of, new_model, one_row


def paligemma():
    text = {**config_of("gemma").to_dict(), "model_type": "gemma"}
    vision = TINY["gemma3"]["vision_config"]
    config = PaliGemmaConfig(text_config=text, vision_config=vision, image_token_index=90)
    made = PaliGemmaForConditionalGeneration._from_config(config, attn_implementation="eager")
    return made.eval()


def of_config(config):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "initializer_range": 0.3}
STATEFUL_MODELS = {
    "mamba": lambda: of_config(MambaConfig(**SIZES, state_size=8, time_step_rank=4)),
    "minimax": lambda: of_config(
        MiniMaxConfig(
            **SIZES,
            intermediate_size=48,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            layer_types=["linear_attention", "full_attention"],
            num_local_experts=2,
            num_experts_per_tok=1,
        )
    ),
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
REFUSED = {
    **{
        name: (make, "model_type must be one whose layers mix tokens only in attention")
        for name, make in STATEFUL_MODELS.items()
    },
    "paligemma": (paligemma, "model_type must be one of causal or bidirectional documents"),
    "a decoder of BERT": (
        lambda: of_config(config_of("bert", is_decoder=True)),
        "an encoder must not be a decoder",
    ),
    "windows both ways of Gemma 4": (
        lambda: new_model("gemma4_text", use_bidirectional_attention="all").model,
        "use_bidirectional_attention must not be 'all'",
    ),
    "dynamic RoPE": (
        lambda: new_model("llama", rope_parameters=dict(DYNAMIC), max_position_embeddings=64),
        "rope_type must be one whose frequencies are the same for all documents, got dynamic",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_patched_in_silence(case):
    """What would leak through more than attention; the refused model is as it was."""
    make, words = REFUSED[case]
    model = make()
    before = model.config._attn_implementation
    with pytest.raises(NotImplementedError, match=words):
        fv.patch_model(model, "sdpa")
    assert model.config._attn_implementation == before
    assert "forward" not in vars(model)


@pytest.mark.parametrize("name", STATEFUL_MODELS)
def test_a_stateful_model_that_does_not_leak(name):
    """Documents leak through it with transformers' own attention, which could serve it then."""
    row = {"input_ids": one_row().ids[:, :20] % 64, "use_cache": False}
    layout = fv.PackedLayout.from_lengths([6, 14])
    if name == "minimax":
        row["position_ids"] = layout.position_ids()[None]
    model = STATEFUL_MODELS[name]()
    model.set_experts_implementation("batched_mm")  # others may round by how many tokens there are
    with pytest.raises(fv.IsolationError, match=r"document 0 .* leaks into document 1"):
        fv.verify_isolation(model, row, layout=layout, gradients=False)


def test_the_name_alone_on_a_stateful_model():
    model = STATEFUL_MODELS["minimax"]()
    model.set_attn_implementation("flexvarlen_doc")
    with pytest.raises(NotImplementedError, match="lightning attention"):
        model(input_ids=torch.ones(1, 8, dtype=torch.long), use_cache=False)


NEWEST = "lara_mini"  # where this model type is, transformers has all that are named here


@pytest.mark.parametrize("model_type", STATEFUL)
def test_state_not_named(model_type):
    """The sentence says what leaks; a misspelt type would fall to the general refusal."""
    assert model_type in CONFIG_MAPPING or NEWEST not in CONFIG_MAPPING
    assert model_type not in BY_TYPE
    with pytest.raises(NotImplementedError, match=f"{model_type}.*runs {STATEFUL[model_type]}"):
        require_verified(model_type)
