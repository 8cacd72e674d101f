"""How far the gradients of a training are from the baseline's, as angles."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from flexvarlen.reference.attention import PIECE_ELEMENTS

Gradients = Sequence[Tensor | None]
"""Of all parameters in order; None is a gradient of zeros."""


class GradientLog:
    """The baseline's gradients at chosen steps, on the CPU, and angles of others to them."""

    def __init__(self, steps: Iterable[int]) -> None:
        self.steps = tuple(steps)
        self._kept: dict[int, Gradients] = {}

    def keep(self, step: int, gradients: Gradients) -> None:
        """Copy them, if the step is one of `steps`."""
        if step in self.steps:
            self._kept[step] = [None if g is None else g.to("cpu", copy=True) for g in gradients]

    def angle(self, step: int, gradients: Gradients) -> float | None:
        """Degrees to the kept ones; None at a step that is not one of `steps`. Reads the device."""
        return degrees_between(gradients, self._kept[step]) if step in self._kept else None


def degrees_between(ours: Gradients, theirs: Gradients) -> float:
    """The angle between two gradients, each as one vector.

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


def _pieces(ours: Gradients, theirs: Gradients) -> Iterable[tuple[Tensor, Tensor]]:
    """fp64, on the device of `ours`, a bounded number of elements at a time."""
    for a, b in zip(ours, theirs, strict=True):
        present = a if a is not None else b
        if present is None:
            continue
        both = (torch.zeros_like(present) if x is None else x.detach() for x in (a, b))
        pieces = (x.reshape(-1).split(PIECE_ELEMENTS) for x in both)
        for one, other in zip(*pieces, strict=True):
            yield one.to(present.device).double(), other.to(present.device).double()
