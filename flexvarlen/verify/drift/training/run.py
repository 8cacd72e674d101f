"""One training run: a model, its attention, AdamW, rows in an order that the seed gives."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from flexvarlen.reference.attention import PIECE_ELEMENTS
from flexvarlen.verify.experiment.batch import PackedBatch
from flexvarlen.verify.experiment.step import causal_step
from flexvarlen.verify.experiment.variant import Sizes, make_variant

if TYPE_CHECKING:
    from transformers import PreTrainedModel

UNPACKED = "unpacked"
"""The variant without packing: each document in a row of its own, transformers' own sdpa."""

Step = Callable[[PackedBatch], float]
"""Forward and backward of a row: its loss; the gradients are in the parameters' `.grad`."""


@dataclass(frozen=True)
class Schedule:
    """What every run of a comparison shares.

    Attributes:
        batches: rows of documents; a run takes them in an order of its seed, again and again.
        steps: of the optimizer.
        lr: AdamW's, constant; all else is torch's default.
    """

    batches: tuple[PackedBatch, ...]
    steps: int
    lr: float

    def order(self, seed: int) -> list[int]:
        """Which batch each step takes: all of them, shuffled, before any comes again."""
        rng = random.Random(seed)
        order: list[int] = []
        while len(order) < self.steps:
            order += rng.sample(range(len(self.batches)), len(self.batches))
        return order[: self.steps]

    def sizes(self) -> Sizes:
        """Room for every batch."""
        each = [Sizes.of(batch) for batch in self.batches]
        return Sizes(
            max(sizes.capacity for sizes in each),
            min(
                max(sizes.max_seqlen_bound for sizes in each),
                min(batch.total_tokens for batch in self.batches),
            ),
        )


def train(
    model: PreTrainedModel,
    name: str,
    schedule: Schedule,
    seed: int,
    after_backward: Callable[[int, list[Tensor | None]], None],
) -> list[float]:
    """Train `model` in place.

    Parameters of half precision are updated through a copy in fp32, as in mixed-precision training:
    else most of AdamW's updates would be rounded away.

    Args:
        model: unpatched, on the device that it trains on.
        name: a backend, "transformers:" and an implementation of theirs, or `UNPACKED`.
        schedule: rows and steps.
        seed: of the rows' order, and of dropout.
        after_backward: called with the step and the gradients of all parameters.

    Returns:
        The loss of each step, before its update: sum over labels / number of labels.

    Raises:
        Unsupported: the variant cannot train here.
    """
    step = step_of(name, model, schedule.sizes())
    torch.manual_seed(seed)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = _MasterAdamW(parameters, schedule.lr)
    losses = []
    for index, number in enumerate(schedule.order(seed)):
        losses.append(step(schedule.batches[number].to(model.device)))
        after_backward(index, [p.grad for p in parameters])
        optimizer.step()
    return losses


def step_of(name: str, model: PreTrainedModel, sizes: Sizes) -> Step:
    """Forward and backward of one row under that variant."""
    if name == UNPACKED:
        model.set_attn_implementation("sdpa")
        model.train()
        return _unpacked_step(model)
    variant = make_variant(name, model, sizes)

    def step(batch: PackedBatch) -> float:
        labels = batch.labels()
        return causal_step(variant, batch, labels, batch.counted(labels)).loss

    return step


def _unpacked_step(model: PreTrainedModel) -> Step:
    def step(batch: PackedBatch) -> float:
        model.zero_grad(set_to_none=True)
        counted = batch.counted(batch.labels())
        total = torch.zeros((), device=model.device)
        for start, end in batch.spans():
            if end - start == 1:  # nothing to predict
                continue
            ids = batch.input_ids[:, start:end]
            out = model(input_ids=ids, labels=ids, num_items_in_batch=counted, use_cache=False)
            out.loss.backward()
            total += out.loss.detach()
        return float(total)

    return step


def nudge(model: PreTrainedModel, seed: int) -> None:
    """Move each parameter by a unit in its last place (or two), up or down at random."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            signs = torch.randint(0, 2, p.shape, device=p.device, dtype=torch.int8) * 2 - 1
            wide = torch.promote_types(p.dtype, torch.float32)
            moved = p.to(wide) + p.to(wide) * signs * torch.finfo(p.dtype).eps
            p.copy_(moved)


class _MasterAdamW:
    """AdamW on parameters of fp32, and on copies in fp32 of all others."""

    def __init__(self, parameters: Sequence[nn.Parameter], lr: float) -> None:
        self._pairs = [
            (p, p if p.dtype == torch.float32 else p.detach().float()) for p in parameters
        ]
        self._adam = torch.optim.AdamW([master for _, master in self._pairs], lr=lr)

    def step(self) -> None:
        half = [(p, master) for p, master in self._pairs if master is not p]
        for p, master in half:
            master.grad = None if p.grad is None else p.grad.float()
        self._adam.step()
        with torch.no_grad():
            for p, master in half:
                p.copy_(master)
                master.grad = None


class GradientLog:
    """The baseline's gradients at chosen steps, on the CPU, and angles of others to them."""

    def __init__(self, steps: Iterable[int]) -> None:
        self.steps = tuple(steps)
        self._kept: dict[int, list[Tensor | None]] = {}

    def keep(self, step: int, gradients: list[Tensor | None]) -> None:
        """Copy them, if the step is one of `steps`."""
        if step in self.steps:
            self._kept[step] = [None if g is None else g.to("cpu", copy=True) for g in gradients]

    def angle(self, step: int, gradients: list[Tensor | None]) -> float | None:
        """Degrees to the kept ones; None at a step that is not one of `steps`. Reads the device."""
        return degrees_between(gradients, self._kept[step]) if step in self._kept else None


def degrees_between(ours: Sequence[Tensor | None], theirs: Sequence[Tensor | None]) -> float:
    """The angle between two gradients, each as one vector; None is a gradient of zeros.

    Twice the arctangent of |u - v| / |u + v| for the unit vectors u and v: an arccosine near 1
    would lose half of the digits (W. Kahan, "How futile are mindless assessments of roundoff").

    Returns:
        Between 0 and 180; exactly 0 for equal ones; NaN where either is zero or not finite.
    """
    squares = torch.zeros(2, dtype=torch.float64, device="cpu")
    for a, b in _pieces(ours, theirs):
        squares += torch.stack([a.square().sum(), b.square().sum()]).cpu()
    norm_a, norm_b = squares.sqrt().tolist()
    if not (norm_a > 0 and norm_b > 0 and math.isfinite(norm_a) and math.isfinite(norm_b)):
        return math.nan
    gaps = torch.zeros(2, dtype=torch.float64, device="cpu")
    for a, b in _pieces(ours, theirs):
        u, v = a / norm_a, b / norm_b
        gaps += torch.stack([(u - v).square().sum(), (u + v).square().sum()]).cpu()
    apart, together = gaps.sqrt().tolist()
    return 2 * math.degrees(math.atan2(apart, together))


def _pieces(
    ours: Sequence[Tensor | None], theirs: Sequence[Tensor | None]
) -> Iterable[tuple[Tensor, Tensor]]:
    """fp64, on the device of `ours`, a bounded number of elements at a time."""
    for a, b in zip(ours, theirs, strict=True):
        present = a if a is not None else b
        if present is None:
            continue
        flat_a = (torch.zeros_like(present) if a is None else a).detach().reshape(-1)
        flat_b = (torch.zeros_like(present) if b is None else b).detach().reshape(-1)
        device = flat_a.device if a is not None else flat_b.device
        for one, other in zip(
            flat_a.split(PIECE_ELEMENTS), flat_b.split(PIECE_ELEMENTS), strict=True
        ):
            yield one.to(device).double(), other.to(device).double()
