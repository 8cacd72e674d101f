"""How well a hypothesis explains what a kernel gave; factors, and the names of well-known ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from flexvarlen.drift.op.judge import Limit

# A hypothesis that leaves less than this share of the error explains it, though what it leaves is
# outside the rule: its own rounding may be larger than the truth's. One that leaves more than half
# does not, though what it leaves is just inside.
NEARLY_ALL, HALF = 0.1, 0.5
# Factors closer than this are the same: what low-precision outputs tell of a scale.
SAME_FACTOR = 2e-3


@dataclass(frozen=True)
class Fit:
    """How well a hypothesis explains what was found.

    Attributes:
        sentence: the hypothesis.
        left: mean error that it leaves, as a share of that from the truth.
        ratio: the error that it leaves over what the rule allows.
        before: the error from the truth over what the rule allows.
    """

    sentence: str
    left: float
    ratio: float
    before: float

    @classmethod
    def of(cls, sentence: str, found: Tensor, supposed: Tensor, exact: Tensor, limit: Limit) -> Fit:
        """Of tensors of one shape: what was found, what the hypothesis gives, what is right."""
        found = found.double()
        left, before = (found - supposed).abs(), (found - exact).abs()
        mean, mean_before = float(left.mean()), float(before.mean())
        return cls(
            sentence,
            mean / mean_before if mean_before else 1.0,
            limit.ratio(float(left.max()), mean),
            limit.ratio(float(before.max()), mean_before),
        )

    @property
    def explains(self) -> bool:
        """Whether it leaves what the rule allows, or nearly nothing of the error."""
        return self.left <= (HALF if self.ratio <= 1 else NEARLY_ALL)

    def said(self, of: str) -> str:
        """Its sentence, with what supports it."""
        return (
            f"{self.sentence}; so computed, {of} is off by {self.ratio:.2g} times what the rule "
            f"allows, in place of {self.before:.3g} times."
        )


def best_of(fits: Iterable[Fit]) -> Fit:
    """The one that leaves least."""
    return min(fits, key=lambda fit: fit.left)


def near(factor: float, known: dict[str, float]) -> str:
    """The name of the known factor that this one is, in brackets; else empty.

    >>> near(0.6932, {"ln 2": 0.69315})
    ' (ln 2)'
    """
    for name, value in known.items():
        if abs(factor - value) <= SAME_FACTOR * abs(value):
            return f" ({name})"
    return ""


def least_squares(found: Tensor, exact: Tensor) -> float:
    """The factor f for which f * exact is nearest to found; 0 if exact is 0."""
    size = float(exact.square().sum())
    return float((found.double() * exact).sum()) / size if size else 0.0
