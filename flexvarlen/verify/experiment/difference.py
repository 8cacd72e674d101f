"""`Difference`: how far one tensor is from another, in the numbers that every table uses."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from flexvarlen.reference.acceptance import Error
from flexvarlen.reference.attention import PIECE_ELEMENTS


@dataclass(frozen=True)
class Difference:
    """Two tensors of one shape.

    Attributes:
        error: how far the first is from the second; NaN if a value is.
        equal: share of elements that are equal; NaN equals nothing.
    """

    error: Error
    equal: float

    @classmethod
    def between(cls, found: Tensor, other: Tensor) -> Difference:
        """In fp64; any dtypes, on one device. Reads the device."""
        return cls.over([(found, other)])

    @classmethod
    def over(cls, pairs: Iterable[tuple[Tensor, Tensor]]) -> Difference:
        """The difference over several pairs, as if each side were one long tensor."""
        pieces: list[tuple[Tensor, ...]] = []
        for pair in pairs:
            halves = (x.detach().reshape(-1).split(PIECE_ELEMENTS) for x in pair)
            pieces += zip(*halves, strict=True)
        error = Error.of_pieces((found.double(), other.double()) for found, other in pieces)
        elements = max(1, sum(len(found) for found, _ in pieces))
        differing = sum(int((found != other).sum()) for found, other in pieces)
        return cls(error, (elements - differing) / elements)

    def measures(self, prefix: str) -> dict[str, Any]:
        """As entries of a record's measures: `{prefix}_relative` and so on."""
        return {
            f"{prefix}_max_abs": self.error.max_abs,
            f"{prefix}_mean_abs": self.error.mean_abs,
            f"{prefix}_relative": self.error.relative,
            f"{prefix}_equal": self.equal,
        }
