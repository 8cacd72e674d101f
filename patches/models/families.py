"""The verified model families, and what each needs.

Verified means that outputs and gradients of a packed batch equal those of single documents, on
every backend that can serve the layers (tests/patches/models/test_families.py; `flexvarlen bench
families` makes the matrix).
"""

from __future__ import annotations

from dataclasses import dataclass

_MOE = (
    "experts see tokens one by one: no leak; their auxiliary loss is that of all real tokens of a "
    "batch (no model in transformers computes one per document, `seq_aux_loss`)"
)
_BY_TYPE = "each layer type gets its own backend and mask"
_VISION = "rotary positions in time, height and width; a vision tower"
_VISION_NEEDS = (
    "with images, boundaries come from the text's own positions or explicitly; each frame of an "
    "image is a document of the vision tower"
)
_DELTA = "gated delta rule and short convolution in three of four layers"
_MAMBA = "Mamba-2 layers"
_RECURRENT = "states and convolutions start anew at each document"
_SCALED = "queries are scaled by position"
_POSITION = "positions count inside a document"
_RUNS = "its kernels are flex, sdpa and reference where a batch has images"
_TEXT_AND_TOWER = "a verified text model; before it, images of a tower of their own replace tokens"
_ENCODER = "bidirectional attention"
_OWN_LABELS = "encoders mask no label; poolers and classifiers give a row for each document"


@dataclass(frozen=True)
class Family:
    """Models of one architecture.

    Attributes:
        name: the common name.
        model_type: transformers' name, `config.model_type`.
        has: features of its layers beyond causal grouped-query attention.
        needs: special handling or caveats; empty if there are none.
        by_name_alone: whether attn_implementation works without `patch_model`.
        task: suffix of the transformers `AutoModelFor...` class that it is verified with.
    """

    name: str
    model_type: str
    has: str = ""
    needs: str = ""
    by_name_alone: bool = True
    task: str = "CausalLM"


FAMILIES: tuple[Family, ...] = (
    Family("Llama 1, 2, 3", "llama"),
    Family(
        "Llama 4, text",
        "llama4_text",
        "chunked layers; layers without RoPE scale queries by position",
        "chunks and positions count inside a document",
        by_name_alone=False,  # its layers keep position_ids to themselves
    ),
    Family("Qwen2, Qwen2.5", "qwen2", "sliding windows in some configs"),
    Family("Qwen2-MoE", "qwen2_moe", "experts, sliding windows in some configs", _MOE),
    Family("Qwen3", "qwen3", "sliding windows in some configs"),
    Family("Qwen3-MoE", "qwen3_moe", "experts", _MOE),
    Family("Mistral", "mistral", "sliding windows"),
    Family("Mixtral", "mixtral", "experts, sliding windows", _MOE),
    Family("Gemma", "gemma"),
    Family(
        "Gemma 2",
        "gemma2",
        "softcap, alternating windows",
        f"{_BY_TYPE}; softcap in decoding too, where transformers' sdpa drops it",
    ),
    Family(
        "Gemma 3, text",
        "gemma3_text",
        "alternating windows; bidirectional in EmbeddingGemma",
        f"{_BY_TYPE}; the base model alone where bidirectional, by `patch_model`",
    ),
    Family(
        "Gemma 3",
        "gemma3",
        "alternating windows; images, inside which attention goes both ways in all layers",
        f"images need their token_type_ids; {_RUNS}",
    ),
    Family(
        "Phi-3",
        "phi3",
        "sliding windows; `longrope` in the long-context models",
        "under longrope each document has the frequencies of its own length; `patch_model` only",
    ),
    Family(
        "gpt-oss",
        "gpt_oss",
        "attention sinks, experts, alternating windows",
        f"{_BY_TYPE}; sinks in decoding too",
    ),
    Family("OLMo 2", "olmo2"),
    Family("OLMo 3", "olmo3", "alternating windows", _BY_TYPE),
    Family("SmolLM3", "smollm3", "layers without RoPE"),
    Family("Granite", "granite", "a scale of its own"),
    Family("GLM-4", "glm4"),
    Family("GLM", "glm"),
    Family("Cohere2", "cohere2", "alternating windows; layers without RoPE", _BY_TYPE),
    Family(
        "DeepSeek-V3",
        "deepseek_v3",
        "experts; value head_dim differs from query/key head_dim",
        "values are padded with zeros to the head_dim of the keys",
    ),
    Family(
        "Qwen2-VL", "qwen2_vl", _VISION, _VISION_NEEDS, by_name_alone=False, task="ImageTextToText"
    ),
    Family(
        "Qwen2.5-VL",
        "qwen2_5_vl",
        f"{_VISION}, with windows inside an image",
        _VISION_NEEDS,
        by_name_alone=False,
        task="ImageTextToText",
    ),
    Family(
        "Qwen3-VL", "qwen3_vl", _VISION, _VISION_NEEDS, by_name_alone=False, task="ImageTextToText"
    ),
    Family("Qwen3.5, text", "qwen3_5_text", _DELTA, _RECURRENT, by_name_alone=False),
    Family(
        "Qwen3.5",
        "qwen3_5",
        f"{_DELTA}; {_VISION}",
        f"{_RECURRENT}; {_VISION_NEEDS}",
        by_name_alone=False,
        task="ImageTextToText",
    ),
    Family(
        "Qwen3.5-MoE, text",
        "qwen3_5_moe_text",
        f"{_DELTA}; experts",
        f"{_RECURRENT}; {_MOE}",
        by_name_alone=False,
    ),
    Family(
        "Qwen3.5-MoE",
        "qwen3_5_moe",
        f"{_DELTA}; experts; {_VISION}",
        f"{_RECURRENT}; {_MOE}; {_VISION_NEEDS}",
        by_name_alone=False,
        task="ImageTextToText",
    ),
    Family(
        "Qwen3-Next",
        "qwen3_next",
        f"{_DELTA}; experts",
        f"{_RECURRENT}; {_MOE}",
        by_name_alone=False,
    ),
    Family("OLMo Hybrid", "olmo_hybrid", _DELTA, _RECURRENT, by_name_alone=False),
    Family(
        "Kimi Linear",
        "kimi_linear",
        "delta rule with a decay for each channel, and short convolution; experts; value head_dim "
        "differs from query/key head_dim",
        f"{_RECURRENT}; {_MOE}",
        by_name_alone=False,
    ),
    Family(
        "Granite 4",
        "granitemoehybrid",
        f"{_MAMBA}; experts",
        f"{_RECURRENT}; {_MOE}",
        by_name_alone=False,
    ),
    Family("Bamba", "bamba", _MAMBA, _RECURRENT, by_name_alone=False),
    Family("Nemotron-H", "nemotron_h", _MAMBA, _RECURRENT, by_name_alone=False),
    Family(
        "Falcon-H1",
        "falcon_h1",
        "Mamba-2 and attention side by side in each layer",
        _RECURRENT,
        by_name_alone=False,
    ),
    Family("LFM2", "lfm2", "short convolutions", _RECURRENT, by_name_alone=False),
    Family(
        "LFM2-MoE",
        "lfm2_moe",
        "short convolutions; experts",
        f"{_RECURRENT}; {_MOE}",
        by_name_alone=False,
    ),
    Family("Mamba-2", "mamba2", f"{_MAMBA} alone", _RECURRENT, by_name_alone=False),
    Family(
        "BERT",
        "bert",
        _ENCODER,
        _OWN_LABELS,
        by_name_alone=False,  # positions are embedded before any layer sees the documents
        task="MaskedLM",
    ),
    Family(
        "RoBERTa",
        "roberta",
        _ENCODER,
        f"{_OWN_LABELS}; positions begin at padding_idx + 1: rows given from 0 on are shifted",
        by_name_alone=False,
        task="MaskedLM",
    ),
    Family(
        "ModernBERT",
        "modernbert",
        f"{_ENCODER}; alternating windows",
        _OWN_LABELS,
        by_name_alone=False,  # its layers keep position_ids to themselves
        task="MaskedLM",
    ),
    *(
        Family(name, kind, _TEXT_AND_TOWER, by_name_alone=False, task="ImageTextToText")
        for name, kind in (("Mistral 3, Pixtral", "mistral3"), ("LFM2-VL", "lfm2_vl"))
    ),
    *(
        Family(name, kind, _TEXT_AND_TOWER, task="ImageTextToText")
        for name, kind in (
            ("LLaVA-NeXT", "llava_next"),
            ("InternVL", "internvl"),
            ("SmolVLM", "smolvlm"),
        )
    ),
    Family(
        "Ministral 3",
        "ministral3",
        f"{_SCALED}; sliding windows",
        _POSITION,
        by_name_alone=False,  # in transformers 5.17 its layers keep position_ids to themselves
    ),
    Family(
        "Mistral 4, text",
        "mistral4",
        f"{_SCALED}; experts; value head_dim may differ from query/key head_dim",
        f"{_POSITION}; {_MOE}",
        by_name_alone=False,  # as Ministral 3
        task="ImageTextToText",  # the list in which transformers has its ForCausalLM
    ),
    Family("GLM-4.5, GLM-4.6", "glm4_moe", "experts", _MOE),
    Family(
        "Qwen3-VL-MoE",
        "qwen3_vl_moe",
        f"{_VISION}; experts",
        f"{_VISION_NEEDS}; {_MOE}",
        by_name_alone=False,
        task="ImageTextToText",
    ),
    Family("EXAONE 4", "exaone4", "alternating windows; layers without RoPE", _BY_TYPE),
    Family("ERNIE 4.5", "ernie4_5"),
    Family(
        "Hunyuan, dense",
        "hunyuan_v1_dense",
        "RoPE of type `dynamic` with a fixed `alpha` in the published models",
        "`dynamic` without `alpha` is refused",
    ),
    Family(
        "Seed-OSS",
        "seed_oss",
        "attention dropout of 0.1 in the published config",
        "`attention_dropout` must be 0 in training",
    ),
    Family("OLMoE", "olmoe", "experts", _MOE),
    Family("Granite MoE", "granitemoe", "a scale of its own; experts", _MOE),
    Family("MiniMax-M2", "minimax_m2", "experts", _MOE),
    Family(
        "DeepSeek-V2",
        "deepseek_v2",
        "experts; value head_dim differs from query/key head_dim",
        "values are padded with zeros to the head_dim of the keys",
    ),
    Family("StarCoder2", "starcoder2", "sliding windows"),
    Family("Apertus", "apertus"),
    Family("Arcee", "arcee"),
    Family(
        "Gemma 4, text",
        "gemma4_text",
        "head_dim and KV heads by layer type; alternating windows; layers with shared keys",
        f"{_BY_TYPE}; all tokens run through all layers, also where few logits are kept; "
        "reentrant checkpoints and bidirectional text are refused",
        by_name_alone=False,  # layers with shared keys may get only the last tokens as queries
    ),
    Family(
        "Gemma 4",
        "gemma4",
        "as Gemma 4, text; experts in some configs; images, inside which attention goes both ways "
        'in sliding layers where use_bidirectional_attention is "vision"',
        f"images then need their mm_token_type_ids; in those layers {_RUNS}; sound is refused",
        by_name_alone=False,
    ),
)

BY_TYPE: dict[str, Family] = {family.model_type: family for family in FAMILIES}

TEXT_AND_TOWER = tuple(x.model_type for x in FAMILIES if x.has == _TEXT_AND_TOWER)
"""Families whose images replace tokens before the text model, and change nothing else of it."""

_VISION_TOWERS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
TEXT_TOWERS = {f"{name}_text": BY_TYPE[name] for name in _VISION_TOWERS}
