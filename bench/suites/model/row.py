"""A base model's step on one packed row of log-normal documents, without an LM head or a loss.

The suites "packings" and "compile" measure it: an LM head's logits would hide the difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from flexvarlen.bench.suites.model.geometries import log_normal_lengths, new_base_model
from flexvarlen.verify.experiment.alone import Alone, from_gradient, probed_parameters
from flexvarlen.verify.experiment.batch import PackedBatch
from flexvarlen.verify.experiment.inputs import ModelInputs, packed
from flexvarlen.verify.experiment.step import base_step
from flexvarlen.verify.experiment.variant import Sizes, Variant


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


class RowSteps:
    """A case's model with random weights, its packings, and where the backward starts."""

    def __init__(self, case: RowCase, device: torch.device, *, other_packings: int = 0) -> None:
        self.case, self.device = case, device
        torch.manual_seed(case.seed)
        dtype: torch.dtype = getattr(torch, case.dtype)
        self.base = new_base_model(case.geometry, case.layers, dtype, device).train()
        config = self.base.config
        ids = torch.randint(config.vocab_size, (1, case.tokens), device=device)
        shape = (1, case.tokens, config.hidden_size)
        self.grad_output = torch.randn(shape, device=device, dtype=dtype)[0]
        self.rows = [
            PackedBatch(ids, tuple(case.packing(index))) for index in range(1 + other_packings)
        ]
        self.sizes = Sizes.of(*self.rows)

    def alone(self, row: PackedBatch, *, gradients: bool = True) -> Alone:
        """The reference of these documents."""
        starts = self.grad_output.split(list(row.lengths))
        loss = from_gradient(lambda document, _: starts[document]) if gradients else None
        return Alone.of(self.base, row, loss=loss, parameters=probed_parameters(self.base))

    def forwards(self, variant: Variant, row: PackedBatch) -> list[ModelInputs]:
        """The row as a variant gets it."""
        return packed(row, variant.inputs(row), self.grad_output)

    def step(self, variant: Variant, forwards: Sequence[ModelInputs]) -> Tensor:
        """Forward and backward; outputs `[T, hidden]`."""
        (outputs,) = base_step(variant, forwards, parameters_of=self.base, keep=True)
        return outputs
