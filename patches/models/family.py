"""What a verified family of models is, and its config for tests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

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


@dataclass(frozen=True)
class Family:
    """Models of one architecture.

    Attributes:
        name: as people call it.
        model_type: transformers' name, `config.model_type`.
        has: what its layers have beside causal attention with grouped queries.
        needs: what is done for it, or must be known of it; empty if nothing.
        by_name_alone: whether documents reach its layers without `patch_model`.
        task: the class that it is verified in: transformers' `AutoModelFor` and this.
        tiny: of a config of two layers that has all of this.
    """

    name: str
    model_type: str
    has: str = ""
    needs: str = ""
    by_name_alone: bool = True
    task: str = "CausalLM"
    tiny: dict[str, Any] = field(default_factory=dict, hash=False)

    def tiny_config(self, *, head_dim: int = 16, every_expert: bool = False, **changes: Any) -> Any:
        """A config of this architecture for tests, with a thousand times fewer parameters.

        Args:
            head_dim: of the layers that run over tokens.
            every_expert: a token goes to all experts. Else two that are almost equal may change
                places where a low precision rounds otherwise, and the outputs jump.
            changes: of the config of these layers.
        """
        from transformers import AutoConfig

        whole = dict(self.tiny)
        sizes: dict[str, Any] = {**_TINY, **whole.pop("text_config", self.tiny)}
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
        if "mrope_section" in rope_parameters:  # of half a head: time, height and width
            rows = head_dim // 8, 3 * head_dim // 16, 3 * head_dim // 16
            sizes["rope_parameters"] = {**rope_parameters, "mrope_section": list(rows)}
        if every_expert:
            for name in ("num_experts", "num_local_experts", "n_routed_experts"):
                if name in sizes:
                    sizes["num_experts_per_tok"] = sizes[name]
        sizes |= changes
        if "text_config" not in self.tiny:
            return AutoConfig.for_model(self.model_type, **sizes)
        return AutoConfig.for_model(self.model_type, text_config=sizes, **whole)
