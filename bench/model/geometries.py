"""What the model benchmark measures: `Case`, model geometries, documents."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

Geometry = Callable[[int | None], PretrainedConfig]


@dataclass(frozen=True)
class Case:
    """One variant of one model on one packed row; forward and backward of the base model."""

    variant: str
    geometry: str
    layers: int
    tokens: int
    mean_doc: int
    sigma: float
    seed: int
    dtype: str
    compiler: str
    passes: str = "forward+backward"

    def data(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, data: dict[str, Any]) -> Case:
        """The case of a row."""
        return cls(**{field.name: data[field.name] for field in fields(cls)})


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int) -> Geometry:
    """A dense Qwen3 with tied embeddings; all have 8 KV heads of 128."""

    def config(chosen: int | None) -> PretrainedConfig:
        return Qwen3Config(
            vocab_size=151_936,
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_hidden_layers=chosen or layers,
            num_attention_heads=heads,
            num_key_value_heads=8,
            head_dim=128,
            max_position_embeddings=40_960,
            rms_norm_eps=1e-6,
            rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
            tie_word_embeddings=True,
        )

    return config


def _llama3(
    hidden: int, intermediate: int, layers: int, head_dim: int, factor: float, tied: bool
) -> Geometry:
    """A Llama 3.1 or 3.2; all have 32 query and 8 KV heads. `factor`: of their RoPE scaling."""

    def config(chosen: int | None) -> PretrainedConfig:
        return LlamaConfig(
            vocab_size=128_256,
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_hidden_layers=chosen or layers,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=head_dim,
            max_position_embeddings=131_072,
            rms_norm_eps=1e-5,
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 500_000.0,
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            tie_word_embeddings=tied,
        )

    return config


def _tiny(config_class: type[PretrainedConfig]) -> Geometry:
    """Small enough for a CPU test."""

    def config(chosen: int | None) -> PretrainedConfig:
        return config_class(
            vocab_size=128,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=chosen or 2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=4096,
        )

    return config


GEOMETRIES: dict[str, Geometry] = {
    "qwen3-0.6b": _qwen3(hidden=1024, intermediate=3072, layers=28, heads=16),
    "qwen3-1.7b": _qwen3(hidden=2048, intermediate=6144, layers=28, heads=16),
    "qwen3-4b": _qwen3(hidden=2560, intermediate=9728, layers=36, heads=32),
    "llama-3.2-1b": _llama3(2048, 8192, layers=16, head_dim=64, factor=32.0, tied=True),
    "llama-3.1-8b": _llama3(4096, 14_336, layers=32, head_dim=128, factor=8.0, tied=False),
    "qwen3-tiny": _tiny(Qwen3Config),
    "llama-tiny": _tiny(LlamaConfig),
}
"""The numbers of the models' public configs; each takes a number of layers, None for its own."""

GEOMETRY_TITLES = {
    "qwen3-0.6b": "Qwen3-0.6B",
    "qwen3-1.7b": "Qwen3-1.7B",
    "qwen3-4b": "Qwen3-4B",
    "llama-3.2-1b": "Llama-3.2-1B",
    "llama-3.1-8b": "Llama-3.1-8B",
}
"""For headings; the tiny ones go by their own names."""


def new_causal_lm(
    geometry: str, layers: int | None, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    """A model with its LM head and random weights; `layers`: None for the model's own number."""
    with torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            GEOMETRIES[geometry](layers), dtype=dtype, attn_implementation="sdpa"
        )
    model.to(device)
    return model


def new_base_model(
    geometry: str, layers: int | None, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    """A base model of a geometry with random weights; `layers`: None for the model's own number."""
    with torch.device(device):
        config = GEOMETRIES[geometry](layers)
        model: PreTrainedModel = AutoModel.from_config(
            config, dtype=dtype, attn_implementation="sdpa"
        )
    model.to(device)
    return model


def log_normal_lengths(total_tokens: int, mean: float, sigma: float, seed: int) -> list[int]:
    """Document lengths of one packed row, log-normal with this mean; the last one is cut to fit.

    >>> sum(log_normal_lengths(1000, 50, 1.0, seed=0))
    1000
    """
    generator = torch.Generator().manual_seed(seed)
    mu = math.log(mean) - sigma**2 / 2
    lengths: list[int] = []
    left = total_tokens
    while left > 0:
        draw = torch.randn((), generator=generator, dtype=torch.float64).item()
        length = min(left, max(1, round(math.exp(mu + sigma * draw))))
        lengths.append(length)
        left -= length
    return lengths
