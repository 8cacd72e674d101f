"""The verdict on trainings that differ in their attention alone.

Rounding differs between two kernels, so two trainings diverge, and in the end no weight is the
same. What matters is whether they are further apart than two trainings that differ in the seed.

A variant starts as the baseline's first seed does: the same parameters, the same rows in the same
order. Its verdict is

1. "beyond seed noise", if the mean loss of its last quarter of steps is more than 2σ away from the
   baseline's, or any loss is not finite. σ is the standard deviation (n - 1 in the denominator) of
   that mean over n >= 3 seeds of the baseline, each with other initial parameters and another
   order of the same rows;
2. else "not rounding", if its gradient at the first step, where the parameters are still the same,
   is more than 3 times as far (in degrees) from the baseline's as that of the rounding twin: the
   baseline with each initial parameter moved by one unit in its last place, up or down. A small
   model learns in spite of a wrong attention, so losses alone would not show one;
3. else "within seed noise, by losses alone", where one of the two angles was not measured;
4. else "within seed noise".
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

WITHIN, BEYOND, NOT_ROUNDING = "within seed noise", "beyond seed noise", "not rounding"
BY_LOSSES = f"{WITHIN}, by losses alone"
PASSED = (WITHIN, BY_LOSSES)
ROUNDING = "rounding"
"""The variant of the baseline's rounding twin."""

BAND_SIGMAS = 2.0
# As everywhere for gradients. Right kernels gave 0.06 to 0.6 of the twin's angle (CPU, all dtypes).
BAND_ANGLES = 3.0

RULE = (
    f"Beyond seed noise: the mean loss of the last quarter of the steps is more than "
    f"{BAND_SIGMAS:g} σ from the baseline's. Not rounding: the first gradient is more than "
    f"{BAND_ANGLES:g} times as far from the baseline's as after moving every parameter by one unit "
    "in the last place (rounding). σ is over the baseline's seeds."
)


def last_quarter(losses: Sequence[float]) -> float:
    """Their mean over the last quarter of the steps."""
    count = math.ceil(len(losses) / 4)
    return math.fsum(losses[-count:]) / count


@dataclass(frozen=True)
class Noise:
    """What variants are compared with.

    Attributes:
        losses: of the baseline's first seed, step by step.
        sigma: standard deviation of the last quarter's mean loss over the seeds.
        angle: degrees of the rounding twin's first gradient; None: not measured.
    """

    losses: list[float]
    sigma: float
    angle: float | None

    @classmethod
    def of(cls, seeds: Sequence[list[float]], angle: float | None) -> Noise:
        """From the losses of each of the baseline's seeds."""
        return cls(seeds[0], statistics.stdev(map(last_quarter, seeds)), angle)

    def measures(self, losses: list[float], angle: float | None) -> dict[str, Any]:
        """The verdict on a variant's losses and first angle, and the numbers that it follows from.

        Comparisons with NaN are False: a NaN anywhere is beyond.
        """
        difference = last_quarter(losses) - last_quarter(self.losses)
        gap = abs(difference)
        if not (gap <= BAND_SIGMAS * self.sigma and all(map(math.isfinite, losses))):
            verdict = BEYOND
        elif angle is None or self.angle is None:
            verdict = BY_LOSSES
        else:
            verdict = WITHIN if angle <= BAND_ANGLES * self.angle else NOT_ROUNDING
        return {
            "verdict": verdict,
            "loss_difference": difference,
            "sigmas": gap / self.sigma if self.sigma else (0.0 if gap == 0 else math.inf),
            "equal": losses == self.losses,
        }
