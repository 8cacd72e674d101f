"""The families of models that are verified, and what each needs here.

Verified: a packed batch gives what its documents give one by one, in outputs and gradients, on
every backend that can serve the layers (tests/test_families.py, test_encoders.py and
test_vision_families.py; `python -m flexvarlen.bench.contract.families` makes the matrix).
"""

from __future__ import annotations

from flexvarlen.patches.models.family import Family
from flexvarlen.patches.models.image_masks import refuse_prefixes
from flexvarlen.patches.models.recurrent import refuse_stateful

_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ALTERNATING = {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}
_HEAD_16 = {"hidden_size": 48, "head_dim": 16}
_MOE = "experts see tokens one by one: no leak; an auxiliary loss sums over the batch by design"
_BY_TYPE = "layers of two types, routed apart"
_VISION = "rotary positions in time, height and width; a vision tower"
_VISION_NEEDS = (
    "borders come from the text's own positions or explicitly; each frame of an image is a "
    "document of the vision tower"
)
_MROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}
_PATCHES = {
    "num_heads": 2,
    "patch_size": 4,
    "in_channels": 3,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "initializer_range": 0.2,
}
_IMAGE_TOKENS = {
    "image_token_id": 90,
    "video_token_id": 91,
    "vision_start_token_id": 92,
    "vision_end_token_id": 93,
}
_ENCODER = "bidirectional attention"
_OWN_LABELS = (
    "no label is masked; no pooler_output where a row may hold several documents; heads of tokens"
)
_BERT = {
    "num_key_value_heads": 6,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}

FAMILIES: tuple[Family, ...] = (
    Family("Llama 1, 2, 3", "llama", tiny=_HEAD_16),
    Family(
        "Llama 4, text",
        "llama4_text",
        "chunked layers; layers without RoPE scale queries by position",
        "chunks and positions count inside a document",
        by_name_alone=False,  # its layers keep position_ids to themselves
        tiny={
            **_HEAD_16,
            **_LOCAL_EXPERTS,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 64,
            "attention_chunk_size": 16,
            "no_rope_layers": [1, 0],
            "layer_types": ["chunked_attention", "full_attention"],
            "floor_scale": 8,  # 8192 in the published models
            "attn_scale": 0.5,
        },
    ),
    Family("Qwen2, Qwen2.5", "qwen2", "sliding windows in some configs", tiny=_HEAD_16),
    Family(
        "Qwen2-MoE",
        "qwen2_moe",
        "experts",
        _MOE,
        tiny={**_EXPERTS, "shared_expert_intermediate_size": 32, "decoder_sparse_step": 1},
    ),
    Family("Qwen3", "qwen3", "sliding windows in some configs", tiny=_HEAD_16),
    Family("Qwen3-MoE", "qwen3_moe", "experts", _MOE, tiny={**_HEAD_16, **_EXPERTS}),
    Family("Mistral", "mistral", "sliding windows", tiny={**_HEAD_16, "sliding_window": 9}),
    Family(
        "Mixtral",
        "mixtral",
        "experts, sliding windows",
        _MOE,
        tiny={**_HEAD_16, **_LOCAL_EXPERTS, "sliding_window": 9},
    ),
    Family("Gemma", "gemma", tiny=_HEAD_16),
    Family(
        "Gemma 2",
        "gemma2",
        "softcap, alternating windows",
        f"{_BY_TYPE}; softcap in decoding too, where transformers' sdpa drops it",
        tiny={**_HEAD_16, **_ALTERNATING, "query_pre_attn_scalar": 16},
    ),
    Family(
        "Gemma 3, text",
        "gemma3_text",
        "alternating windows; bidirectional in EmbeddingGemma",
        f"{_BY_TYPE}; the base model alone where bidirectional, by `patch_model`",
        tiny={**_HEAD_16, **_ALTERNATING, "query_pre_attn_scalar": 16},
    ),
    Family(
        "Gemma 3",
        "gemma3",
        "alternating windows; images, inside which attention goes both ways",
        "text alone: batches with images or token_type_ids are refused",
        tiny={
            "text_config": {**_HEAD_16, **_ALTERNATING, "query_pre_attn_scalar": 16},
            "vision_config": {
                "model_type": "siglip_vision_model",
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 8,
                "patch_size": 4,
            },
            "mm_tokens_per_image": 4,
            "image_token_index": 90,
        },
    ),
    Family(
        "Phi-3",
        "phi3",
        "sliding windows; `longrope` in the long-context models",
        "under longrope each document has the frequencies of its own length (and of the padding on "
        "its left, where rows hold one document each); `patch_model` only",
        tiny={
            "sliding_window": 9,
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10_000.0,
                "short_factor": [],  # as many as head_dim asks for
                "long_factor": [],
                "original_max_position_embeddings": 64,
            },
        },
    ),
    Family(
        "gpt-oss",
        "gpt_oss",
        "attention sinks, experts, alternating windows",
        f"{_BY_TYPE}; sinks in decoding too",
        tiny={
            **_HEAD_16,
            **_LOCAL_EXPERTS,
            **_ALTERNATING,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    ),
    Family("OLMo 2", "olmo2"),
    Family("OLMo 3", "olmo3", "alternating windows", _BY_TYPE, tiny=_ALTERNATING),
    Family(
        "SmolLM3", "smollm3", "layers without RoPE", tiny={**_HEAD_16, "no_rope_layers": [1, 0]}
    ),
    Family("Granite", "granite", "a scale of its own"),
    Family("GLM-4", "glm4", tiny=_HEAD_16),
    Family("GLM", "glm", tiny=_HEAD_16),
    Family(
        "Cohere2",
        "cohere2",
        "alternating windows; layers without RoPE",
        _BY_TYPE,
        tiny={**_HEAD_16, **_ALTERNATING},
    ),
    Family(
        "DeepSeek-V3",
        "deepseek_v3",
        "experts; values of another head_dim than queries and keys",
        "values are padded with zeros to the head_dim of the keys",
        tiny={
            "num_key_value_heads": 6,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
        },
    ),
    Family(
        "Qwen2-VL",
        "qwen2_vl",
        _VISION,
        _VISION_NEEDS,
        by_name_alone=False,
        task="ImageTextToText",
        tiny={
            "text_config": {"rope_parameters": _MROPE},
            "vision_config": {
                **_PATCHES,
                "depth": 2,
                "embed_dim": 32,
                "hidden_size": 96,
                "mlp_ratio": 2,
            },
            **_IMAGE_TOKENS,
        },
    ),
    Family(
        "Qwen2.5-VL",
        "qwen2_5_vl",
        f"{_VISION}, with windows inside an image",
        _VISION_NEEDS,
        by_name_alone=False,
        task="ImageTextToText",
        tiny={
            "text_config": {"rope_parameters": _MROPE},
            "vision_config": {
                **_PATCHES,
                "depth": 2,
                "hidden_size": 32,
                "intermediate_size": 48,
                "window_size": 16,
                "fullatt_block_indexes": [1],
                "out_hidden_size": 96,
            },
            **_IMAGE_TOKENS,
        },
    ),
    Family(
        "Qwen3-VL",
        "qwen3_vl",
        _VISION,
        _VISION_NEEDS,
        by_name_alone=False,
        task="ImageTextToText",
        tiny={
            "text_config": {
                **_HEAD_16,
                "hidden_size": 96,
                "rope_parameters": {**_MROPE, "mrope_interleaved": True},
            },
            "vision_config": {
                **_PATCHES,
                "depth": 2,
                "hidden_size": 32,
                "intermediate_size": 48,
                "out_hidden_size": 96,
                "num_position_embeddings": 64,
                "deepstack_visual_indexes": [0, 1],
            },
            **_IMAGE_TOKENS,
        },
    ),
    Family(
        "BERT",
        "bert",
        _ENCODER,
        _OWN_LABELS,
        by_name_alone=False,  # positions are embedded before any layer sees the documents
        task="MaskedLM",
        tiny=_BERT,
    ),
    Family(
        "RoBERTa",
        "roberta",
        _ENCODER,
        f"{_OWN_LABELS}; positions begin at padding_idx + 1: rows given from 0 on are shifted",
        by_name_alone=False,
        task="MaskedLM",
        tiny={**_BERT, "pad_token_id": 1, "bos_token_id": 0},
    ),
    Family(
        "ModernBERT",
        "modernbert",
        f"{_ENCODER}; alternating windows",
        _OWN_LABELS,
        by_name_alone=False,  # its layers keep position_ids to themselves
        task="MaskedLM",
        tiny={
            "num_key_value_heads": 6,
            "global_attn_every_n_layers": 2,
            "local_attention": 16,
            "cls_token_id": 1,
            "sep_token_id": 2,
        },
    ),
)

BY_TYPE: dict[str, Family] = {family.model_type: family for family in FAMILIES}

_TEXT_TOWERS = {f"{name}_text": BY_TYPE[name] for name in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")}
_VERIFIED = {**BY_TYPE, **_TEXT_TOWERS}


def require_verified(model_type: str) -> None:
    """Refuse a model whose packed outputs nobody has checked.

    Raises:
        NotImplementedError: the model type is not verified. It is known to keep state over the row,
            or it may, or draw a mask of its own, which documents would leak through.
    """
    refuse_stateful(model_type)
    refuse_prefixes(model_type)
    if model_type not in _VERIFIED:
        raise NotImplementedError(
            f"model_type must be one of the verified {', '.join(BY_TYPE)}, got {model_type!r}; "
            "packed documents could leak into one another there: use the model's own attention, "
            "one document a row."
        )


def require_verified_alone(model_type: str) -> None:
    """Refuse a model that attends by a plugin name alone, where documents could not be seen.

    Raises:
        NotImplementedError: it is not verified, or its positions do not come to its layers.
    """
    require_verified(model_type)
    if not _VERIFIED[model_type].by_name_alone:
        raise NotImplementedError(
            f"attn_implementation alone cannot pack for a {model_type} model, whose position_ids "
            "take effect outside its attention layers: documents could leak into one another; "
            "call flexvarlen.patch_model on the model."
        )
