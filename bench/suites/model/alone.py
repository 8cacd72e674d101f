"""`Alone`: each document alone, in fp64 (the reference) and in the model's dtype (the baseline)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from flexvarlen.bench.suites.model.step import checkpoint_layers, free
from flexvarlen.reference.acceptance import Error, allowed, largest, why_wrong
from flexvarlen.reference.model import Float64, float64_model, run_alone, share

Gradient = Callable[[int, Tensor], Tensor]
"""A document's index and its hidden states `[L, hidden]` -> where its backward starts."""


def probed_parameters(model: nn.Module) -> list[str]:
    """Parameters whose gradients are compared, in the first, middle and last layer.

    A layer has those of attention, or those of the gated delta rule.
    """
    layers = len(model.layers)  # type: ignore[arg-type]
    delta_rule = tuple(f"linear_attn.{name}" for name in ("in_proj_qkv", "in_proj_a", "conv1d"))
    probes = (
        (0, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", *delta_rule)),
        (layers // 2, ("self_attn.k_proj", "mlp.down_proj", *delta_rule)),
        (layers - 1, ("self_attn.v_proj", "self_attn.o_proj")),
    )
    names = [f"layers.{layer}.{name}.weight" for layer, parts in probes for name in parts]
    there = dict(model.named_parameters())
    return [name for name in dict.fromkeys(names) if name in there]


class Alone:
    """The reference and the errors of the baseline, of the documents of one packed row.

    The baseline attends with SDPA: the scores of eager attention would not fit for the longest
    documents. Both keep their results in the host's memory, so that they are in no variant's peak.

    Args:
        base: the base model, unpatched; it is not changed.
        input_ids: int64 `[1, T]`.
        lengths: tokens of each document; their sum is T.
        gradient: makes the backward's start; None: forward alone.
    """

    def __init__(
        self,
        base: PreTrainedModel,
        input_ids: Tensor,
        lengths: Sequence[int],
        *,
        gradient: Gradient | None = None,
    ) -> None:
        self.base, self.dtype = base, base.dtype
        self.names = probed_parameters(base) if gradient else []

        def run(model: PreTrainedModel) -> tuple[list[Tensor], dict[str, Tensor]]:
            # The backward computes layers again outside of the mode that the forward ran in.
            again = Float64 if model.dtype == torch.float64 else nullcontext
            checkpoint_layers(model.train(gradient is not None), lambda: (nullcontext(), again()))
            loss = None
            if gradient is not None:

                def loss(document: int, states: Tensor) -> Tensor:
                    return (states * gradient(document, states.detach()).to(states.dtype)).sum()

            found = run_alone(model, input_ids, lengths, loss=loss, parameters=self.names)
            gradients = {name: x.cpu() for name, x in found.gradients.items()}
            return [x.cpu() for x in found.hidden], gradients

        self.outputs, self.gradients = run(float64_model(base))
        free(base.device)
        outputs, gradients = run(share(base))
        self.documents = [Error.between(*x) for x in zip(outputs, self.outputs, strict=True)]
        self.whole = Error.of_pieces(zip(outputs, self.outputs, strict=True))
        self.of_gradients = {
            name: Error.between(gradients[name], self.gradients[name]) for name in self.names
        }
        free(base.device)

    def packed_gradients(self) -> dict[str, Tensor]:
        """Those that a variant's backward left in the shared parameters."""
        named = dict(self.base.named_parameters())
        found = {name: named[name].grad for name in self.names}
        return {name: gradient for name, gradient in found.items() if gradient is not None}

    def check(
        self, outputs: Tensor, gradients: Mapping[str, Tensor] | None = None
    ) -> tuple[dict[str, Any], str | None]:
        """Errors as measures, and the sentence that says which is too large, or None.

        Every document is checked by itself too: the leak of a short one does not show in the norm
        of a long row. Its baseline is at least the whole row's.

        Args:
            outputs: the documents' in order, one after another.
            gradients: by parameter; None: they are not checked.
        """
        pieces = list(outputs.split([len(x) for x in self.outputs]))
        pairs = list(zip(pieces, self.outputs, strict=True))
        error = Error.of_pieces(pairs)
        own = [Error.between(*pair) for pair in pairs]
        compared = [("outputs", error, self.whole, False)]
        for index, (found, plain) in enumerate(zip(own, self.documents, strict=True)):
            named = f"outputs of document {index}"
            compared.append((named, found, plain.or_larger(self.whole), False))
        measures: dict[str, Any] = {
            "error": error.relative,
            "error_worst_document": largest(x.relative for x in own),
            "baseline_error": self.whole.relative,
            "baseline_error_worst_document": largest(x.relative for x in self.documents),
        }
        if gradients is not None:
            of_gradients = {
                name: Error.between(gradients[name], self.gradients[name])
                if name in gradients
                else Error.missing()
                for name in self.of_gradients
            }
            for name, plain in self.of_gradients.items():
                compared.append((f"gradient of {name}", of_gradients[name], plain, True))
            measures["grad_error"] = largest(x.relative for x in of_gradients.values())
            plain_errors = (x.relative for x in self.of_gradients.values())
            measures["baseline_grad_error"] = largest(plain_errors)
        measures["error_over_allowed"] = largest(
            allowed(plain, self.dtype, gradient=gradient).ratio(found)
            for _, found, plain, gradient in compared
        )
        reasons = (
            why_wrong(name, found, plain, self.dtype, gradient=gradient)
            for name, found, plain, gradient in compared
        )
        return measures, next((reason for reason in reasons if reason is not None), None)
