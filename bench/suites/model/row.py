"""A base model's step on one packed row of log-normal documents, without an LM head or a loss.

The suites "packings" and "compile" measure it: an LM head's logits would hide the difference.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from flexvarlen.bench.suites.model.geometries import log_normal_lengths, new_base_model
from flexvarlen.verify.experiment.batch import PackedBatch


@dataclass(frozen=True)
class RowCase:
    """One model, and rows of documents drawn alike."""

    geometry: str
    layers: int
    tokens: int
    mean_doc: int
    dtype: str = "bfloat16"
    compiler: str = "inductor"
    sigma: float = 1.0
    seed: int = 0
    passes: str = "forward+backward"

    @property
    def name(self) -> str:
        return f"{self.geometry}-t{self.tokens}-mean{self.mean_doc}"

    def data(self) -> dict[str, Any]:
        return asdict(self)

    def packing(self, index: int = 0) -> list[int]:
        """Tokens of each document of one packing."""
        return log_normal_lengths(self.tokens, self.mean_doc, self.sigma, self.seed + index)


def rows_of(
    case: RowCase, device: torch.device, *, other_packings: int = 0
) -> tuple[PreTrainedModel, list[PackedBatch], Tensor]:
    """A base model with random weights, the packings of a row, and where the backward starts."""
    torch.manual_seed(case.seed)
    dtype: torch.dtype = getattr(torch, case.dtype)
    base = new_base_model(case.geometry, case.layers, dtype, device).train()
    ids = torch.randint(base.config.vocab_size, (1, case.tokens), device=device)
    grad_output = torch.randn(case.tokens, base.config.hidden_size, device=device, dtype=dtype)
    rows = [PackedBatch(ids, tuple(case.packing(i))) for i in range(1 + other_packings)]
    return base, rows, grad_output
