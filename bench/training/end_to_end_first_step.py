"""What the first step must be: loss and gradients of each document alone in fp64."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear
from transformers import PreTrainedModel

from flexvarlen.bench.model.accuracy import (
    GRADIENT_FACTOR,
    ORACLE_DTYPE,
    OUTPUT_FACTOR,
    Answer,
    per_document,
    relative_error,
)
from flexvarlen.bench.model.step import LOSS_ROWS, free, next_token_gradient
from flexvarlen.equivalence.batch import IGNORE_INDEX


class WrongError(Exception):
    """The first step is not what each document alone teaches."""


class FirstStep:
    """The truth, on the host, and how far each document alone in the model's dtype is off.

    Args:
        new_model: the model that every variant begins with.
        documents: of the first step.
    """

    def __init__(
        self, new_model: Callable[[], PreTrainedModel], documents: list[list[int]]
    ) -> None:
        model = new_model()
        self.dtype, self.documents = model.dtype, documents
        exact, self.loss = self._alone(model, ORACLE_DTYPE)
        peer, self.alone_loss = self._alone(model, self.dtype)
        self.peer_loss_error = abs(self.alone_loss - self.loss) / abs(self.loss)
        self.peer_gradient_error = worst_error(peer.gradients, exact)
        self.exact, device = exact.on_host(), model.device
        del model, exact, peer
        free(device)

    def _alone(self, model: PreTrainedModel, dtype: torch.dtype) -> tuple[Answer, float]:
        documents = self.documents
        lengths = [len(ids) for ids in documents]
        ids = torch.tensor([[token for document in documents for token in document]])
        ids = ids.to(model.device)
        labels = ids.roll(-1, dims=1)
        labels[:, [end - 1 for end in accumulate(lengths)]] = IGNORE_INDEX
        counted = sum(lengths) - len(lengths)
        head = model.get_output_embeddings().weight.detach().to(dtype)
        losses: list[float] = []

        def cotangent(outputs: Tensor, rows: slice) -> Tensor:
            losses.append(loss_of(outputs, head, labels[:, rows]) / counted)
            return next_token_gradient(outputs, head, labels[:, rows], counted)

        answer = per_document(
            model.base_model, ids, lengths, cotangent, dtype=dtype, checkpointing=True
        )
        return answer, sum(losses)

    def check(self, model: PreTrainedModel, found: dict[str, float], loss: float) -> None:
        """A variant's first step, before its gradients are clipped; `found` gets the errors.

        Raises:
            WrongError: its loss or its gradients are further off than each document alone may be.
        """
        gradients = {name: p.grad for name, p in model.base_model.named_parameters()}
        found |= {
            "first_loss": loss,
            "true_loss": self.loss,
            "loss_error": abs(loss - self.loss) / abs(self.loss),
            "peer_loss_error": self.peer_loss_error,
            "gradient_error": worst_error(gradients, self.exact),
            "peer_gradient_error": self.peer_gradient_error,
        }
        rounding = torch.finfo(self.dtype).eps
        for what, factor in (("loss", OUTPUT_FACTOR), ("gradient", GRADIENT_FACTOR)):
            limit = factor * (found[f"peer_{what}_error"] + rounding)
            if not found[f"{what}_error"] <= limit:  # also when it is NaN
                raise WrongError(
                    f"relative error of the first {what} is {found[f'{what}_error']:.2g}, more "
                    f"than {limit:.2g} ({factor:g} x the error of each document alone)"
                )


def loss_of(outputs: Tensor, head: Tensor, labels: Tensor) -> float:
    """The sum of the next tokens' cross-entropies, a chunk of logits at a time. Syncs."""
    total = 0.0
    rows = outputs.detach().flatten(0, -2).split(LOSS_ROWS)
    for chunk, wanted in zip(rows, labels.flatten().split(LOSS_ROWS), strict=True):
        logits = linear(chunk, head)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        total += float(cross_entropy(logits, wanted, ignore_index=IGNORE_INDEX, reduction="sum"))
    return total


def worst_error(gradients: dict[str, Any], exact: Answer) -> float:
    """The largest relative error of a probed parameter's gradient; NaN if one is. Syncs."""
    worst = 0.0
    for name, expected in exact.gradients.items():
        found = gradients[name]
        error = float("inf")
        if found is not None:
            error = relative_error(found, expected.to(found.device))
        worst = error if not error <= worst else worst
    return worst
