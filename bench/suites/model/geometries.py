"""Geometries of published models, models of them with random weights, and documents' lengths."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)

from flexvarlen.bench.suites import FrozenCase
from flexvarlen.bench.suites.contract.tiny_configs import tiny_config
from flexvarlen.bench.suites.training.texts import full_rows
from flexvarlen.verify.corpus import VOCABULARY, read_documents, tokenize
from flexvarlen.verify.models import GEOMETRIES as PUBLISHED

Geometry = Callable[[int | None], PretrainedConfig]


def _geometry(family: str, shape: dict[str, Any]) -> Geometry:
    def config(layers: int | None) -> PretrainedConfig:
        chosen = {} if layers is None else {"num_hidden_layers": layers}
        if "text_config" in shape:
            chosen = {"text_config": shape["text_config"] | chosen}
        found: PretrainedConfig = AutoConfig.for_model(family, **shape | chosen)
        return found

    return config


_QWEN3_4B = PUBLISHED["qwen3"]["1.7b"] | {
    "num_hidden_layers": 36,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_attention_heads": 32,
}
_QWEN3_30B_A3B = PUBLISHED["qwen3"]["1.7b"] | {
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
# A layer of attention after every three of the gated delta rule: the family's default.
_QWEN3_5_2B: dict[str, Any] = {
    "vocab_size": 248_320,
    "num_hidden_layers": 24,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    **{f"linear_num_{name}_heads": 16 for name in ("key", "value")},
    **{f"linear_{name}_head_dim": 128 for name in ("key", "value")},
}
_QWEN3_VL_2B: dict[str, Any] = {
    "text_config": PUBLISHED["qwen3"]["1.7b"]
    | {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5_000_000.0,
            "mrope_section": [24, 20, 20],
            "mrope_interleaved": True,
        },
    },
    "vision_config": {
        "depth": 24,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "out_hidden_size": 2048,
        "deepstack_visual_indexes": [5, 11, 17],
    },
    "tie_word_embeddings": True,
}
_TINY = {name: PUBLISHED[name]["tiny"] | {"initializer_range": 0.02} for name in PUBLISHED}
_TINY_HYBRID = _TINY["qwen3_5_text"] | dict.fromkeys(
    ("head_dim", "linear_key_head_dim", "linear_value_head_dim"), 64
)
_TINY_EXPERTS = _TINY["qwen3"] | {"num_experts": 8, "moe_intermediate_size": 32}
_TINY_ENCODER: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    **{f"{name}_token_id": i for i, name in enumerate(("pad", "bos", "eos", "cls", "sep"))},
}

GEOMETRIES: dict[str, Geometry] = {
    "qwen3-0.6b": _geometry("qwen3", PUBLISHED["qwen3"]["0.6b"]),
    "qwen3-1.7b": _geometry("qwen3", PUBLISHED["qwen3"]["1.7b"]),
    "qwen3-4b": _geometry("qwen3", _QWEN3_4B),
    "llama-3.2-1b": _geometry("llama", PUBLISHED["llama"]["1b"]),
    "llama-3.1-8b": _geometry("llama", PUBLISHED["llama"]["8b"]),
    "modernbert-base": _geometry("modernbert", {}),
    "qwen3.5-2b": _geometry("qwen3_5_text", _QWEN3_5_2B),
    "qwen3-30b-a3b": _geometry("qwen3_moe", _QWEN3_30B_A3B),
    "qwen3-vl-2b": _geometry("qwen3_vl", _QWEN3_VL_2B),
    "qwen3-vl-tiny": lambda layers: tiny_config("qwen3_vl", num_hidden_layers=layers or 2),
    "qwen3-tiny": _geometry("qwen3", _TINY["qwen3"]),
    "llama-tiny": _geometry("llama", _TINY["llama"]),
    "modernbert-tiny": _geometry("modernbert", _TINY_ENCODER),
    "qwen3.5-tiny": _geometry("qwen3_5_text", _TINY_HYBRID),
    "qwen3-moe-tiny": _geometry("qwen3_moe", _TINY_EXPERTS),
}
"""Configurations of published models, and tiny ones for a CPU; each takes a number of layers, None
for the model's own."""

GEOMETRY_TITLES = {
    "qwen3-0.6b": "Qwen3-0.6B",
    "qwen3-1.7b": "Qwen3-1.7B",
    "qwen3-4b": "Qwen3-4B",
    "llama-3.2-1b": "Llama-3.2-1B",
    "llama-3.1-8b": "Llama-3.1-8B",
    "modernbert-base": "ModernBERT-base",
    "qwen3.5-2b": "Qwen3.5-like, 2B",
    "qwen3-30b-a3b": "Qwen3-30B-A3B",
    "qwen3-vl-2b": "Qwen3-VL-2B",
}
"""Titles for headings; tiny models use their own names."""


def is_hybrid(geometry: str) -> bool:
    return geometry.startswith("qwen3.5")


@dataclass(frozen=True)
class GeometryCase(FrozenCase):
    """A case of a model with random weights.

    Attributes:
        geometry: of `GEOMETRIES`.
        layers: how many of them the model has here; None: all of its own.
        dtype: of weights and activations; of the optimizer's state too.
        seed: of all that is random.
    """

    geometry: str
    layers: int | None
    dtype: str = field(default="bfloat16", kw_only=True)
    seed: int = field(default=0, kw_only=True)

    @property
    def torch_dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    @property
    def vocab_size(self) -> int:
        found: int = GEOMETRIES[self.geometry](self.layers).get_text_config().vocab_size
        return found

    def new_base_model(self, device: torch.device) -> PreTrainedModel:
        """In train mode, always with the same weights; seeds what is drawn after it too."""
        return self.new_model(AutoModel, device)

    def new_causal_lm(self, device: torch.device) -> PreTrainedModel:
        """The same model with an LM head."""
        return self.new_model(AutoModelForCausalLM, device)

    def new_model(self, maker: Any, device: torch.device, **changes: Any) -> PreTrainedModel:
        """The same model of a transformers class, with these fields of the config changed."""
        torch.manual_seed(self.seed)
        config, options = GEOMETRIES[self.geometry](self.layers), {"dtype": self.torch_dtype}
        for name, value in changes.items():
            setattr(config.get_text_config(), name, value)
        with torch.device(device):
            model = maker.from_config(config, attn_implementation="sdpa", **options)
        found: PreTrainedModel = model.to(device).train()
        return found


# --- how long documents are ----------------------------------------------------------------------

Documents = Literal["text", "uniform", "log-normal"]
LONGEST_SHARE = 8
"""A text longer than an eighth of the row is cut there, so that a row has at least 8 documents."""


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


def drawn_lengths(tokens: int, documents: Documents, mean: int, seed: int) -> list[int]:
    """Lengths of a row's documents that are no texts; the last one is cut to fit.

    >>> drawn_lengths(8192, "uniform", 2048, 0)
    [2048, 2048, 2048, 2048]
    """
    if documents == "log-normal":
        return log_normal_lengths(tokens, mean, 1.0, seed)
    count = max(1, round(tokens / mean))
    return [tokens * (i + 1) // count - tokens * i // count for i in range(count)]


def text_lengths(
    tokens: int, seed: int, files: Sequence[Path] | None, longest: int | None = None
) -> list[int]:
    """Lengths of a collection's texts in random order, repeated until they fill the row.

    In tokens of a byte-level BPE of 1,024 tokens that is trained on them: a model's own tokenizer
    would find fewer tokens in each.

    Args:
        tokens: of the row; the last document is cut to fit.
        files: as `flexvarlen.verify.corpus.read_documents` takes them; None: Python's topics.
        longest: tokens at which a document is cut; None: an eighth of the row.

    Raises:
        ValueError: no text in the files.
    """
    longest = longest or max(1, tokens // LONGEST_SHARE)
    texts = tokenize(read_documents(files or ()), vocabulary=VOCABULARY)
    (row,) = full_rows([ids[:longest] for ids in texts if ids], tokens, 1, seed)
    return [len(ids) for ids in row]


def source_of(files: Sequence[Path] | None) -> str:
    """The texts that a run's lengths come from, for its records."""
    if files is None:
        return "Python's help topics"
    return ", ".join(Path(file).name for file in files)
