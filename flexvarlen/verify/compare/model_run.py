"""`ModelRun`: the results of one run of a model on the documents of a row, in any form.

The same documents run as one packed row, each alone, or as padded rows; the outputs are put in one
order, token by token of document after document, so that runs can be compared. In a row of trees,
samples, each a path from a root to a leaf, take the place of documents, and shared tokens are
repeated for each of them.

Shapes: T tokens of all documents; N documents; L tokens of one; V = vocabulary; B rows of S tokens
in one forward.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from flexvarlen.patches.isolation.blame import layers_of
from flexvarlen.patches.parts import ModelParts
from flexvarlen.verify.experiment.batch import PackedBatch
from flexvarlen.verify.experiment.inputs import forwards_of
from flexvarlen.verify.experiment.tree_batch import Row
from flexvarlen.verify.experiment.variant import Variant

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class ModelRun:
    """The results of a run.

    Attributes:
        logits: `[T, V]`.
        hidden: `[T, hidden]` each: the embeddings, then the output of each block.
        loss: mean over the counted labels, from losses in fp32 (fp64 of an fp64 model).
        gradients: the loss's gradients of all parameters, by name; None for a forward alone. Over
            several forwards they are summed in at least fp32, so that only the dtype rounds.
    """

    logits: Tensor
    hidden: tuple[Tensor, ...]
    loss: float
    gradients: dict[str, Tensor] | None = field(default=None, repr=False)


class Targets(NamedTuple):
    """What the tokens of each document predict.

    Attributes:
        labels: int64 `[L]`, -100 without a label.
        weights: `[L]`, the weight of each label.
        counted: divisor of the summed loss.
    """

    labels: tuple[Tensor, ...]
    weights: tuple[Tensor, ...]
    counted: int

    @classmethod
    def of(cls, row: Row) -> Targets:
        """The targets of a row; in trees, a token's weight is divided among its samples."""
        labels = row.next_tokens()[0]
        weights = torch.ones_like(labels) if isinstance(row, PackedBatch) else row.weights()
        labels_of, weights_of = (tuple(x[p] for p in row.paths) for x in (labels, weights))
        return cls(labels_of, weights_of, int(row.counted(row.next_tokens())))

    def losses(self, logits_TV: Tensor, documents: slice = slice(None)) -> Tensor:
        """`[N]`: the sum of each document's cross entropies, in at least fp32.

        Each document's logits are copied first, so that neither the shape nor the address of
        the kernels' inputs depends on the other documents.

        Args:
            logits_TV: logits of these documents' tokens.
        """
        wide = torch.promote_types(logits_TV.dtype, torch.float32)
        labels, weights = self.labels[documents], self.weights[documents]
        pieces = zip(logits_TV.split(list(map(len, labels))), labels, weights, strict=True)
        return torch.stack(
            [
                (cross_entropy(logits.to(wide, copy=True), own, reduction="none") * weight).sum()
                for logits, own, weight in pieces
            ]
        )


@contextmanager
def recorded_states(model: PreTrainedModel) -> Iterator[list[Tensor]]:
    """A list that gets the outputs of the embeddings and of each block, by forward hooks.

    Of each call, `[B, S, hidden]` each, detached. Hooks trace under torch.compile (recorded tensors
    become outputs of the graph), whereas transformers' output_hidden_states does not, and returns
    the last block's output after the norm.
    """
    states: list[Tensor] = []

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        states.append((output[0] if isinstance(output, tuple) else output).detach())

    tower = ModelParts.of(model).text_tower(model)
    modules = [model.get_input_embeddings(), *layers_of(tower).values()]
    handles = [module.register_forward_hook(keep) for module in modules]
    try:
        yield states
    finally:
        for handle in handles:
            handle.remove()


def run_model(variant: Variant, row: Row, batching: str = "packed") -> ModelRun:
    """Run the documents in one row, or separately.

    Args:
        variant: the model, and whether it trains.
        row: the documents, on the model's device.
        batching: "packed", "padded" (with at most as many positions as the row) or "serial".
    """
    targets, packed = Targets.of(row), batching == "packed"
    if packed:
        forwards = [variant.forward(row, input_ids=row.input_ids)]
    else:
        forwards = forwards_of(batching, row.samples, variant.inputs)
    order = torch.cat(row.paths) if packed and not isinstance(row, PackedBatch) else slice(None)
    gradients: dict[str, Tensor] = {}
    kept: list[list[Tensor]] = []
    done = 0  # documents
    variant.model.zero_grad(set_to_none=True)
    with recorded_states(variant.model) as states, torch.set_grad_enabled(variant.train):
        for each in forwards:
            logits = each.tokens_of(variant.call(**each.inputs).logits)[order]
            documents = len(targets.labels) if packed else len(each.inputs["input_ids"])
            if variant.train:
                losses = targets.losses(logits, slice(done, done + documents))
                (losses.sum() / targets.counted).backward()
                _take_gradients(variant.model, gradients)
            done += documents
            kept.append([logits.detach(), *(each.tokens_of(x)[order] for x in states)])
            states.clear()
    logits, *hidden = kept[0] if len(kept) == 1 else map(torch.cat, zip(*kept, strict=True))
    with torch.no_grad():
        # Document by document, so that the order of summation does not depend on the batching.
        loss = math.fsum(targets.losses(logits).tolist()) / targets.counted
    if not variant.train:
        return ModelRun(logits, tuple(hidden), loss)
    for name, parameter in variant.model.named_parameters():
        if name not in gradients:
            gradients[name] = torch.zeros_like(parameter)
    return ModelRun(logits, tuple(hidden), loss, gradients)


def _take_gradients(model: nn.Module, sums: dict[str, Tensor]) -> None:
    """Move gradients from the parameters to `sums`; from the second on, sum in at least fp32."""
    for name, parameter in model.named_parameters():
        found, parameter.grad = parameter.grad, None
        if found is None:
            continue
        total: Any = sums.get(name)
        if total is not None:
            found = total.to(torch.promote_types(total.dtype, torch.float32)).add_(found)
        sums[name] = found
