"""What the files of sentence-transformers in a model's folder say about its embeddings.

`modules.json` names the modules after the transformer; each has a folder with its configuration.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import nn
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

_OLD_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""How 1_Pooling/config.json named the modes before sentence-transformers 5.4, in the order in which
they are concatenated."""

_USE_SENTENCE_TRANSFORMERS = (
    "use a SentenceTransformer, with patch_model(model[0].auto_model, unpad=True)."
)


@dataclass(frozen=True)
class EmbeddingSettings:
    """What is done before and after the transformer.

    Attributes:
        pooling: `how` of `flexvarlen.pool`; several are concatenated. Empty: not known.
        include_prompt: whether the prompt's tokens are pooled too.
        dense: modules between pooling and normalization.
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
        NotImplementedError: modules or options that are not supported.
        ValueError: a module's files are missing.
    """
    files = _Files(name, revision)
    modules = files.read("modules.json")
    if modules is None:
        return EmbeddingSettings()
    kinds = [_kind(module["type"]) for module in modules]
    dense, normalizes = kinds.count("Dense"), kinds[-1:] == ["Normalize"]
    if kinds != ["Transformer", "Pooling", *["Dense"] * dense, *["Normalize"] * normalizes]:
        raise NotImplementedError(
            "modules.json must list Transformer, Pooling, any number of Dense, and at most one "
            f"Normalize, in this order, got {', '.join(kinds)}; {_USE_SENTENCE_TRANSFORMERS}"
        )
    folders = [module["path"] for module in modules]
    pooling = files.require("config.json", folders[1])
    prompts = files.read("config_sentence_transformers.json") or {}
    return EmbeddingSettings(
        pooling=_pooling_of(pooling),
        include_prompt=pooling.get("include_prompt", True),
        dense=[_load_dense(files, folder) for folder in folders[2 : 2 + dense]],
        normalize=normalizes,
        prompts=prompts.get("prompts") or {},
        default_prompt_name=prompts.get("default_prompt_name"),
        max_length=_max_length(files.read("sentence_bert_config.json", folders[0]) or {}),
    )


@dataclass(frozen=True)
class _Files:
    name: str
    revision: str | None

    def find(self, file: str, folder: str = "") -> Path | None:
        found = self.name and cached_file(
            self.name,
            file,
            subfolder=folder,
            revision=self.revision,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        return Path(found) if found else None

    def read(self, file: str, folder: str = "") -> Any:
        """What a JSON file holds, or None if there is no such file."""
        path = self.find(file, folder)
        return None if path is None else json.loads(path.read_text(encoding="utf-8"))

    def require(self, file: str, folder: str) -> dict[str, Any]:
        found: dict[str, Any] | None = self.read(file, folder)
        if found is None:
            raise ValueError(
                f"{self.name} must have {folder}/{file}, which its modules.json needs, got no such "
                "file; download the whole model."
            )
        return found


def _kind(module_type: str) -> str:
    """The name of a module's class; with its path if it is not one of sentence-transformers.

    >>> _kind("sentence_transformers.models.Pooling"), _kind("custom.Pooling")
    ('Pooling', 'custom.Pooling')
    """
    ours = module_type.startswith("sentence_transformers.")
    return module_type.rpartition(".")[2] if ours else module_type


def _pooling_of(config: dict[str, Any]) -> tuple[PoolingMode, ...]:
    modes = config.get("pooling_mode") or [
        mode for flag, mode in _OLD_FLAGS.items() if config.get(flag)
    ]
    modes = [modes] if isinstance(modes, str) else modes or ["mean"]
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


def _load_dense(files: _Files, folder: str) -> nn.Module:
    """A linear layer and its activation, in fp32 on the CPU."""
    from safetensors.torch import load_file

    config = files.require("config.json", folder)
    weights = files.find("model.safetensors", folder)
    activation = _activation(config.get("activation_function", "torch.nn.Tanh"))
    names = {config.get(f"module_{x}_name") or "sentence_embedding" for x in ("input", "output")}
    if weights is None or config.get("use_residual") or names != {"sentence_embedding"}:
        raise NotImplementedError(
            f"{folder} must be a Dense of sentence embeddings with a model.safetensors, without a "
            f"residual, got {config}; {_USE_SENTENCE_TRANSFORMERS}"
        )
    linear = nn.Linear(config["in_features"], config["out_features"], config.get("bias", True))
    state = {name.removeprefix("linear."): value for name, value in load_file(weights).items()}
    linear.load_state_dict(state)
    return nn.Sequential(linear, activation).float().requires_grad_(False)


def _activation(path: str) -> nn.Module:
    """The module of torch with this import path."""
    module, _, name = path.rpartition(".")
    found = getattr(importlib.import_module(module), name) if path.startswith("torch.nn.") else None
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise NotImplementedError(
            f"activation_function of a Dense must be a module of torch.nn, got {path!r}; "
            f"{_USE_SENTENCE_TRANSFORMERS}"
        )
    return found()
