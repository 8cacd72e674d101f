"""How a model that sentence-transformers saved makes one vector of a text.

`modules.json` names the modules after the transformer; sentence-transformers loads each of them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn
from transformers.utils import cached_file

PoolingMode = Literal["first", "last", "mean", "max"]

POOLINGS: dict[str, PoolingMode] = {
    "cls": "first",
    "first": "first",
    "lasttoken": "last",
    "last": "last",
    "mean": "mean",
    "max": "max",
}
"""sentence-transformers' names and ours -> `how` of `flexvarlen.pool`."""

_KEY = "sentence_embedding"
_USE_SENTENCE_TRANSFORMERS = (
    "use a SentenceTransformer, with patch_model(model[0].auto_model, unpad=True)."
)


@dataclass(frozen=True)
class EmbeddingSettings:
    """What is done before and after the transformer.

    Attributes:
        pooling: `how` of `flexvarlen.pool`; several are concatenated. Empty: not known.
        include_prompt: whether the prompt's tokens are pooled too.
        dense: sentence-transformers' modules between pooling and normalization.
        normalize: whether vectors get length 1.
        prompts: by name.
        default_prompt_name: of the prompt that is used if none is named.
        max_length: tokens at which a text is cut; None: as the tokenizer says.
    """

    pooling: tuple[PoolingMode, ...] = ()
    include_prompt: bool = True
    dense: Sequence[nn.Module] = ()
    normalize: bool = False
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    max_length: int | None = None


def read_settings(name: str, revision: str | None = None) -> EmbeddingSettings:
    """Read the settings of a model that sentence-transformers saved.

    Args:
        name: a folder, or a model of the Hugging Face Hub, as `from_pretrained` takes it.
        revision: of the model on the Hub.

    Returns:
        The defaults if there is no modules.json.

    Raises:
        ImportError: there is one, and sentence-transformers is not installed.
        NotImplementedError: modules or options that are not supported.
    """
    listed = _read(name, "modules.json", revision)
    if listed is None:
        return EmbeddingSettings()
    kinds = [_kind(module["type"]) for module in listed]
    dense, normalizes = kinds.count("Dense"), kinds[-1:] == ["Normalize"]
    if kinds != ["Transformer", "Pooling", *["Dense"] * dense, *["Normalize"] * normalizes]:
        raise NotImplementedError(
            "modules.json must list Transformer, Pooling, any number of Dense, and at most one "
            f"Normalize, in this order, got {', '.join(kinds)}; {_USE_SENTENCE_TRANSFORMERS}"
        )
    try:
        from sentence_transformers.sentence_transformer.modules import Dense, Pooling, Transformer
    except ImportError as error:
        raise ImportError(
            f"sentence-transformers must be installed to load the modules of {name}; "
            "pip install 'sentence-transformers>=6'"
        ) from error
    folders = [module["path"] for module in listed]
    pooling = Pooling.load(name, subfolder=folders[1], revision=revision)
    transformer = Transformer.load_config(name, subfolder=folders[0], revision=revision)
    prompts = _read(name, "config_sentence_transformers.json", revision) or {}
    return EmbeddingSettings(
        pooling=_pooling_of(pooling.pooling_mode),
        include_prompt=pooling.include_prompt,
        dense=[
            _checked_dense(Dense.load(name, subfolder=folder, revision=revision))
            for folder in folders[2 : 2 + dense]
        ],
        normalize=normalizes,
        prompts=prompts.get("prompts") or {},
        default_prompt_name=prompts.get("default_prompt_name"),
        max_length=_max_length(transformer),
    )


def apply_dense(module: nn.Module, x: Tensor) -> Tensor:
    """A module of `EmbeddingSettings.dense`, of vectors `[N, D]`."""
    found: Tensor = module({_KEY: x})[_KEY]
    return found


def _read(name: str, file: str, revision: str | None) -> Any:
    """What a JSON file holds, or None if there is no such file."""
    path = name and cached_file(
        name,
        file,
        revision=revision,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return json.loads(Path(path).read_text(encoding="utf-8")) if path else None


def _kind(module_type: str) -> str:
    """The name of a module's class; with its path if it is not one of sentence-transformers.

    >>> _kind("sentence_transformers.models.Pooling"), _kind("custom.Pooling")
    ('Pooling', 'custom.Pooling')
    """
    ours = module_type.startswith("sentence_transformers.")
    return module_type.rpartition(".")[2] if ours else module_type


def _pooling_of(mode: str | Sequence[str]) -> tuple[PoolingMode, ...]:
    modes = [mode] if isinstance(mode, str) else mode
    unknown = [mode for mode in modes if mode not in POOLINGS]
    if unknown:
        raise NotImplementedError(
            f"pooling_mode must be among {', '.join(POOLINGS)}, got {', '.join(unknown)} in the "
            f"model's Pooling; {_USE_SENTENCE_TRANSFORMERS}"
        )
    return tuple(POOLINGS[mode] for mode in modes)


def _max_length(config: dict[str, Any]) -> int | None:
    unsupported = [name for name in ("do_lower_case", "processing_kwargs") if config.get(name)]
    if "message" in config.get("modality_config", {}):
        unsupported.append("modality_config with chat messages")
    if unsupported:
        raise NotImplementedError(
            "sentence_bert_config.json must not set options that change the texts, got "
            f"{', '.join(unsupported)}; {_USE_SENTENCE_TRANSFORMERS}"
        )
    found: int | None = config.get("max_seq_length")
    return found


def _checked_dense(module: Any) -> nn.Module:
    """In fp32 on the CPU, without gradients."""
    names = {module.module_input_name, module.module_output_name}
    if names != {_KEY}:
        raise NotImplementedError(
            f"Dense must take and return {_KEY}, got {', '.join(sorted(names))}; "
            f"{_USE_SENTENCE_TRANSFORMERS}"
        )
    found: nn.Module = module.float().requires_grad_(False)
    return found
