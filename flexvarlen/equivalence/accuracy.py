"""How far a variant's outputs and gradients are from the oracle, and whether that is too far.

The rule: an output may be off by twice what the peer is off plus the dtype's rounding (its eps
times the size of the values), a gradient by three times that. The peer is every document alone, in
the same dtype, with transformers' eager attention: what is within the rule cannot be told from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from flexvarlen.equivalence.batch import PackedBatch
from flexvarlen.equivalence.oracle import Answer

OUTPUT_FACTOR, GRADIENT_FACTOR = 2.0, 3.0


@dataclass(frozen=True)
class Gap:
    """A tensor's largest and mean absolute error, and the size of the true values."""

    max: float
    mean: float
    scale: float
    mean_scale: float

    @classmethod
    def between(cls, found: Tensor, expected: Tensor) -> Gap:
        """In the wider dtype, where `found` is; reads the device once."""
        expected = expected.to(found.device)
        error = (found.to(expected.dtype) - expected).abs()
        size = expected.abs()
        values = torch.stack([error.max(), error.mean(), size.max(), size.mean()])
        return cls(*(float(value) for value in values.tolist()))


@dataclass(frozen=True)
class Errors:
    """Errors against the oracle.

    Attributes:
        logits: over all tokens of the sampled documents.
        loss: absolute.
        loss_value: the oracle's.
        argmax: share of tokens whose most likely next token is the oracle's.
        gradients: of each parameter, by name; empty for a forward alone.
    """

    logits: Gap
    loss: float
    loss_value: float
    argmax: float
    gradients: dict[str, Gap] = field(default_factory=dict)

    @property
    def gradient_max(self) -> float | None:
        """The largest error of any parameter's gradient."""
        return _largest([gap.max for gap in self.gradients.values()])

    @property
    def gradient_mean(self) -> float | None:
        """The mean, over parameters, of their gradients' mean errors."""
        means = [gap.mean for gap in self.gradients.values()]
        return sum(means) / len(means) if means else None


@dataclass(frozen=True)
class Judgement:
    """The errors beside what the rule allows.

    Attributes:
        logits_limit, loss_limit: the largest errors allowed.
        worst_parameter: whose gradient comes nearest to its limit, or passes it furthest.
        worst_share: its error divided by its limit.
        why_wrong: one sentence, or None if all is within the rule.
    """

    logits_limit: float
    loss_limit: float
    worst_parameter: str | None
    worst_share: float | None
    why_wrong: str | None


def errors_of_answer(answer: Answer, oracle: Answer) -> Errors:
    """Of documents run alone, the same ones."""
    pairs = (
        (found, expected)
        for (_, _, found), (_, _, expected) in zip(answer.logits(), oracle.logits(), strict=True)
    )
    gaps = {
        name: Gap.between(answer.gradients[name], expected)
        for name, expected in oracle.gradients.items()
    }
    return _errors(pairs, answer.loss, oracle, gaps)


def errors_of_packed(
    logits_TV: Tensor, loss: float, batch: PackedBatch, oracle: Answer, trained: nn.Module | None
) -> Errors:
    """Of a packed variant.

    Args:
        logits_TV: `[T, V]`.
        loss: over the labels of the oracle's documents.
        batch: where the documents are.
        oracle: the sampled documents alone.
        trained: the model whose parameters have the gradients; None for a forward alone.
    """
    spans = batch.spans()

    def pairs() -> Iterator[tuple[Tensor, Tensor]]:
        for document, offset, expected in oracle.logits():
            start = spans[document][0] + offset
            yield logits_TV[start : start + len(expected)], expected

    gaps = {}
    if trained is not None:
        named = dict(trained.named_parameters())
        for name, expected in oracle.gradients.items():
            found = named[name].grad
            gaps[name] = (
                Gap(float("inf"), float("inf"), 0.0, 0.0)  # no gradient came
                if found is None
                else Gap.between(found, expected)
            )
    return _errors(pairs(), loss, oracle, gaps)


def _errors(
    pairs: Iterator[tuple[Tensor, Tensor]], loss: float, oracle: Answer, gaps: dict[str, Gap]
) -> Errors:
    parts: list[tuple[Gap, int]] = []
    same, tokens = 0, 0
    for found, expected in pairs:
        parts.append((Gap.between(found, expected), expected.numel()))
        same += int((found.argmax(-1) == expected.argmax(-1)).sum())
        tokens += len(expected)
    elements = sum(count for _, count in parts)
    largest, largest_value = (
        _largest([gap.max for gap, _ in parts]),
        _largest([gap.scale for gap, _ in parts]),
    )
    assert largest is not None
    assert largest_value is not None
    logits = Gap(
        largest,
        sum(gap.mean * count for gap, count in parts) / elements,
        largest_value,
        sum(gap.mean_scale * count for gap, count in parts) / elements,
    )
    return Errors(logits, abs(loss - oracle.loss), abs(oracle.loss), same / tokens, gaps)


def _largest(values: list[float]) -> float | None:
    """The maximum; NaN if any is (Python's `max` would lose it)."""
    if not values:
        return None
    return next((value for value in values if value != value), max(values))


def judge(errors: Errors, peer: Errors, dtype: torch.dtype) -> Judgement:
    """Apply the rule."""
    rounding = torch.finfo(dtype).eps
    logits_limit = OUTPUT_FACTOR * (peer.logits.max + rounding * peer.logits.scale)
    mean_limit = OUTPUT_FACTOR * (peer.logits.mean + rounding * peer.logits.mean_scale)
    loss_limit = OUTPUT_FACTOR * (peer.loss + rounding * peer.loss_value)
    checks = [
        ("largest error of the logits", errors.logits.max, logits_limit, OUTPUT_FACTOR),
        ("mean error of the logits", errors.logits.mean, mean_limit, OUTPUT_FACTOR),
        ("error of the loss", errors.loss, loss_limit, OUTPUT_FACTOR),
    ]
    worst_parameter, worst_share = None, None
    for name, gap in errors.gradients.items():
        allowed = peer.gradients[name]
        limit = GRADIENT_FACTOR * (allowed.max + rounding * allowed.scale)
        share = gap.max / limit if limit else (0.0 if gap.max == 0 else float("inf"))
        if worst_share is None or not share <= worst_share:  # NaN is the worst
            worst_parameter, worst_share = name, share
            worst_check = (f"error of the gradient of {name}", gap.max, limit, GRADIENT_FACTOR)
    if worst_parameter is not None:
        checks.append(worst_check)
    why = None
    for what, error, limit, factor in checks:
        if not error <= limit:  # also when the error is NaN
            why = (
                f"{what} is {error:.2g}, more than {limit:.2g} "
                f"({factor:g} × that of each document alone in {str(dtype).removeprefix('torch.')},"
                " and rounding)."
            )
            break
    return Judgement(logits_limit, loss_limit, worst_parameter, worst_share, why)
