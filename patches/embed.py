"""`embed`: vectors of many texts, computed on packed rows of a fixed number of tokens.

A thread tokenizes and packs the next texts while the model runs on these. Rows are launched without
waiting for the device, which is read once every `_READ_EVERY` rows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize as to_unit_length
from transformers import PreTrainedTokenizerBase

from flexvarlen.layout.arguments import to_int_or_none
from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.layout.per_document import pool
from flexvarlen.patches.api import is_patched, patched
from flexvarlen.patches.embed_rows import TextRow, Tokenizer, prefetched, rows_of_texts
from flexvarlen.patches.embedding_settings import (
    POOLINGS,
    EmbeddingSettings,
    apply_dense,
    read_settings,
)
from flexvarlen.patches.inner_model import transformers_model
from flexvarlen.patches.parts import ModelParts

Pooling = Literal["cls", "first", "mean", "last", "max"]

_READ_EVERY = 32
"""Rows after which vectors are copied to the host, where the device may wait for the host."""


def embed(
    model: nn.Module,
    texts: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    pooling: Pooling | None = None,
    normalize: bool | None = None,
    prompt: str | None = None,
    prompt_name: str | None = None,
    max_length: int | None = None,
    tokens_per_row: int = 16_384,
    progress: bool = True,
) -> Tensor:
    """Embed texts: one vector for each, as `SentenceTransformer.encode` computes.

    Texts are packed into rows of `tokens_per_row` tokens, so none is padded and there is no batch
    size. Pooling, dense layers, normalization, prompts and the maximum length are read from the
    files that sentence-transformers saved with the model, if there are any, which needs
    sentence-transformers 6 or later; arguments take precedence. Of a model on the Hub they are read
    from its main revision (with transformers before 5.23: from the one that was loaded). For
    another revision, pass a local folder.

    Rows have equal sizes, except for the last row and for texts longer than a row, so a model under
    torch.compile is compiled once for all of them.

    Args:
        model: a base model (`AutoModel`) of a verified family (docs/families.md), also compiled.
            An unpatched model is patched for the duration of the call, with backend "auto".
        texts: N strings.
        tokenizer: the model's tokenizer.
        pooling: "cls" or "first", "mean", "last" or "max"; needed if the model's folder does not
            say.
        normalize: whether vectors are scaled to length 1; default: as the folder says, else False.
        prompt: a prompt to put before each text.
        prompt_name: name of a prompt in the model's config_sentence_transformers.json; default: the
            default prompt named there.
        max_length: tokens at which texts are truncated, including special tokens; default:
            `max_seq_length` of the folder, else the tokenizer's and the model's maximum; at most
            the number of learned positions.
        tokens_per_row: tokens of a row. A longer text gets a separate row.
        progress: whether to show a progress bar.

    Returns:
        fp32 `[N, dim]` on the CPU, in the order of the texts. The vector of a text without tokens
        is zero.

    Raises:
        ImportError: the model's folder has a modules.json, and sentence-transformers is missing.
        ValueError: texts are not a list of strings, an argument is not one of those above, or
            pooling is neither given nor in the model's folder.
        NotImplementedError: the model cannot be patched, or its folder names modules or options
            that are not supported.

    Runs in evaluation mode without gradients. Syncs with the device once every 32 rows.

    >>> import flexvarlen as fv
    >>> vectors = fv.embed(model, ["a text", "another"], tokenizer)  # doctest: +SKIP
    """
    is_patched(model)  # raises if there is no model inside
    if not (callable(tokenizer) and hasattr(tokenizer, "model_max_length")):
        raise ValueError(
            f"tokenizer must be the model's, got {tokenizer!r:.80}; load it with "
            "AutoTokenizer.from_pretrained."
        )
    _check(texts, pooling, tokens_per_row, max_length)
    settings = _settings(model, pooling, normalize)
    prompt = _prompt(settings, prompt, prompt_name)
    longest = _max_length(model, tokenizer, max_length, settings.max_length)
    tokenize = Tokenizer(tokenizer, prompt, longest)
    rows = rows_of_texts(texts, tokenize, tokens_per_row, longest)
    pooler = _Pooler(model, settings)
    vectors = pooler.empty(len(texts))
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(_evaluating(model))
        if not is_patched(model):
            stack.enter_context(patched(model))
        advance = stack.enter_context(_progress_bar(len(texts), shown=progress))
        pending: list[tuple[TextRow, Tensor]] = []
        for row in prefetched(rows):
            pending.append((row, pooler(*_run(model, row))))
            if len(pending) == _READ_EVERY:
                _copy_to_host(pending, vectors)
            advance(len(row.texts))
        _copy_to_host(pending, vectors)
    return vectors


# ---- settings ----


def _check(texts: Any, pooling: Any, tokens_per_row: Any, max_length: Any) -> None:
    listed = hasattr(texts, "__len__") and not isinstance(texts, str)
    if not listed or not all(isinstance(text, str) for text in texts):
        raise ValueError(
            f"texts must be a list of strings, got {texts!r:.80}; put a single text in a list."
        )
    if pooling is not None and not (isinstance(pooling, str) and pooling in POOLINGS):
        raise ValueError(
            f"pooling must be 'cls', 'first', 'mean', 'last' or 'max', got {pooling!r}; choose one."
        )
    for name, value in (("tokens_per_row", tokens_per_row), ("max_length", max_length)):
        if value is not None and (to_int_or_none(value) or 0) < 1:
            raise ValueError(
                f"{name} must be a positive number of tokens, got {value!r}; pass one, or remove "
                f"{name}."
            )


def _settings(model: Any, pooling: str | None, normalize: bool | None) -> EmbeddingSettings:
    """The settings of the model's folder, overridden by the arguments given."""
    config = model.config
    name = getattr(config, "name_or_path", "")
    found = read_settings(name, getattr(config, "_commit_hash", None))
    if pooling is not None:
        found = replace(found, pooling=(POOLINGS[pooling],))
    if normalize is not None:
        found = replace(found, normalize=normalize)
    if not found.pooling:
        raise ValueError(
            "pooling must be given for a model without sentence-transformers' modules.json, got "
            f"None for {name or 'a model that was not loaded'!r}; pass the pooling used in "
            "training, such as 'mean'."
        )
    return found


def _prompt(settings: EmbeddingSettings, prompt: str | None, name: str | None) -> str:
    """The prompt that is put before each text."""
    name = settings.default_prompt_name if name is None else name
    if prompt is None and name is not None:
        if name not in settings.prompts:
            raise ValueError(
                "prompt_name must be one of the model's prompts "
                f"({', '.join(settings.prompts) or 'it has no prompts'}), got {name!r}; choose "
                "one, or pass prompt=."
            )
        prompt = settings.prompts[name]
    if prompt and not settings.include_prompt:
        raise NotImplementedError(
            "prompt is not supported for a model whose pooling excludes the prompt "
            f"(include_prompt=False), got {prompt!r}; use a SentenceTransformer, with "
            "patch_model(model[0].auto_model, unpad=True)."
        )
    return prompt or ""


def _max_length(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, given: int | None, of_folder: int | None
) -> int:
    """Tokens at which texts are truncated: as given, else as sentence-transformers does.

    Raises:
        ValueError: the given number exceeds the model's positions.
    """
    inner = transformers_model(model)
    positions = ModelParts.of(inner).max_positions
    if given and positions and given > positions:
        raise ValueError(
            f"max_length must be at most {positions}, the positions that the model has, got "
            f"{given}; pass less, or leave it out."
        )
    config = inner.config.get_text_config()
    default: int = tokenizer.model_max_length
    default = min(default, getattr(config, "max_position_embeddings", None) or default)
    return int(min(given or of_folder or default, positions or sys.maxsize))


# ---- running them ----


def _run(model: Any, row: TextRow) -> tuple[Tensor, PackedLayout]:
    """Last hidden states `[1, T, D]` and the layout, on the model's device. No sync."""
    ids, layout = row.ids, row.layout
    if model.device.type == "cuda":  # a copy of unpinned memory would wait for earlier rows
        ids, layout = ids.pin_memory(), layout.pin_memory()
    layout = layout.to(model.device, non_blocking=True)
    outputs = model(
        input_ids=ids.to(model.device, non_blocking=True),
        packed_layout=layout,
        use_cache=False,
    )
    hidden: Tensor | None = getattr(outputs, "last_hidden_state", None)
    if hidden is None:
        raise ValueError(
            "model must be a base model, whose output has last_hidden_state, got "
            f"{type(outputs).__name__}; load it with AutoModel, or pass model.base_model."
        )
    return hidden, layout


class _Pooler:
    """Pools hidden states and applies the modules after the pooling."""

    def __init__(self, model: Any, settings: EmbeddingSettings) -> None:
        self.settings, self.device = settings, model.device
        self.width = model.config.get_text_config().hidden_size * len(settings.pooling)
        self.dense = [module.to(model.device) for module in settings.dense]

    def __call__(self, hidden: Tensor, layout: PackedLayout) -> Tensor:
        """fp32 `[documents, dim]`."""
        pooled = [pool(hidden, layout, how) for how in self.settings.pooling]
        return self.after_pooling(torch.cat(pooled, dim=-1).float())

    def after_pooling(self, x: Tensor) -> Tensor:
        for module in self.dense:
            x = apply_dense(module, x)
        return to_unit_length(x, dim=-1) if self.settings.normalize else x

    def empty(self, texts: int) -> Tensor:
        """An uninitialized tensor for the vectors."""
        width = self.after_pooling(torch.zeros(0, self.width, device=self.device)).shape[1]
        return torch.zeros(texts, width)


def _copy_to_host(pending: list[tuple[TextRow, Tensor]], vectors: Tensor) -> None:
    """Copy what was computed to where it belongs, and forget it."""
    if pending:
        texts = [i for row, _ in pending for i in row.texts]
        vectors[texts] = torch.cat([found for _, found in pending]).cpu()
        pending.clear()


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def _progress_bar(texts: int, *, shown: bool) -> Iterator[Callable[[int], None]]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = ("texts", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, disable=not shown) as bar:
        task = bar.add_task("texts", total=texts)
        yield lambda done: bar.advance(task, done)
