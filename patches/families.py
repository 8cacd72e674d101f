"""The families of models that are verified, and what each needs here.

Verified: a packed batch gives what its documents give one by one, in outputs and gradients, on
every backend that can serve the layers (tests/test_families.py; `python -m bench.families` makes
the matrix).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from flexvarlen.patches.stateful import refuse_stateful

_TINY: dict[str, Any] = {
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


@dataclass(frozen=True)
class Family:
    """Models of one architecture.

    Attributes:
        name: as people call it.
        model_type: transformers' name, `config.model_type`.
        has: what its layers have beside causal attention with grouped queries.
        needs: what is done for it, or must be known of it; empty if nothing.
        by_name_alone: whether documents reach its layers without `patch_model`.
        tiny: of a config of two layers that has all of this.
    """

    name: str
    model_type: str
    has: str = ""
    needs: str = ""
    by_name_alone: bool = True
    tiny: dict[str, Any] = field(default_factory=dict, hash=False)

    def tiny_config(self, *, head_dim: int = 16, **changes: Any) -> Any:
        """A config of this architecture for tests, with a thousand times fewer parameters."""
        from transformers import AutoConfig

        sizes: dict[str, Any] = {**_TINY, **self.tiny}
        if "kv_lora_rank" in sizes:
            rope = {"qk_rope_head_dim": head_dim // 2, "qk_nope_head_dim": head_dim}
            sizes |= {**rope, "v_head_dim": head_dim}
        elif "head_dim" in sizes:
            sizes["head_dim"] = head_dim
        else:
            sizes["hidden_size"] = sizes["num_attention_heads"] * head_dim
        rope_parameters = sizes.get("rope_parameters", {})
        if "long_factor" in rope_parameters:
            factors: list[float] = [float(n) for n in range(1, head_dim // 2 + 1)]
            short = {"short_factor": [1.0] * len(factors), "long_factor": factors}
            sizes["rope_parameters"] = {**rope_parameters, **short}
        return AutoConfig.for_model(self.model_type, **{**sizes, **changes})


_HEAD_16 = {"hidden_size": 48, "head_dim": 16}
_MOE = "experts see tokens one by one: no leak; an auxiliary loss sums over the batch by design"
_BY_TYPE = "layers of two types, routed apart"

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
        "alternating windows",
        _BY_TYPE,
        tiny={**_HEAD_16, **_ALTERNATING, "query_pre_attn_scalar": 16},
    ),
    Family(
        "Phi-3",
        "phi3",
        "sliding windows; `longrope` in the long-context models",
        "under longrope each document has the frequencies of its own length (`patch_model` only)",
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
)

BY_TYPE: dict[str, Family] = {family.model_type: family for family in FAMILIES}


def require_verified(model_type: str) -> None:
    """Refuse a model whose packed outputs nobody has checked.

    Raises:
        NotImplementedError: the model type is not verified. It is known to keep state over the row,
            or it may, or draw a mask of its own, which documents would leak through.
    """
    refuse_stateful(model_type)
    if model_type not in BY_TYPE:
        raise NotImplementedError(
            f"model_type must be one of the verified {', '.join(BY_TYPE)}, got {model_type!r}; "
            "packed documents could leak into one another there: use the model's own attention, "
            "one document a row."
        )


def require_verified_alone(model_type: str) -> None:
    """Refuse a model that attends by a plugin name alone, where documents could not be seen.

    Raises:
        NotImplementedError: it is not verified, or its layers are not told the documents.
    """
    require_verified(model_type)
    if not BY_TYPE[model_type].by_name_alone:
        raise NotImplementedError(
            f"a {model_type} model does not tell its attention layers the position_ids, so "
            "documents could leak into one another; call flexvarlen.patch_model on the model."
        )
