"""`ModelRun`: the results of one run of a model on the documents of a row, in any form.

The same documents run as one packed row, each alone, or as padded rows; the outputs are put in one
order, token by token of document after document, so that runs can be compared. In a row of trees,
samples, each a path from a root to a leaf, take the place of documents, and shared tokens are
repeated for each of them.

Shapes: T tokens of all documents; N documents; V = vocabulary; B rows of S tokens in one forward.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from flexvarlen.patches.isolation.blame import layers_of
from flexvarlen.patches.parts import ModelParts
from flexvarlen.reference.model import IGNORE_INDEX
from flexvarlen.verify.experiment.batch import PackedBatch
from flexvarlen.verify.experiment.inputs import ModelInputs, forwards_of
from flexvarlen.verify.experiment.step import run_step
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
    """The labels that the tokens of all documents predict.

    Attributes:
        labels: int64 `[T]`, `IGNORE_INDEX` without a label.
        weights: `[T]`, the weight of each label; None: one.
        counted: divisor of the summed loss.
    """

    labels: Tensor
    weights: Tensor | None
    counted: int

    @classmethod
    def of(cls, row: Row) -> Targets:
        """The targets of a row; in trees, a token's weight is divided among its samples."""
        counted = int(row.counted(row.labels()))
        if isinstance(row, PackedBatch):
            return cls(row.next_tokens()[0], None, counted)
        order = torch.cat(row.paths)
        sharing = order.bincount(minlength=row.input_ids.shape[1])
        weights = row.label_counts[0] / sharing.clamp(min=1)
        return cls(row.labels()[0][order], weights[order], counted)

    def losses(self, logits_TV: Tensor, lengths: Sequence[int], first: int = 0) -> Tensor:
        """`[N]`: the sum of each document's cross entropies, in at least fp32.

        Each document's logits are copied first, so that neither the shape nor the address of
        the kernels' inputs depends on the other documents.

        Args:
            logits_TV: logits of some documents' tokens.
            lengths: tokens of each of them.
            first: the first token's index.
        """
        wide = torch.promote_types(logits_TV.dtype, torch.float32)
        sums = []
        for logits in logits_TV.split(list(lengths)):
            own = slice(first, first := first + len(logits))
            losses = cross_entropy(
                logits.to(wide, copy=True),
                self.labels[own],
                reduction="none",
                ignore_index=IGNORE_INDEX,
            )
            sums.append((losses if self.weights is None else losses * self.weights[own]).sum())
        return torch.stack(sums)


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
    lengths, targets = row.samples.lengths, Targets.of(row)
    if batching == "packed":
        forwards = [variant.forward(row, input_ids=row.input_ids)]
    else:
        forwards = forwards_of(batching, row.samples, variant.inputs)
    shared = batching == "packed" and not isinstance(row, PackedBatch)
    order = torch.cat(row.paths) if shared else None
    gradients: dict[str, Tensor] = {}
    done = 0  # documents

    def own(x_BSN: Tensor, each: ModelInputs) -> Tensor:
        x = x_BSN.flatten(0, 1) if each.real is None else x_BSN[each.real]
        return x if order is None else x[order]

    def backward(logits: Tensor, each: ModelInputs) -> None:
        nonlocal done
        documents = len(lengths) if batching == "packed" else len(logits)
        some, first = lengths[done : done + documents], sum(lengths[:done])
        done += documents
        (targets.losses(own(logits, each), some, first).sum() / targets.counted).backward()
        _take_gradients(variant.model, gradients)

    def keep(logits: Tensor, each: ModelInputs) -> list[Tensor]:
        found = [own(x, each) for x in (logits.detach(), *states)]
        states.clear()
        return found

    with recorded_states(variant.model) as states:
        kept = run_step(variant, forwards, backward, take=lambda x: x.logits, keep=keep)
    logits, *hidden = kept[0] if len(kept) == 1 else map(torch.cat, zip(*kept, strict=True))
    with torch.no_grad():
        # Document by document, so that the order of summation does not depend on the batching.
        loss = math.fsum(targets.losses(logits, lengths).tolist()) / targets.counted
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
