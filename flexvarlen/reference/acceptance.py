"""The acceptance rule: how far a result may be from the fp64 reference.

A result is right if its error is at most twice that of the low-precision baseline (a plain
computation in the same dtype, each document alone), three times for gradients. The dtype's rounding
of the values is added to the baseline's error, which may be zero by luck. This holds for the
largest error, the mean error and the relative error (‖x − reference‖ / ‖reference‖).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from typing import NamedTuple

import torch
from torch import Tensor

OUTPUT_FACTOR, GRADIENT_FACTOR = 2.0, 3.0


@dataclass(frozen=True)
class Error:
    """The error of a tensor, and the size of its reference.

    Attributes:
        max_abs, mean_abs: largest and mean absolute error.
        relative: ‖x − reference‖ / ‖reference‖.
        max_size, mean_size: largest and mean absolute value of the reference.
    """

    max_abs: float
    mean_abs: float
    relative: float
    max_size: float
    mean_size: float

    @classmethod
    def between(cls, found: Tensor, reference: Tensor) -> Error:
        """Compute the error in the wider dtype, on `found`'s device; NaN if a value is. Syncs once.

        >>> Error.between(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0])).relative
        0.1
        """
        return cls.of_pieces([(found, reference)])

    @classmethod
    def of_pieces(cls, pieces: Iterable[tuple[Tensor, Tensor]]) -> Error:
        """The error of a tensor that comes in pieces, each with its reference."""
        sums: Tensor | None = None  # sums of absolute and squared errors and values
        maxima: Tensor | None = None
        count = 0
        for found, reference in pieces:
            if found.shape != reference.shape:
                raise ValueError(
                    f"found must have the shape of the reference, {tuple(reference.shape)}, got "
                    f"{tuple(found.shape)}."
                )
            if found.numel() == 0:
                continue
            wide = torch.promote_types(found.dtype, reference.dtype)
            expected = reference.detach().to(found.device, wide)
            both = ((found.detach().to(wide) - expected).abs(), expected.abs())
            new_maxima = torch.stack([x.max() for x in both]).double()
            new_sums = torch.stack(
                [total for x in both for total in (x.sum(dtype=torch.float64), _squares(x))]
            )
            maxima = new_maxima if maxima is None else maxima.maximum(new_maxima)
            sums = new_sums if sums is None else sums + new_sums
            count += found.numel()
        if sums is None or maxima is None:
            return cls(0.0, 0.0, 0.0, 0.0, 0.0)
        max_abs, max_size, error, squared_error, size, squared_size = torch.cat(
            [maxima, sums]
        ).tolist()
        relative = _over(squared_error, squared_size)
        return cls(max_abs, error / count, math.sqrt(relative), max_size, size / count)

    @classmethod
    def missing(cls) -> Error:
        """The error of a result that is missing."""
        return cls(math.inf, math.inf, math.inf, 0.0, 0.0)

    def at_least(self, relative: float) -> Error:
        """This error, or one of `relative` times the reference's size, whichever is larger."""
        sizes = (self.max_size, self.mean_size)
        least = Error(relative * self.max_size, relative * self.mean_size, relative, *sizes)
        return self.or_larger(least)

    def or_larger(self, other: Error) -> Error:
        """The larger of each number and the other's; NaN if one is.

        For the baseline of a short document, which may be exact by chance over a few tokens.
        """
        return Error(*(largest(pair) for pair in zip(astuple(self), astuple(other), strict=True)))


class Limits(NamedTuple):
    """The largest errors that the rule allows."""

    max_abs: float
    mean_abs: float
    relative: float

    def ratio(self, error: Error) -> float:
        """Error divided by limit, the largest of the three; above 1, or NaN, is wrong."""
        found = (error.max_abs, error.mean_abs, error.relative)
        return largest([_over(x, limit) for x, limit in zip(found, self, strict=True)])


def allowed(baseline: Error, dtype: torch.dtype, *, gradient: bool = False) -> Limits:
    """The limits that the rule sets for a result of this dtype.

    Args:
        baseline: the error of the low-precision baseline.
        dtype: dtype of the result.
        gradient: whether it is a gradient.
    """
    factor = GRADIENT_FACTOR if gradient else OUTPUT_FACTOR
    eps = torch.finfo(dtype).eps
    return Limits(
        factor * (baseline.max_abs + eps * baseline.max_size),
        factor * (baseline.mean_abs + eps * baseline.mean_size),
        factor * (baseline.relative + eps),
    )


def why_wrong(
    name: str, error: Error, baseline: Error, dtype: torch.dtype, *, gradient: bool = False
) -> str | None:
    """Apply the rule: one sentence about what is wrong, or None.

    Args:
        name: name of the result, to start the sentence.
        error: error of the result.
        baseline, dtype, gradient: as in `allowed`.
    """
    limits = allowed(baseline, dtype, gradient=gradient)
    if not all(map(math.isfinite, limits)):
        return f"{name}: the baseline in {str(dtype).removeprefix('torch.')} is not finite itself."
    checks = (
        ("largest error", error.max_abs, limits.max_abs),
        ("mean error", error.mean_abs, limits.mean_abs),
        ("relative error", error.relative, limits.relative),
    )
    for what, found, limit in checks:
        if not found <= limit:  # also when the error is NaN
            factor = GRADIENT_FACTOR if gradient else OUTPUT_FACTOR
            return (
                f"{name}: {what} {found:.2g} is more than {limit:.2g} ({factor:g} × that of the "
                f"baseline in {str(dtype).removeprefix('torch.')}, plus rounding)."
            )
    return None


def why_apart(
    name: str, difference: float, baseline: float, dtype: torch.dtype, *, gradient: bool = False
) -> str | None:
    """Apply the rule with a baseline and no reference: one sentence, or None.

    A right result is at most `factor` errors of the baseline from the reference, so at most one
    more from the baseline.

    Args:
        name: name of the result, to start the sentence.
        difference: relative difference of the result from the baseline.
        baseline: the baseline's relative error, as known from a part that has a reference.
        dtype, gradient: as in `allowed`.
    """
    factor = GRADIENT_FACTOR if gradient else OUTPUT_FACTOR
    most = (factor + 1) * (baseline + torch.finfo(dtype).eps)
    if difference <= most:
        return None
    return (
        f"{name} differs from a plain computation of each document by {difference:.2g}, relative, "
        f"where {most:.2g} is allowed"
    )


def largest(values: Iterable[float]) -> float:
    """The maximum, or 0 without values; NaN if one is NaN, which Python's `max` may lose.

    >>> largest([1.0, float("nan"), 2.0])
    nan
    """
    return max(values, key=lambda x: (math.isnan(x), x), default=0.0)


def _squares(x: Tensor) -> Tensor:
    return x.double().square().sum()


def _over(a: float, b: float) -> float:
    return a / b if b else (0.0 if a == 0 else a * math.inf)
