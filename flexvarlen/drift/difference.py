"""`Difference`: how far one tensor is from another, in the numbers that every report uses."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PIECE = 1 << 24  # elements that are widened to fp64 at once: 128 MiB a tensor


@dataclass(frozen=True)
class Difference:
    """Of two tensors of one shape, the second of which is taken as the truth.

    Attributes:
        max_abs, mean_abs: of the absolute differences. NaN where a NaN stands in one tensor alone.
        relative: Frobenius norm of the difference over that of the truth; 0 if both are 0.
        max_ulps, mean_ulps: differences in units in the last place: the distance to the next
            number of the first tensor's dtype, at the size of the larger of the two. At most
            4 / eps, which only numbers of opposite sign reach: where the truth is next to 0, its
            own units would be as small as the dtype's smallest number.
        equal: share of elements that are equal; bit for bit where the dtypes are the same, but
            that -0 equals 0. A NaN equals a NaN.
        elements: how many.
        finite: share of elements that are finite in both, or infinite in both alike (an LSE of
            nothing seen).
    """

    max_abs: float
    mean_abs: float
    relative: float
    max_ulps: float
    mean_ulps: float
    equal: float
    elements: int
    finite: float = 1.0

    @classmethod
    def between(cls, found: Tensor, truth: Tensor) -> Difference:
        """Reads the device.

        Args:
            found, truth: floating, of one shape, on one device; any dtypes.

        Raises:
            ValueError: other shapes.
        """
        return cls.over([(found, truth)])

    @classmethod
    def over(cls, pairs: Iterable[tuple[Tensor, Tensor]]) -> Difference:
        """Of several pairs, as if each side were one long tensor; found ones of one dtype."""
        total: Tensor | None = None
        elements = 0
        for found, truth in pairs:
            if found.shape != truth.shape:
                raise ValueError(
                    f"found and truth must have one shape, got {tuple(found.shape)} and "
                    f"{tuple(truth.shape)}; compare the same documents."
                )
            pieces = zip(
                found.detach().reshape(-1).split(_PIECE),
                truth.detach().reshape(-1).split(_PIECE),
                strict=True,
            )
            for one, other in pieces:
                sums = _sums(one, other)
                total = sums if total is None else _joined(total, sums)
            elements += found.numel()
        if total is None or elements == 0:
            return cls(0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0)
        max_abs, sum_abs, squares, truth_squares, max_ulps, sum_ulps, equal, finite = total.tolist()
        relative = relative_norm(squares, truth_squares)
        return cls(
            max_abs,
            sum_abs / elements,
            relative,
            max_ulps,
            sum_ulps / elements,
            equal / elements,
            elements,
            finite / elements,
        )

    @property
    def is_zero(self) -> bool:
        """Whether every element is equal."""
        return self.equal == 1.0

    def measures(self, prefix: str) -> dict[str, Any]:
        """As entries of `Row.measures`: `{prefix}_max_abs` and so on."""
        return {f"{prefix}_{name}": value for name, value in asdict(self).items()}

    @classmethod
    def of_measures(cls, measures: dict[str, Any], prefix: str) -> Difference | None:
        """What `measures` wrote under that prefix, or None."""
        known = {name: measures.get(f"{prefix}_{name}") for name in cls.__dataclass_fields__}
        if known["max_abs"] is None:
            return None
        return cls(**{name: value for name, value in known.items() if value is not None})


def relative_norm(squares: float, truth_squares: float) -> float:
    """The root of a difference's sum of squares over the truth's; 0 if both are 0."""
    if truth_squares:
        return float((squares / truth_squares) ** 0.5)
    return squares if squares != squares or squares == 0 else float("inf")


_MAXIMA = (0, 4)


def _sums(found: Tensor, truth: Tensor) -> Tensor:
    """fp64 `[8]`: max, sum, squares, the truth's squares, max and sum of ULPs, equal, finite."""
    equal = _equal(found, truth)
    a, b = found.double(), truth.double()
    error = torch.where(equal, 0.0, (a - b).abs())
    ulps = error / ulp(torch.maximum(a.abs(), b.abs()), found.dtype)
    parts = [
        error.max() if error.numel() else error.sum(),
        error.sum(),
        error.square().sum(),
        b.square().sum(),
        ulps.max() if ulps.numel() else ulps.sum(),
        ulps.sum(),
        equal.sum().double(),
        ((a.isfinite() & b.isfinite()) | (a.isinf() & (a == b))).sum().double(),
    ]
    return torch.stack(parts)


def _joined(a: Tensor, b: Tensor) -> Tensor:
    largest = torch.maximum(a, b)  # keeps NaN
    joined = a + b
    for index in _MAXIMA:
        joined[index] = largest[index]
    return joined


def _equal(found: Tensor, truth: Tensor) -> Tensor:
    same = found == truth  # -0 and 0 too
    if found.dtype == truth.dtype:
        bits = _BITS[found.element_size()]
        return same | (found.contiguous().view(bits) == truth.contiguous().view(bits))
    return same | (found.isnan() & truth.isnan())


def ulp(x: Tensor, dtype: torch.dtype) -> Tensor:
    """fp64: the distance between neighbouring numbers of `dtype` where x lies.

    >>> ulp(torch.tensor([1.0, 1.5, 2.0, 0.0]), torch.bfloat16).tolist()[:3]
    [0.0078125, 0.0078125, 0.015625]
    """
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(x.double())
    size = torch.ldexp(torch.ones_like(x, dtype=torch.float64), exponent - 1)
    size = torch.where(x == 0, info.tiny, size)
    return (size * info.eps).clamp(min=info.tiny * info.eps)
