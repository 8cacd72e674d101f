"""A base model's step on one packed row of log-normal documents, without an LM head or a loss.

The suites "packings" and "compile" measure it: an LM head's logits would hide the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from flexvarlen.bench.suites.model.alone import Alone
from flexvarlen.bench.suites.model.geometries import log_normal_lengths, new_base_model
from flexvarlen.bench.suites.model.step import Batch, forward_backward


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


class Row:
    """A case's model with random weights, tokens, and where the backward starts."""

    def __init__(self, case: RowCase, device: torch.device) -> None:
        torch.manual_seed(case.seed)
        dtype: torch.dtype = getattr(torch, case.dtype)
        self.base = new_base_model(case.geometry, case.layers, dtype, device).train()
        config = self.base.config
        self.ids = torch.randint(config.vocab_size, (1, case.tokens), device=device)
        shape = (1, case.tokens, config.hidden_size)
        self.grad_output = torch.randn(shape, device=device, dtype=dtype)

    def alone(self, lengths: Sequence[int], *, gradients: bool = True) -> Alone:
        """The reference of these documents."""
        starts = self.grad_output[0].split(list(lengths))
        gradient = (lambda document, _: starts[document]) if gradients else None
        return Alone(self.base, self.ids, lengths, gradient=gradient)

    def step(self, call: Callable[..., Any], inputs: Mapping[str, Any]) -> Tensor:
        """Forward and backward; outputs `[T, hidden]`."""
        batch = Batch({"input_ids": self.ids, **inputs})
        (outputs,) = forward_backward(
            self.base, call, [batch], lambda *_: self.grad_output, keep=True
        )
        return outputs
