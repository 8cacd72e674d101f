"""The check of one variant, as measures: errors, leaks, other packings of its tokens."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flexvarlen.measure import watch_compilation
from flexvarlen.patches.isolation.documents import units_of
from flexvarlen.patches.isolation.tokens import (
    Unit,
    halves_of,
    with_other_images,
    with_other_tokens,
)
from flexvarlen.patches.isolation.trace import changed_tokens
from flexvarlen.reference.model import IGNORE_INDEX
from flexvarlen.verify.compare.accuracy import error_measures, limit_measures
from flexvarlen.verify.experiment.alone import Alone, gradients_of
from flexvarlen.verify.experiment.batch import PackedBatch
from flexvarlen.verify.experiment.measure import first_run
from flexvarlen.verify.experiment.step import StepResult, causal_step
from flexvarlen.verify.experiment.tree_batch import Row
from flexvarlen.verify.experiment.variant import Variant

LISTED_DOCUMENTS = 8  # that a sentence names


@dataclass(frozen=True)
class Checks:
    """What variants are checked against.

    Attributes:
        reference: the reference of the batch.
        others: other packings of its tokens, over which recompilations are counted.
        last: the reference of the last packing, forward alone; None without other packings.
        compile: whether variants are compiled.
        seed: random seed of replaced tokens.
    """

    reference: Alone
    others: Sequence[PackedBatch]
    last: Alone | None
    compile: bool
    seed: int


def check_variant(variant: Variant, checks: Checks, say: Callable[[str], None]) -> dict[str, Any]:
    """Run all checks on a variant that was not called yet; return measures for its record.

    Args:
        say: called with a description of the current step.
    """
    reference, row = checks.reference, checks.reference.row
    labels = row.labels(reference.documents)
    step = partial(causal_step, variant, row, labels, row.counted(labels))
    say(f"checking {variant.name}: errors")
    with _fresh_cache(checks.compile):
        out, measures = first_run(step)
    loss, gradients = (out.loss, gradients_of(variant.model)) if variant.train else (None, None)
    errors = reference.errors(out.logits, loss, gradients)
    why = reference.why_wrong(errors)
    measures |= error_measures(errors) | limit_measures(reference, errors)
    del out, gradients
    say(f"checking {variant.name}: does a {row.unit} see another?")
    leak = find_leak(variant, row, checks.seed)
    say(f"checking {variant.name}: other packings")
    more, why_other = _other_packings(variant, checks)
    measures |= more | {
        "leaked_outputs": len(leak.outputs),
        "leaked_gradients": None if leak.gradients is None else len(leak.gradients),
        "leaked_documents": len(leak.documents),
        "backward_repeats": leak.backward_repeats,
    }
    return measures | _verdict(leak, why or why_other, row.unit)


def _fresh_cache(compile: bool) -> AbstractContextManager[Any]:
    """Use new Inductor caches, so that each variant is compiled cold."""
    if not compile:
        return nullcontext()
    from torch._inductor.utils import fresh_cache

    # Kept on disk until the process ends: compiled code may be loaded from there late.
    cache: AbstractContextManager[Any] = fresh_cache(delete=False)
    return cache


def _other_packings(variant: Variant, checks: Checks) -> tuple[dict[str, Any], str | None]:
    """Count recompilations over other packings; say what is wrong with the last's logits, or None.

    Skipped for a caller's batch, as its form of marking documents is unknown for other packings.
    """
    out, as_it_stands = None, variant.given(checks.reference.row) is not None
    others = () if as_it_stands else checks.others
    with watch_compilation() as stats:
        for other in others:
            labels = other.labels()
            out = causal_step(variant, other, labels, other.counted(labels))
    measures: dict[str, Any] = {
        "other_packings": len(others),
        "recompiles": stats.recompilations,
        "recompile_reasons": list(stats.first_reasons()),
    }
    if out is None or checks.last is None:
        return measures, None
    last = checks.last
    errors = last.errors(out.logits)
    measures["repacked_logits_max"] = error_measures(errors)["logits_max"]
    measures["repacked_logits_limit"] = limit_measures(last, errors)["logits_limit"]
    wrong = last.why_wrong(errors)
    return measures, None if wrong is None else f"on another packing of the tokens, {wrong}"


def _verdict(leak: Leak, why_wrong: str | None, unit: str) -> dict[str, Any]:
    if not leak.documents:
        return {"verdict": "right" if why_wrong is None else "wrong", "why": why_wrong}
    tokens, others = "other documents' tokens", "other documents"
    if unit == "segment":
        tokens = "the tokens of segments off their paths"
        others = "segments that they must not"
    said = []
    if leak.outputs:
        said.append(f"the logits of {_listed(leak.outputs, unit)} change with {tokens}")
    if further := leak.documents - leak.outputs:
        units = _listed(further, unit)
        said.append(f"the token gradients of {units} depend on, or reach, {others}")
    return {"verdict": "leaks", "why": f"{'; '.join(said)}."}


def _listed(found: Collection[int], unit: str) -> str:
    """List documents or segments by their numbers.

    >>> _listed({3}, "document"), _listed(range(9), "segment")
    ('document 3', 'segments 0, 1, 2, 3, 4, 5, 6, 7 and 1 more')
    """
    listed = ", ".join(map(str, sorted(found)[:LISTED_DOCUMENTS]))
    more = len(found) - LISTED_DOCUMENTS
    tail = f" and {more} more" if more > 0 else ""
    return f"{unit}{'s' if len(found) > 1 else ''} {listed}{tail}"


# ---- leaks ----


@dataclass(frozen=True)
class Leak:
    """The documents, or segments of trees, that were reached by tokens they must not see.

    Attributes:
        outputs: documents whose logits changed in any bit.
        gradients: documents whose token gradients changed in any bit, or were not zero where only
            other documents had a loss; None if the variant has no backward.
        backward_repeats: whether two backwards of the same batch gave the same bits. If not (atomic
            additions), token gradients are only tested for being zero.
    """

    outputs: frozenset[int]
    gradients: frozenset[int] | None
    backward_repeats: bool | None

    @property
    def documents(self) -> frozenset[int]:
        """All documents that were reached."""
        return self.outputs | (self.gradients or frozenset())


def find_leak(variant: Variant, batch: Row, seed: int) -> Leak:
    """Replace documents, or segments, by halves; see whose logits and token gradients change.

    While some are replaced, only the watched ones have a loss, divided by the same count as
    before. So the gradient of a watched token must keep its bits, and that of a replaced one be
    exactly zero, whatever the order of additions. Above segments that are replaced, gradients
    include those segments' losses, and are compared with a step without these losses.
    """
    units = units_of(batch.layout())
    everyone = range(len(units))
    vocabulary = variant.model.config.get_text_config().vocab_size
    labels, images = batch.labels(), batch.images
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
        ids = batch.input_ids[0]
        ids = with_other_tokens(ids, tokens, vocabulary, seed + index, images.special)
        pixels = with_other_images(images.with_types, tokens, None)
        other = replace(batch, input_ids=ids[None], images=images.with_pixels(pixels))
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
