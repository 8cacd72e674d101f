"""The sizes of tiny configs, as data: what all share, and what each verified family needs."""

from __future__ import annotations

from typing import Any

COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 96,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    # 6 query heads on 2: a number of heads that is no power of two has its own bugs.
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    # Else attention is all but uniform, and a leak moves little.
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ALTERNATING = {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}
_HEAD_16 = {"hidden_size": 48, "head_dim": 16}
_MROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}
_BY_POSITION = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 64.0,
    "original_max_position_embeddings": 8,  # 16,384 in the published models
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.5,
}
_ROUTED_EXPERTS = {
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
_LATENT = {"num_key_value_heads": 6, "q_lora_rank": 16, "kv_lora_rank": 16, **_ROUTED_EXPERTS}
_PATCHES = {
    "depth": 2,
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
_QWEN3_VL_TEXT = {
    **_HEAD_16,
    "hidden_size": 96,
    "rope_parameters": {**_MROPE, "mrope_interleaved": True},
}
_QWEN3_VL_IMAGES = {
    "vision_config": {
        **_PATCHES,
        "hidden_size": 32,
        "intermediate_size": 48,
        "out_hidden_size": 96,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
    },
    **_IMAGE_TOKENS,
}
_TOWER = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "patch_size": 4,
}
_BERT = {"num_key_value_heads": 6, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_LINEAR_THEN_FULL = {
    "layer_types": ["linear_attention", "full_attention"],
    # What is read from the state is normed: 1e-6 would magnify the rounding error of small values.
    "rms_norm_eps": 1e-2,
}
_GATED_DELTA = {
    **_HEAD_16,
    **_LINEAR_THEN_FULL,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_QWEN_EXPERTS = {**_EXPERTS, "shared_expert_intermediate_size": 32}
_MAMBA = {
    "mamba_n_heads": 6,
    "mamba_d_head": "auto",
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_chunk_size": 16,
}

TINY: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("llama", "qwen2", "qwen3", "gemma", "glm", "glm4", "arcee"), _HEAD_16),
    **dict.fromkeys(("ernie4_5", "hunyuan_v1_dense"), _HEAD_16),
    "llama4_text": {
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
    "qwen2_moe": {
        **_QWEN_EXPERTS,
        "decoder_sparse_step": 1,
        "use_sliding_window": True,
        "sliding_window": 9,
    },
    "qwen3_moe": {**_HEAD_16, **_EXPERTS},
    "mistral": {**_HEAD_16, "sliding_window": 9},
    "mixtral": {**_HEAD_16, **_LOCAL_EXPERTS, "sliding_window": 9},
    "gemma2": {**_HEAD_16, **_ALTERNATING, "query_pre_attn_scalar": 16},
    "gemma3_text": {**_HEAD_16, **_ALTERNATING, "query_pre_attn_scalar": 16},
    "gemma3": {
        "text_config": {**_HEAD_16, **_ALTERNATING, "query_pre_attn_scalar": 16},
        "vision_config": {**_TOWER, "model_type": "siglip_vision_model", "image_size": 8},
        "mm_tokens_per_image": 4,
        "image_token_index": 90,
    },
    "phi3": {
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
    "gpt_oss": {
        **_HEAD_16,
        **_LOCAL_EXPERTS,
        **_ALTERNATING,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    },
    "olmo3": _ALTERNATING,
    "smollm3": {**_HEAD_16, "no_rope_layers": [1, 0]},
    "cohere2": {**_HEAD_16, **_ALTERNATING},
    "deepseek_v3": _LATENT,
    "qwen2_vl": {
        "text_config": {"rope_parameters": _MROPE},
        "vision_config": {**_PATCHES, "embed_dim": 32, "hidden_size": 96, "mlp_ratio": 2},
        **_IMAGE_TOKENS,
    },
    "qwen2_5_vl": {
        "text_config": {"rope_parameters": _MROPE},
        "vision_config": {
            **_PATCHES,
            "hidden_size": 32,
            "intermediate_size": 48,
            "window_size": 16,
            "fullatt_block_indexes": [1],
            "out_hidden_size": 96,
        },
        **_IMAGE_TOKENS,
    },
    "qwen3_vl": {"text_config": _QWEN3_VL_TEXT, **_QWEN3_VL_IMAGES},
    "qwen3_5_text": _GATED_DELTA,
    "qwen3_5": {"text_config": {**_GATED_DELTA, **_QWEN3_VL_TEXT}, **_QWEN3_VL_IMAGES},
    "qwen3_5_moe": {
        "text_config": {**_GATED_DELTA, **_QWEN3_VL_TEXT, **_QWEN_EXPERTS},
        **_QWEN3_VL_IMAGES,
    },
    "qwen3_5_moe_text": {**_GATED_DELTA, **_QWEN_EXPERTS},
    "qwen3_next": {**_GATED_DELTA, **_QWEN_EXPERTS},
    "olmo_hybrid": {**_GATED_DELTA, "linear_num_value_heads": 2, "linear_value_head_dim": 32},
    "kimi_linear": {
        **_LINEAR_THEN_FULL,
        "num_key_value_heads": 6,
        "kv_lora_rank": 16,
        "linear_head_dim": 16,
        "linear_num_heads": 2,
        "num_experts": 4,
        "num_experts_per_token": 2,
        "moe_intermediate_size": 32,
        "mlp_layer_types": ["dense", "sparse"],
    },
    "granitemoehybrid": {**_LINEAR_THEN_FULL, **_MAMBA, **_LOCAL_EXPERTS},
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "mlp", "full_attention"],
        "head_dim": 16,
        "ssm_state_size": 16,
        "mamba_num_heads": 6,
        "mamba_head_dim": 32,
        "n_groups": 2,
        "chunk_size": 16,
    },
    "falcon_h1": {**_HEAD_16, **_MAMBA, "mamba_d_ssm": 96},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {**_EXPERTS, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 12, "state_size": 16, "n_groups": 2, "chunk_size": 16},
    "bert": _BERT,
    "roberta": {**_BERT, "pad_token_id": 1, "bos_token_id": 0},
    "modernbert": {
        "num_key_value_heads": 6,
        "global_attn_every_n_layers": 2,
        "local_attention": 16,
        "cls_token_id": 1,
        "sep_token_id": 2,
    },
    "ministral3": {**_HEAD_16, "sliding_window": 9, "rope_parameters": _BY_POSITION},
    "mistral3": {
        "text_config": {**_HEAD_16, "model_type": "ministral3", "rope_parameters": _BY_POSITION},
        "vision_config": {**_TOWER, "head_dim": 8, "image_size": 16},
        "image_token_index": 90,
        "tie_word_embeddings": False,
    },
    "llava_next": {
        "text_config": {**_HEAD_16, "model_type": "mistral", "sliding_window": 9},
        "vision_config": {
            **_TOWER,
            "model_type": "clip_vision_model",
            "image_size": 8,
            "projection_dim": 16,
            "num_hidden_layers": 2,
        },
        "image_token_index": 90,
        "image_grid_pinpoints": [[8, 8], [8, 16], [16, 8], [16, 16]],
    },
    "internvl": {
        "text_config": {**_HEAD_16, "model_type": "qwen2"},
        "vision_config": {**_TOWER, "image_size": 16, "layer_scale_init_value": 1.0},
        "image_token_id": 90,
        "tie_word_embeddings": False,
    },
    "smolvlm": {
        "text_config": {**_HEAD_16, "model_type": "llama"},
        "vision_config": {**_TOWER, "image_size": 16},
        "image_token_id": 90,
    },
    "lfm2_vl": {
        "text_config": {"model_type": "lfm2", "layer_types": ["conv", "full_attention"]},
        "vision_config": {
            **_TOWER,
            "model_type": "siglip2_vision_model",
            "num_patches": 16,
            "vision_use_head": False,
        },
        "image_token_id": 90,
        "projector_hidden_size": 24,
        "tie_word_embeddings": False,
    },
    "mistral4": {**_LATENT, "rope_parameters": _BY_POSITION},
    "glm4_moe": {**_HEAD_16, **_ROUTED_EXPERTS},
    "qwen3_vl_moe": {"text_config": {**_QWEN3_VL_TEXT, **_EXPERTS}, **_QWEN3_VL_IMAGES},
    "exaone4": _ALTERNATING,
    "seed_oss": {**_HEAD_16, "attention_dropout": 0.0, "residual_dropout": 0.0},
    "olmoe": _EXPERTS,
    "granitemoe": _LOCAL_EXPERTS,
    "minimax_m2": {**_HEAD_16, **_LOCAL_EXPERTS},
    "deepseek_v2": {**_LATENT, "n_group": None, "topk_group": None},
    "starcoder2": {"sliding_window": 9},
    "gemma4_text": {
        **_HEAD_16,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 9,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": 97,
    },
    "gemma4": {
        "text_config": {
            **_HEAD_16,
            **_ALTERNATING,
            "attention_k_eq_v": True,
            "use_bidirectional_attention": "vision",
            "num_global_key_value_heads": 3,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        },
        "vision_config": {
            **_TOWER,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "position_embedding_size": 16,
            "pooling_kernel_size": 2,
        },
        # Not among the tokens of the tests' texts: the model would replace them.
        "image_token_id": 2,
        "video_token_id": 2,
        "audio_token_id": 2,
    },
}
"""By model type, config fields with which two layers cover all kinds of its family."""
