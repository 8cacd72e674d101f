"""What the model benchmark measures: `Case`, model geometries, documents."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from transformers import (
    AutoModel,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)


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


def qwen3_1_7b(layers: int | None) -> PretrainedConfig:
    """The geometry of Qwen3-1.7B: 28 layers, 16 query heads and 8 KV heads of 128."""
    return Qwen3Config(
        vocab_size=151_936,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=layers or 28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40_960,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        tie_word_embeddings=True,
    )


def llama_3_2_1b(layers: int | None) -> PretrainedConfig:
    """The geometry of Llama-3.2-1B: 16 layers, 32 query heads and 8 KV heads of 64."""
    return LlamaConfig(
        vocab_size=128_256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=layers or 16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=131_072,
        rms_norm_eps=1e-5,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        tie_word_embeddings=True,
    )


def tiny_qwen3(layers: int | None) -> PretrainedConfig:
    """Qwen3 small enough for a CPU test."""
    return Qwen3Config(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers or 2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=4096,
    )


GEOMETRIES = {
    "qwen3-1.7b": qwen3_1_7b,
    "llama-3.2-1b": llama_3_2_1b,
    "qwen3-tiny": tiny_qwen3,
}


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
