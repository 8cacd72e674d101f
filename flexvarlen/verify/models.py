"""Models to compare: named geometries with random weights, or a folder or hub name.

`llama`, `qwen2` and `qwen3` at a named size (`qwen3:1.7b`), with fewer layers if asked for
(`qwen3:1.7b@14`); without a size: tiny, for the CPU. `qwen3_5_text`, a hybrid, is tiny only.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from flexvarlen.verify.corpus import DEFAULT_TOKENS, packed_text, read_documents
from flexvarlen.verify.experiment.batch import PackedBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TINY_VOCABULARY = 1024

_TINY: dict[str, Any] = {
    "vocab_size": TINY_VOCABULARY,
    "num_hidden_layers": 2,
    "max_position_embeddings": 32_768,
    # Attention of a model initialised with the usual 0.02 is nearly uniform, so that a wrong mask
    # would hardly show. With these weights scores spread over several units, as in trained models.
    "initializer_range": 0.15,
}

_QWEN: dict[str, Any] = {
    "vocab_size": 151_936,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "tie_word_embeddings": True,
}


def _llama3(rope_factor: float, *, tied: bool) -> dict[str, Any]:
    return {
        "vocab_size": 128_256,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": rope_factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": tied,
    }


def _shape(
    layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int, head_dim: int
) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }


GEOMETRIES: dict[str, dict[str, dict[str, Any]]] = {
    "llama": {
        # 6 query heads on 2: a number of heads that is not a power of two has its own bugs.
        "tiny": _shape(2, 96, 160, 6, 2, 16) | _TINY,
        "1b": _shape(16, 2048, 8192, 32, 8, 64) | _llama3(32.0, tied=True),
        "8b": _shape(32, 4096, 14_336, 32, 8, 128) | _llama3(8.0, tied=False),
    },
    "qwen2": {
        "tiny": _shape(2, 96, 160, 6, 2, 16) | _TINY,
        "0.5b": _shape(24, 896, 4864, 14, 2, 64) | _QWEN | {"max_position_embeddings": 32_768},
        "1.5b": _shape(28, 1536, 8960, 12, 2, 128) | _QWEN | {"max_position_embeddings": 131_072},
    },
    "qwen3": {
        "tiny": _shape(2, 64, 160, 4, 2, 32) | _TINY,
        "0.6b": _shape(28, 1024, 3072, 16, 8, 128) | _QWEN | {"max_position_embeddings": 40_960},
        "1.7b": _shape(28, 2048, 6144, 16, 8, 128) | _QWEN | {"max_position_embeddings": 40_960},
    },
    "qwen3_5_text": {
        # A gated delta rule in the first layer, attention in the second.
        "tiny": _shape(2, 64, 160, 4, 2, 32)
        | _TINY
        | {
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
    },
}
"""Configurations by family and size; sizes other than tiny are those of published models."""


@dataclass(frozen=True)
class ModelSpec:
    """What a name stands for: a geometry, or a checkpoint (then family and size are None)."""

    name: str
    family: str | None = None
    size: str | None = None
    layers: int | None = None

    @property
    def label(self) -> str:
        """The name in reports; for a folder its name, not its path."""
        if self.family is None:
            return Path(self.name).name if Path(self.name).is_dir() else self.name
        layers = "" if self.layers is None else f", {self.layers} layers"
        return f"{self.family} {self.size}{layers}"


def parse_model(name: str) -> ModelSpec:
    """Parse a model's name.

    >>> parse_model("qwen3:1.7b@14")
    ModelSpec(name='qwen3:1.7b@14', family='qwen3', size='1.7b', layers=14)

    Raises:
        ValueError: the name is neither a known geometry nor a folder nor a hub name (`owner/name`).
    """
    match = re.fullmatch(r"(\w+)(?::([\w.]+))?(?:@(\d+))?", name)
    if match and match[1] in GEOMETRIES:
        family, size = match[1], match[2] or "tiny"
        layers = None if match[3] is None else int(match[3])
        if size not in GEOMETRIES[family]:
            raise ValueError(
                f"size of {family} must be one of {', '.join(GEOMETRIES[family])}, got {size!r}; "
                "choose one of these."
            )
        if layers == 0:
            raise ValueError(f"layers of {name!r} must be at least 1, got 0.")
        return ModelSpec(name, family, size, layers)
    if (name and Path(name).is_dir()) or re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return ModelSpec(name)
    known = [f"{family}[:{'|'.join(sizes)}]" for family, sizes in GEOMETRIES.items()]
    raise ValueError(
        f"model must be {', '.join(known)} (with @LAYERS for fewer layers), a folder or a hub name "
        f"owner/name, got {name!r}; choose one of these."
    )


def checked_model(name: str, *, patched: bool = True) -> ModelSpec:
    """As `parse_model`, and read the config of a checkpoint, before any work.

    Raises:
        ValueError: as in `parse_model`, or there is no such checkpoint.
        NotImplementedError: the model is to be patched, and its type is not verified.
    """
    from transformers import AutoConfig

    from flexvarlen.patches.models.verified import require_verified

    if name.startswith((".", "/", "~")) and not Path(name).expanduser().is_dir():
        raise ValueError(f"model must be a folder that exists, got {name!r}; check the path.")
    spec = parse_model(name)
    if spec.family is None:
        try:
            config = AutoConfig.from_pretrained(name)
        except (OSError, ValueError) as error:
            raise _not_loaded(name, error) from error
        if patched:
            require_verified(config.model_type)
    return spec


def build_model(
    name: str,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> tuple[PreTrainedModel, Any]:
    """Build the model of that name; return it and its tokenizer, or None without a tokenizer.

    Args:
        name: as in `parse_model`.
        device, dtype: device and dtype of the parameters; RoPE's frequencies stay in fp32.
        seed: random seed of the weights.

    Raises:
        ValueError: the name is unknown, or the checkpoint cannot be loaded.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    spec = parse_model(name)
    if spec.family is None or spec.size is None:
        return _load(name, torch.device(device), dtype)
    geometry = dict(GEOMETRIES[spec.family][spec.size])
    if spec.layers is not None:
        geometry["num_hidden_layers"] = spec.layers
    config = AutoConfig.for_model(spec.family, **geometry)
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return model.to(device), None


def _load(name: str, device: torch.device, dtype: torch.dtype) -> tuple[PreTrainedModel, Any]:
    import transformers
    from transformers import AutoConfig, AutoTokenizer

    from flexvarlen.patches.models.families import BY_TYPE

    try:
        family = BY_TYPE.get(AutoConfig.from_pretrained(name).model_type)
        has_images = family is not None and family.task == "ImageTextToText"
        kind: Any = getattr(
            transformers, f"AutoModelFor{'ImageTextToText' if has_images else 'CausalLM'}"
        )
        model = kind.from_pretrained(name, dtype=dtype, attn_implementation="sdpa")
    except (OSError, ValueError) as error:
        raise _not_loaded(name, error) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError):  # a checkpoint without a tokenizer
        tokenizer = None
    return model.to(device), tokenizer


def _not_loaded(name: str, error: Exception) -> ValueError:
    why = " ".join(str(error).split()).partition(". ")[0][:200]
    return ValueError(
        f"model must be a folder or hub name that transformers can load, got {name!r}: {why}"
    )


class NamedModels:
    """Models on one device and text; keeps the last one, as its comparisons follow one another.

    Args:
        names: as in `parse_model`.
        text: files of documents; empty for Python's help topics.

    Raises:
        ValueError: a model is unknown, or a text cannot be read.
        NotImplementedError: the type of a checkpoint is not verified.
    """

    def __init__(self, names: Sequence[str], text: Sequence[Path], device: torch.device) -> None:
        self.specs = [checked_model(name) for name in names]
        read_documents(text)
        self.text, self.device = tuple(text), device
        self.checksum = zlib.crc32(b"\f".join(file.read_bytes() for file in text))
        self._last: tuple[object, tuple[PreTrainedModel, PackedBatch]] | None = None

    def load(
        self, name: str, dtype: torch.dtype, tokens: int | None, seed: int
    ) -> tuple[PreTrainedModel, PackedBatch]:
        """Return a model and a row of `tokens` (default: `DEFAULT_TOKENS`), on the device."""
        key = (name, dtype)
        if self._last is None or self._last[0] != key:
            self._last = None  # before the next model is built, as two may not fit
            model, tokenizer = build_model(name, device=self.device, dtype=dtype, seed=seed)
            row = packed_text(
                vocabulary=int(model.config.get_text_config().vocab_size),
                tokens=tokens or DEFAULT_TOKENS[self.device.type],
                seed=seed,
                files=self.text,
                tokenizer=tokenizer,
            )
            self._last = key, (model, row.to(self.device))
        return self._last[1]
