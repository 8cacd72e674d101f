"""The names that flexvarlen reads from transformers' models and configs, by family.

A name that a release renamed would look like a disabled feature: chunks, a temperature, the first
position. So `patch_model` looks all of them up once, and `check_layer` those of a layer. The lists
contain names that every supported release has; others are read with a default where they are used.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from flexvarlen.patches.models.families import BY_TYPE, TEXT_AND_TOWER, TEXT_TOWERS
from flexvarlen.patches.models.layers import (
    attention_layers,
    attention_modules,
    text_config_of,
)
from flexvarlen.patches.parts import base_of, text_tower_of
from flexvarlen.upstream import required, why_absent


class Need(NamedTuple):
    """A name that families have.

    Attributes:
        dotted: the part of the model that holds it, of `_parts`, and the name. After `forward` it
            is a parameter; "a|b": one of these.
        purpose: what it is for, as in `required`.
        families: model types, of the text tower's config or of the whole model's.
    """

    dotted: str
    purpose: str
    families: Collection[str]


class Interface(NamedTuple):
    """A function of transformers, or a dataclass of outputs, and the parameters that it has."""

    dotted: str
    purpose: str
    parameters: tuple[str, ...]


_IMAGES = {"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"}
_TOWERS = {*_IMAGES, "gemma3", "gemma4", *TEXT_AND_TOWER}
_TEXT = {*BY_TYPE, *TEXT_TOWERS} - _TOWERS
_ABSOLUTE = {"bert", "roberta"}
_ATTENTION = _TEXT - {"mamba2"}
_CACHED = _TEXT - {"modernbert"}
_ROPE = _ATTENTION - {*_ABSOLUTE, "kimi_linear", "nemotron_h"}
_LAYER_TYPES = {
    *("llama4_text", "qwen2", "qwen2_moe", "qwen3", "gemma2", "gemma3_text", "gpt_oss", "olmo3"),
    *("smollm3", "cohere2", "qwen2_vl_text", "qwen2_5_vl_text", "modernbert", "exaone4"),
    *("gemma4_text", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "olmo_hybrid", "bamba"),
    *("kimi_linear", "granitemoehybrid", "nemotron_h", "falcon_h1", "lfm2", "lfm2_moe", "mamba2"),
}
_WINDOWS = {
    *("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "mistral", "mixtral", "gemma2", "gemma3_text"),
    *("phi3", "gpt_oss", "olmo3", "smollm3", "cohere2", "qwen2_vl_text", "qwen2_5_vl_text"),
    *("ministral3", "exaone4", "starcoder2", "gemma4_text"),
}
_ROUTERS = {
    *("llama4_text", "qwen2_moe", "qwen3_moe", "mixtral", "gpt_oss", "qwen3_5_moe_text"),
    *("qwen3_next", "granitemoehybrid", "olmoe", "granitemoe", "minimax_m2"),
}
"""Families whose config can request router logits, also in transformers 5.17."""

NEEDS = (
    # towers, in which all others are looked up
    Need("whole.text_config", "the layers of the text tower", _TOWERS),
    Need("base.language_model", "the layers of the text tower", _TOWERS - {"smolvlm"}),
    Need("base.text_model", "the layers of the text tower", {"smolvlm"}),
    # the keywords of a forward; one by another name would pass through, unread
    Need("tower.forward.inputs_embeds", "packed embeddings", _TEXT),
    Need("tower.forward.attention_mask", "padding", _TEXT),
    Need("tower.forward.position_ids", "positions that count in each document", _ATTENTION),
    Need("tower.forward.use_cache", "packed rows, which fill no cache", _CACHED),
    Need("tower.forward.cache|past_key_values|cache_params", "a cache beside documents", _CACHED),
    Need("head.forward.labels|start_positions", "labels at a document's first token", BY_TYPE),
    # attention layers
    Need("config.num_attention_heads", "finding kinds of layers", _ATTENTION),
    Need("attention.is_causal", "finding the attention layers", _ATTENTION),
    Need("attention.layer_idx", "the layer types of a config", _ATTENTION),
    Need("attention.scaling", "the factor on scores", _ATTENTION - {"modernbert"}),
    Need("attention.attn_logit_softcapping", "a softcap", {"gemma2", "gemma3_text"}),
    Need("attention.sinks", "attention sinks", {"gpt_oss"}),
    Need("attention.sliding_window", "windows", {"modernbert"}),
    Need("config.sliding_window", "windows", _WINDOWS),
    Need("config.layer_types", "kinds of layers", _LAYER_TYPES),
    Need("config.num_kv_shared_layers", "layers that share keys", {"gemma4_text"}),
    Need("config.use_bidirectional_attention", "windows both ways", {"gemma4_text"}),
    Need("config.attention_chunk_size", "chunks", {"llama4_text"}),
    Need("config.attn_temperature_tuning", "queries scaled by position", {"llama4_text"}),
    *(
        Need(f"attention.{name}", "queries scaled by position", {"llama4_text"})
        for name in ("floor_scale", "attn_scale", "use_rope")
    ),
    # positions
    Need("config.rope_parameters", "rotary frequencies that depend on other documents", _ROPE),
    Need("tower.rotary_emb", "rotary tables by document", _ROPE - {"lfm2_moe"}),
    Need("tower.rotary_emb.rope_type", "frequencies by document", {"phi3", "hunyuan_v1_dense"}),
    Need("base.embeddings.position_embeddings", "the longest document", _ABSOLUTE),
    Need(
        "base.embeddings.create_position_ids_from_input_ids",
        "the position of a document's first token",
        {"roberta"},
    ),
    Need("base.embeddings.padding_idx", "the position of a first token", {"roberta"}),
    # heads and poolers
    Need("base.pooler", "pooling by document", _ABSOLUTE),
    Need("config.is_decoder", "encoders that see all of a document", _ABSOLUTE),
    Need("config.classifier_pooling", "rows that begin with padding", {"modernbert"}),
    Need("config.output_router_logits", "the loss of routers", _ROUTERS),
    *(
        Need(f"config.{name}", "a head that scales or caps its logits", families)
        for name, families in (
            ("logits_scaling", {"granite", "granitemoe", "granitemoehybrid"}),
            ("logit_scale", {"cohere2"}),
            ("lm_head_multiplier", {"falcon_h1"}),
            ("final_logit_softcapping", {"gemma2", "gemma3_text", "gemma4_text"}),
        )
    ),
    # images
    Need("base.visual", "images as documents", _IMAGES),
    Need("base.get_rope_index", "positions in images", _IMAGES),
    Need("vision.spatial_merge_size", "positions in images", _IMAGES),
    Need("vision.window_size", "windows inside an image", {"qwen2_5_vl"}),
    Need("vision.num_grid_per_side", "positions in images", _IMAGES - {"qwen2_vl", "qwen2_5_vl"}),
    *(
        Need(f"base.forward.{name}", "positions in images", _IMAGES)
        for name in ("image_grid_thw", "video_grid_thw", "mm_token_type_ids")
    ),
    Need("base.forward.pixel_values", "images before the text tower", TEXT_AND_TOWER),
    Need("base.forward.pixel_values", "images before the text tower", {"gemma3", "gemma4"}),
    Need("base.forward.token_type_ids", "tokens of one image", {"gemma3"}),
    Need("base.forward.mm_token_type_ids", "tokens of one image", {"gemma4"}),
    Need("base.forward.input_features", "refusing sound", {"gemma4"}),
)

_OUTPUTS = "transformers.modeling_outputs"
INTERFACES = (
    Interface(
        "transformers.integrations.flash_attention.flash_attention_forward",
        "what layers pass to attention",
        ("dropout", "scaling", "sliding_window", "softcap", "is_causal", "s_aux"),
    ),
    Interface(
        "transformers.masking_utils.sdpa_mask",
        "the masks of models that are not patched",
        (
            *("batch_size", "q_length", "kv_length", "q_offset", "kv_offset", "mask_function"),
            *("attention_mask", "use_vmap"),
        ),
    ),
    Interface(
        "transformers.loss.loss_utils.ForCausalLMLoss",
        "labels that come shifted",
        ("shift_labels", "num_items_in_batch"),
    ),
    Interface(
        f"{_OUTPUTS}.MoeModelOutputWithPast",
        "outputs of padded batches",
        ("last_hidden_state", "hidden_states", "router_logits"),
    ),
    Interface(f"{_OUTPUTS}.MoeCausalLMOutputWithPast", "the loss of routers", ("loss", "aux_loss")),
    Interface(f"{_OUTPUTS}.BaseModelOutputWithPooling", "pooling by document", ("pooler_output",)),
)
"""Interfaces of transformers itself that any model needs."""


def check_names(model: PreTrainedModel) -> None:
    """Look up everything that is read of a model of a verified family.

    Raises:
        NotImplementedError: transformers has no such name.
    """
    check_interfaces()
    config = model.config
    types = {config.model_type, text_config_of(config).model_type}
    parts: dict[str, list[Any]] = {}
    for need in NEEDS:
        if types.isdisjoint(need.families):
            continue
        root, *names = need.dotted.split(".")
        if not parts:
            parts = _parts(model)
        for owner in parts[root]:
            _check(owner, names, need.purpose)


def check_layer(layer: nn.Module) -> None:
    """As `check_names`, for an attention layer of a model that only names its attn_implementation.

    Raises:
        NotImplementedError: transformers has no such name.
    """
    if not torch.compiler.is_compiling():
        check_interfaces()
    if not _is_of_transformers(layer):
        return
    config: Any = layer.config
    for need in NEEDS:
        root, *names = need.dotted.split(".")
        if root in ("config", "attention") and config.model_type in need.families:
            _check(layer if root == "attention" else config, names, need.purpose)


def _is_of_transformers(module: nn.Module) -> bool:
    """Whether a module is of a class of transformers: a user's own has what names it likes."""
    return type(module).__module__.startswith("transformers.")


def _parts(model: PreTrainedModel) -> dict[str, list[Any]]:
    """The parts of a model that the names belong to, as lists."""
    base = base_of(model)
    tower = text_tower_of(base)
    visual = getattr(base, "visual", None)
    return {
        "whole": [model.config],
        "config": [text_config_of(model.config)],
        "head": [model] if base is not model and _is_of_transformers(model) else [],
        "base": [base],
        "tower": [tower],
        "vision": [visual] if isinstance(visual, PreTrainedModel) else [],
        "attention": attention_layers(tower) or attention_modules(tower),
    }


def _check(owner: Any, names: list[str], purpose: str) -> None:
    *path, last = names
    for name in path:
        if name == "forward":
            _check_parameters(owner, last, purpose)
            return
        owner = required(owner, name, purpose)
    required(owner, last, purpose)


def _check_parameters(module: nn.Module, words: str, purpose: str) -> None:
    """Look up a parameter of a module's `forward`, or of one that it overrides."""
    # A wrapper of PEFT or torch.compile passes on what its model takes.
    own = next((x for x in module.modules() if isinstance(x, PreTrainedModel)), module)
    forwards = [vars(each).get("forward") for each in type(own).__mro__]
    taken = {x for each in forwards if each is not None for x in inspect.signature(each).parameters}
    if taken.isdisjoint(words.split("|")):
        raise NotImplementedError(why_absent(own, f"forward({words.partition('|')[0]}=)", purpose))


@functools.cache
def check_interfaces() -> None:
    """Look up what flexvarlen needs of transformers itself, once in a process.

    Raises:
        NotImplementedError: it has no such name.
    """
    for need in INTERFACES:
        module, _, name = need.dotted.rpartition(".")
        found = required(importlib.import_module(module), name, need.purpose)
        taken = inspect.signature(found).parameters
        for parameter in need.parameters:
            if parameter not in taken:
                raise NotImplementedError(why_absent(found, f"{parameter}=", need.purpose))
    made = SimpleNamespace()
    required(required(PreTrainedModel, "loss_function", "losses"), "fset", "losses")(made, None)
    if not hasattr(made, "_loss_function"):
        purpose = "a loss that the user set"
        raise NotImplementedError(why_absent(PreTrainedModel, "_loss_function", purpose))
