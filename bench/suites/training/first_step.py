"""The first step of a training, as it must be: each document alone in fp64."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from flexvarlen.bench.suites.training.texts import Document
from flexvarlen.reference.acceptance import Error, why_wrong
from flexvarlen.reference.model import (
    Float64,
    ModelResults,
    float64_model,
    next_token_loss,
    run_alone,
)
from flexvarlen.verify.experiment.step import checkpoint_layers, free

LOGIT_TOKENS = 4096  # tokens whose logits exist at once: 5 GiB in fp64 at a vocabulary of 152k


@dataclass(frozen=True)
class FirstStep:
    """The reference of a step, and the error of its low-precision baseline.

    Attributes:
        dtype: of the training's arithmetic.
        loss: the mean over all next tokens, in fp64.
        gradients: fp64, on the host, of the matrices of the first and the last layer.
        baseline_loss: error of each document alone in `dtype`.
        baseline_gradient, baseline_gradients: of all of them as one vector, and of each.
    """

    dtype: torch.dtype
    loss: float
    gradients: dict[str, Tensor]
    baseline_loss: Error
    baseline_gradient: Error
    baseline_gradients: dict[str, Error]

    @classmethod
    def of(
        cls,
        new_model: Callable[[], PreTrainedModel],
        documents: Sequence[Document],
        *,
        dtype: torch.dtype,
        precision: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> FirstStep:
        """Compute both.

        Args:
            new_model: makes the model that the training begins with, in train mode.
            documents: of the first step.
            dtype: of the training's arithmetic.
            precision: what the training's forward runs in (autocast).
        """
        model = new_model()
        double = float64_model(model)
        # The backward computes layers again in a thread of its own, which has no Float64.
        checkpoint_layers(double, lambda: (nullcontext(), Float64()))
        reference = _alone(double, documents)
        checkpoint_layers(model)
        with precision():
            baseline = _alone(model, documents)
        pairs = {name: (baseline.gradients[name], x) for name, x in reference.gradients.items()}
        found = cls(
            dtype,
            reference.loss,
            {name: x.cpu() for name, x in reference.gradients.items()},
            _scalar_error(baseline.loss, reference.loss),
            Error.of_pieces(pairs.values()),
            {name: Error.between(*pair) for name, pair in pairs.items()},
        )
        device = model.device
        del model, double, reference, baseline, pairs
        free(device)  # both would stand in the way of the training
        return found

    def check(self, model: nn.Module, loss: float) -> tuple[dict[str, Any], str | None]:
        """A training's own first step, before its gradients are clipped. Syncs.

        Returns:
            Measures, and the sentence about what is wrong, or None.
        """
        named = dict(model.named_parameters())
        pairs = {
            name: (gradient, expected)
            for name, expected in self.gradients.items()
            if (gradient := named[name].grad) is not None
        }
        loss_error = _scalar_error(loss, self.loss)
        measures: dict[str, Any] = {
            "first_loss": loss,
            "reference_loss": self.loss,
            "loss_error": loss_error.relative,
            "baseline_loss_error": self.baseline_loss.relative,
            "gradient_error": Error.of_pieces(pairs.values()).relative,
            "baseline_gradient_error": self.baseline_gradient.relative,
        }
        what = "of the first step"
        reason = why_wrong(f"loss {what}", loss_error, self.baseline_loss, self.dtype)
        for name, baseline in self.baseline_gradients.items():
            error = Error.between(*pairs[name]) if name in pairs else Error.missing()
            text = f"gradient of {name} {what}"
            reason = reason or why_wrong(text, error, baseline, self.dtype, gradient=True)
        return measures, reason


def _alone(model: PreTrainedModel, documents: Sequence[Document]) -> ModelResults:
    lengths = [len(ids) for ids in documents]
    ids = torch.tensor([[token for document in documents for token in document]])
    ids = ids.to(model.device)
    every = range(len(lengths))
    loss = next_token_loss(model, ids, lengths, every, piece_tokens=LOGIT_TOKENS)
    return run_alone(model, ids, lengths, loss=loss, parameters=_matrices(model))


def _matrices(model: PreTrainedModel) -> list[str]:
    """Names of the first and the last layer's projections."""
    last = model.config.num_hidden_layers - 1
    wanted = re.compile(rf"\blayers\.(0|{last})\..*proj\.weight$")
    return [name for name, _ in model.named_parameters() if wanted.search(name)]


def _scalar_error(found: float, reference: float) -> Error:
    pair = (torch.tensor([x], dtype=torch.float64) for x in (found, reference))
    return Error.between(*pair)
