"""The leaks of one variant of a comparison: whose logits and whose token gradients change."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flexvarlen.patches.isolation.documents import units_of
from flexvarlen.patches.isolation.tokens import Unit, halves_of, with_other_tokens
from flexvarlen.patches.isolation.trace import changed_tokens
from flexvarlen.reference.model import IGNORE_INDEX
from flexvarlen.verify.experiment.step import StepResult, causal_step
from flexvarlen.verify.experiment.tree_batch import Row
from flexvarlen.verify.experiment.variant import Variant


@dataclass(frozen=True)
class Leak:
    """The documents, or segments of trees, that tokens reached which they do not see.

    Attributes:
        outputs: whose logits changed, in any bit.
        gradients: whose token gradients changed in any bit, or were not zero where only other
            documents had a loss; None if the variant has no backward.
        backward_repeats: whether two backwards of the same batch gave the same bits. Where not
            (atomic additions), token gradients are only tested for being zero.
    """

    outputs: frozenset[int]
    gradients: frozenset[int] | None
    backward_repeats: bool | None

    @property
    def documents(self) -> frozenset[int]:
        """All of them."""
        return self.outputs | (self.gradients or frozenset())


def find_leak(variant: Variant, batch: Row, seed: int) -> Leak:
    """Replace documents, or segments, by halves; see whose logits and token gradients change.

    While some are replaced, only the watched ones have a loss, divided by the same count as
    before. So the gradient of a watched token must keep its bits, and that of a replaced one be
    exactly zero, whatever the order of additions. Above segments that are replaced, gradients
    include those segments' losses, and are compared with a step that leaves these out too.
    """
    units = units_of(batch.layout())
    everyone = range(len(units))
    vocabulary = variant.model.config.vocab_size
    labels = batch.labels()
    counted = batch.counted(labels)

    def step(row: Row, losses: Tensor) -> StepResult:
        return causal_step(variant, row, losses, counted, gradients=True)

    def changed(first: StepResult, second: StepResult, among: Iterable[int]) -> set[int]:
        return _changed(units, first.embedding_gradients, second.embedding_gradients, among)

    before = step(batch, labels)
    backward_repeats = None
    if variant.train:
        backward_repeats = not changed(before, step(batch, labels), everyone)
    compares_bits = backward_repeats
    outputs: set[int] = set()
    gradients: set[int] = set()
    for index, (replaced, watched) in enumerate(halves_of(everyone, units)):
        tokens = [units[unit].tokens for unit in replaced]
        ids = with_other_tokens(batch.input_ids[0], tokens, vocabulary, seed + index)
        other = replace(batch, input_ids=ids[None])
        losses = torch.full_like(labels, IGNORE_INDEX)
        for unit in watched:
            losses[:, units[unit].tokens] = labels[:, units[unit].tokens]
        after = step(other, losses)
        outputs |= _changed(units, before.logits, after.logits, watched)
        if after.embedding_gradients is not None:
            zero = torch.zeros_like(after.embedding_gradients)
            gradients |= _changed(units, zero, after.embedding_gradients, replaced)
        if compares_bits:
            above = units[replaced[0]].depth > 0
            kept = losses if above else labels
            expected = step(batch, kept) if above else before
            reached = changed(expected, after, watched)
            if reached:
                # Bits that differ between two backwards of one batch: atomic additions, no leak.
                noisy = changed(expected, step(batch, kept), reached)
                noisy |= changed(after, step(other, losses), reached)
                gradients |= reached - noisy
                backward_repeats = backward_repeats and not noisy
    found = frozenset(gradients) if variant.train else None
    return Leak(frozenset(outputs), found, backward_repeats)


def _changed(
    units: Sequence[Unit], first: Tensor | None, second: Tensor | None, among: Iterable[int]
) -> set[int]:
    """Which of `among` have a token whose bits differ."""
    assert first is not None
    assert second is not None
    tokens = changed_tokens(first, second)
    return {unit for unit in among if bool(tokens[units[unit].tokens].any())}
