"""The leaks of one variant of a comparison: whose logits and whose token gradients change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from flexvarlen.patches.isolation.documents import units_of
from flexvarlen.patches.isolation.tokens import halves_of, with_other_tokens
from flexvarlen.patches.isolation.trace import changed_tokens
from flexvarlen.reference.model import IGNORE_INDEX
from flexvarlen.verify.experiment.step import causal_step
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


def find_leak(
    variant: Variant, batch: Row, seed: int, progress: Callable[[], None] | None = None
) -> Leak:
    """Replace documents, or segments, by halves; see whose logits and token gradients change.

    While some are replaced, only the watched ones have a loss, divided by the same count as
    before. So the gradient of a watched token must keep its bits, and that of a replaced one be
    exactly zero, whatever the order of additions. Above segments that are replaced, gradients
    include those segments' losses, and are compared with a step that leaves these out too.
    """
    units = units_of(batch.layout())
    vocabulary = variant.model.config.vocab_size
    labels = batch.labels()
    counted = batch.counted(labels)
    step = partial(causal_step, variant, gradients=True)
    before = step(batch, labels, counted)
    repeats = None
    if variant.train:
        again = step(batch, labels, counted)
        repeats = _same_bits(before.embedding_gradients, again.embedding_gradients)
        del again
    outputs: set[int] = set()
    gradients: set[int] = set()
    for index, (replaced, watched) in enumerate(halves_of(range(len(units)), units)):
        tokens = [units[unit].tokens for unit in replaced]
        ids = with_other_tokens(batch.input_ids[0], tokens, vocabulary, seed + index)
        losses = torch.full_like(labels, IGNORE_INDEX)
        for unit in watched:
            losses[:, units[unit].tokens] = labels[:, units[unit].tokens]
        other = replace(batch, input_ids=ids[None])
        after = step(other, losses, counted)
        expected = before.embedding_gradients
        if repeats and units[replaced[0]].depth > 0:
            expected = step(batch, losses, counted).embedding_gradients
        for unit in watched:
            rows = units[unit].tokens
            if not _same_bits(before.logits[rows], after.logits[rows]):
                outputs.add(unit)
            if repeats and not _same_bits(expected, after.embedding_gradients, rows):
                gradients.add(unit)
        if after.embedding_gradients is not None:
            gradients |= {
                unit
                for unit in replaced
                if not bool((after.embedding_gradients[units[unit].tokens] == 0).all())
            }
        if progress is not None:
            progress()
    return Leak(frozenset(outputs), frozenset(gradients) if variant.train else None, repeats)


def _same_bits(first: Tensor | None, second: Tensor | None, rows: slice | None = None) -> bool:
    assert first is not None
    assert second is not None
    rows = slice(None) if rows is None else rows
    return not bool(changed_tokens(first[rows], second[rows]).any())
