"""The leaks of one variant of a comparison: whose logits and whose token gradients change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from flexvarlen.patches.isolation.tokens import halves, with_other_tokens
from flexvarlen.patches.isolation.trace import changed_tokens
from flexvarlen.verify.batch import PackedBatch
from flexvarlen.verify.variants import Variant, counted_labels


@dataclass(frozen=True)
class Leak:
    """The documents that others' tokens reached.

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
    variant: Variant, batch: PackedBatch, seed: int, progress: Callable[[], None] | None = None
) -> Leak:
    """Replace documents by halves; see whose logits, and whose token gradients, change.

    While documents are replaced, only the watched ones have a loss, divided by the same count as
    before. So the gradient of a watched token must keep its bits, and that of a replaced one be
    exactly zero, whatever the order of additions.
    """
    spans = batch.spans()
    vocabulary = variant.model.config.vocab_size
    counted = counted_labels(batch.labels())
    before = variant.step(batch, batch.labels(), counted, gradients=True)
    repeats = None
    if variant.train:
        again = variant.step(batch, batch.labels(), counted, gradients=True)
        repeats = _same_bits(before.embedding_gradients, again.embedding_gradients)
        del again
    outputs: set[int] = set()
    gradients: set[int] = set()
    for index, (replaced, watched) in enumerate(halves(len(spans))):
        ids = with_other_tokens(batch.input_ids[0], spans, replaced, vocabulary, seed + index)
        other = PackedBatch(ids[None], batch.lengths, batch.source)
        after = variant.step(other, other.labels(watched), counted, gradients=True)
        for document in watched:
            rows = slice(*spans[document])
            if not _same_bits(before.logits[rows], after.logits[rows]):
                outputs.add(document)
            if repeats and not _same_bits(
                before.embedding_gradients, after.embedding_gradients, rows
            ):
                gradients.add(document)
        if after.embedding_gradients is not None:
            gradients |= {
                document
                for document in replaced
                if not bool((after.embedding_gradients[slice(*spans[document])] == 0).all())
            }
        if progress is not None:
            progress()
    return Leak(frozenset(outputs), frozenset(gradients) if variant.train else None, repeats)


def _same_bits(first: Tensor | None, second: Tensor | None, rows: slice | None = None) -> bool:
    assert first is not None
    assert second is not None
    rows = slice(None) if rows is None else rows
    return not bool(changed_tokens(first[rows], second[rows]).any())
