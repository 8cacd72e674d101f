"""Configs of two layers for each verified family, with a thousandth of the parameters; weights."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from flexvarlen.bench.suites.contract.tiny_sizes import COMMON, TINY

_CHOSEN_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts")


def tiny_config(
    model_type: str, *, head_dim: int = 16, every_expert: bool = False, **changes: Any
) -> PretrainedConfig:
    """A config of this architecture.

    Args:
        model_type: of a verified family.
        head_dim: of the layers that run over tokens.
        every_expert: a token goes to all experts. Else two that are almost equal may change places
            where a low precision rounds otherwise, and the outputs jump.
        changes: of the config of these layers.
    """
    whole = copy.deepcopy(TINY.get(model_type, {}))  # some configs add to their rope_parameters
    has_towers = "text_config" in whole
    sizes: dict[str, Any] = {**COMMON, **(whole.pop("text_config") if has_towers else whole)}
    if "kv_lora_rank" in sizes:
        rope = {"qk_rope_head_dim": head_dim // 2, "qk_nope_head_dim": head_dim}
        sizes |= {**rope, "v_head_dim": head_dim}
    elif "head_dim" in sizes:
        sizes["head_dim"] = head_dim
    else:
        sizes["hidden_size"] = sizes["num_attention_heads"] * head_dim
        if "state_size" in sizes:  # Mamba-2, whose heads are twice as wide together
            sizes["head_dim"] = head_dim
    for name in ("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"):
        if name in sizes:  # of the delta rule: 16 where head_dim is
            sizes[name] *= head_dim // 16
    rope_parameters = sizes.get("rope_parameters", {})
    if "long_factor" in rope_parameters:
        factors: list[float] = [float(n) for n in range(1, head_dim // 2 + 1)]
        short = {"short_factor": [1.0] * len(factors), "long_factor": factors}
        sizes["rope_parameters"] = {**rope_parameters, **short}
    if "mrope_section" in rope_parameters:  # of half a head: time, height and width
        axes = head_dim // 8, 3 * head_dim // 16, 3 * head_dim // 16
        sizes["rope_parameters"] = {**rope_parameters, "mrope_section": list(axes)}
    if model_type.startswith("gemma4"):
        sizes["global_head_dim"] = 2 * head_dim
    if model_type.startswith("granite"):  # by default 1: attention is one-hot, and bfloat16 is lost
        sizes["attention_multiplier"] = head_dim**-0.5
    if every_expert:
        for name in ("num_experts", "num_local_experts", "n_routed_experts"):
            if name in sizes:
                sizes |= {chosen: sizes[name] for chosen in _CHOSEN_EXPERTS if chosen in sizes}
    sizes |= changes
    # transformers' own: flash-linear-attention registers a mamba2 of its own with AutoConfig.
    config_class: type[PretrainedConfig] = getattr(transformers, CONFIG_MAPPING_NAMES[model_type])
    return config_class(text_config=sizes, **whole) if has_towers else config_class(**sizes)


@torch.no_grad()
def draw_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Change a new model's weights so that a leak moves every output. Returns the model."""
    for name, parameter in model.named_parameters():
        # They start at 0, or as they come; the projection of Gemma 3's images too.
        if name.endswith(("bias", "sinks", "mm_input_projection_weight")):
            parameter.normal_(std=0.2)
        elif name.endswith("A_log"):
            # A state that is forgotten at once hardly leaks. And an output that is one product q·k
            # has only the sign of it left after its norm, which low precision may turn.
            parameter.sub_(4.0)
        elif model.config.model_type.startswith("gemma4") and name.endswith("q_norm.weight"):
            # Its scores have no other scale: at 1 attention is one-hot, and bfloat16 is lost.
            parameter.mul_(0.25)
        parameter.copy_(parameter.to(torch.bfloat16))  # the very same values in every dtype
    return model
