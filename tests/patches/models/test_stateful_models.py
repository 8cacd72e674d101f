"""Models with state beyond attention are refused by name, and only these need to be."""

from __future__ import annotations

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, MambaConfig, MiniMaxConfig

import flexvarlen as fv
from flexvarlen.patches.models.families import BY_TYPE
from flexvarlen.patches.models.unsupported import STATEFUL
from flexvarlen.patches.models.verified import require_verified

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
ATTENTION = {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
CONFIGS = {
    "mamba": lambda: MambaConfig(**SIZES, state_size=8, time_step_rank=4),
    "minimax": lambda: MiniMaxConfig(
        **SIZES,
        **ATTENTION,
        head_dim=8,
        layer_types=["linear_attention", "full_attention"],
        num_local_experts=2,
        num_experts_per_tok=1,
    ),
}


NEWEST = "lara_mini"  # where this model type is, transformers has all that are named here


def tiny(name):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation="eager").eval()


@pytest.mark.parametrize("model_type", STATEFUL)
def test_state_not_named(model_type):
    """The sentence says what leaks; a misspelt type would fall to the general refusal."""
    assert model_type in CONFIG_MAPPING or NEWEST not in CONFIG_MAPPING
    assert model_type not in BY_TYPE
    with pytest.raises(NotImplementedError, match=f"{model_type}.*runs {STATEFUL[model_type]}"):
        require_verified(model_type)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_stateful_model_that_does_not_leak(name):
    """Documents leak through it with transformers' own attention, told where they begin."""
    model = tiny(name)
    ids = torch.randint(1, 64, (1, 20), generator=torch.Generator().manual_seed(1))
    other = ids.clone()
    other[0, :6] = ids[0, :6].flip(0) % 63 + 1
    positions = torch.cat([torch.arange(6), torch.arange(14)])[None]
    takes = {} if name == "mamba" else {"position_ids": positions}
    with torch.no_grad():
        before, after = (model(input_ids=x, use_cache=False, **takes).logits for x in (ids, other))
    assert (before - after)[0, 6:].abs().max() > 0.01


@pytest.mark.parametrize("name", CONFIGS)
def test_patched_in_silence(name):
    model = tiny(name)
    with pytest.raises(NotImplementedError, match="one document per row"):
        fv.patch_model(model, "sdpa")
    assert model.config._attn_implementation == "eager"
    assert "forward" not in vars(model)


def test_the_name_alone_on_a_stateful_model():
    model = tiny("minimax")
    model.set_attn_implementation("flexvarlen_doc")
    with pytest.raises(NotImplementedError, match="lightning attention"):
        model(input_ids=torch.ones(1, 8, dtype=torch.long), use_cache=False)
