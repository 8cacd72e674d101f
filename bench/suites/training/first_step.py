"""The first step of a training, as it must be: each document alone in fp64."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from flexvarlen.bench.suites.training.texts import Document
from flexvarlen.verify.experiment.alone import Alone, both_relative, gradients_of
from flexvarlen.verify.experiment.batch import PackedBatch
from flexvarlen.verify.experiment.step import free

LOGIT_TOKENS = 4096  # tokens whose logits exist at once: 5 GiB in fp64 at a vocabulary of 152k


def first_step_alone(
    new_model: Callable[[], PreTrainedModel],
    documents: Sequence[Document],
    *,
    dtype: torch.dtype,
    precision: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Alone:
    """Loss and gradients of the documents of a first step.

    Args:
        new_model: makes the model that the training begins with, in train mode.
        documents: of the first step.
        dtype: of the training's arithmetic.
        precision: what the training's forward runs in (autocast).
    """
    model = new_model()
    ids = torch.tensor([[token for document in documents for token in document]])
    row = PackedBatch(ids.to(model.device), tuple(map(len, documents)))
    every = range(len(documents))
    found = Alone.of(
        model,
        row,
        outputs=None,
        loss=lambda model: row.loss_alone(model, every, LOGIT_TOKENS),
        parameters=_matrices(model),
        dtype=dtype,
        precision=precision,
    )
    del model
    free(row.input_ids.device)  # it would stand in the way of the training
    return found


def check_first_step(
    alone: Alone, model: nn.Module, loss: float
) -> tuple[dict[str, Any], str | None]:
    """A training's own first step, before its gradients are clipped. Syncs.

    Returns:
        Measures, and the sentence about what is wrong, or None.
    """
    errors, baseline = alone.errors(None, loss, gradients_of(model)), alone.baseline
    measures: dict[str, Any] = {
        "first_loss": loss,
        "reference_loss": alone.results.loss,
        **both_relative("loss_error", errors.loss, baseline.loss),
        **both_relative("gradient_error", errors.gradient, baseline.gradient),
    }
    reason = alone.why_wrong(errors)
    return measures, None if reason is None else f"in the first step, {reason}"


def _matrices(model: PreTrainedModel) -> list[str]:
    """Names of the first and the last layer's projections."""
    last = model.config.num_hidden_layers - 1
    wanted = re.compile(rf"\blayers\.(0|{last})\..*proj\.weight$")
    return [name for name, _ in model.named_parameters() if wanted.search(name)]
