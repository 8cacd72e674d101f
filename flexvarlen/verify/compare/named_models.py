"""Models that a user names: checked first, built when they are measured."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from flexvarlen.verify.corpus import DEFAULT_TOKENS, packed_text, read_documents
from flexvarlen.verify.experiment.batch import PackedBatch
from flexvarlen.verify.models import build_model, checked_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class NamedModels:
    """Models of one device and text, the last one kept: its comparisons follow one another.

    Args:
        names: as in `parse_model`.
        text: files of documents; empty for Python's help topics.

    Raises:
        ValueError: an unknown model, or a text that cannot be read.
        NotImplementedError: a checkpoint of a model type that is not verified.
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
        """A model, and a row of `tokens`, by default `DEFAULT_TOKENS`, on the device."""
        key = (name, dtype)
        if self._last is None or self._last[0] != key:
            self._last = None  # before the next is built: two may not fit
            model, tokenizer = build_model(name, device=self.device, dtype=dtype, seed=seed)
            row = packed_text(
                vocabulary=model.config.vocab_size,
                tokens=tokens or DEFAULT_TOKENS[self.device.type],
                seed=seed,
                files=self.text,
                tokenizer=tokenizer,
            )
            self._last = key, (model, row.to(self.device))
        return self._last[1]
