"""The verdict on trainings that differ in their attention alone: the one rule of seed noise.

Rounding differs between two kernels, so two trainings diverge, and in the end no weight is the
same. What matters is whether they are further apart than two trainings that differ in the seed. A
variant is trained from seeds of a baseline: the same parameters, the same rows in the same order.
Its verdict is

1. "beyond seed noise", if over its n seeds the final losses lie on average more than two standard
   errors, σ √(2/n), from the baseline's of the same seeds, or on one seed more than 4 σ, or if a
   loss is not finite. σ is the standard deviation of the baseline's final losses over at least 3
   seeds, each with other initial parameters and another order of the rows;
2. else "not rounding", if the gradient of a first step, where the parameters are still the same, is
   wrong. A small model learns in spite of a wrong attention, so losses alone would not show one;
3. else "no verdict", where σ is not known, or no seed is shared;
4. else "within seed noise".

Rounding alone separates two runs of one seed by about σ: one seed proves little, and the standard
errors are those of independent runs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

WITHIN, BEYOND = "within seed noise", "beyond seed noise"
NOT_ROUNDING, NO_VERDICT = "not rounding", "no verdict"

LAST_STEPS = 50
FEWEST_SEEDS = 3  # of the baseline: below, a standard deviation says nothing
MOST_STANDARD_ERRORS = 2.0  # of the mean
MOST_SIGMAS = 4.0  # of one seed


def final_loss(losses: Sequence[float]) -> float:
    """The mean over the last quarter of the steps, of 50 at most."""
    count = min(LAST_STEPS, math.ceil(len(losses) / 4))
    return math.fsum(losses[-count:]) / count


@dataclass(frozen=True)
class SeedNoise:
    """What variants are compared with.

    Attributes:
        sigma: the standard deviation of the baseline's final losses; None with fewer than 3 seeds.
    """

    sigma: float | None

    @classmethod
    def of(cls, final_losses: Sequence[float]) -> SeedNoise:
        """From the baseline's final loss of each seed."""
        enough = len(final_losses) >= FEWEST_SEEDS
        return cls(statistics.stdev(final_losses) if enough else None)

    def in_sigmas(self, difference: float) -> float:
        """The size of a difference in σ; NaN where σ is not known."""
        gap, sigma = abs(difference), math.nan if self.sigma is None else self.sigma
        return gap / sigma if sigma else (0.0 if gap == 0 else math.inf)

    def standard_errors(self, differences: Sequence[float]) -> float:
        """The size of their mean, in standard errors.

        Args:
            differences: of a variant's final loss from the baseline's, of each seed.
        """
        mean = math.fsum(differences) / len(differences)
        return self.in_sigmas(mean) / math.sqrt(2 / len(differences))

    def allowed(self, seeds: int) -> float:
        """The largest mean difference over this number of seeds that is within; NaN: not known."""
        sigma = math.nan if self.sigma is None else self.sigma
        return MOST_STANDARD_ERRORS * sigma * math.sqrt(2 / seeds)

    def verdict(
        self, differences: Sequence[float], losses: Iterable[float], right_gradient: bool
    ) -> str:
        """By the rule above.

        Comparisons with NaN are False: a NaN anywhere is beyond.

        Args:
            differences: of a variant's final loss from the baseline's, of each seed.
            losses: of all steps of all seeds.
            right_gradient: whether that of the first step is right.
        """
        is_known = self.sigma is not None and len(differences) > 0
        if is_known and not (
            self.standard_errors(differences) <= MOST_STANDARD_ERRORS
            and all(self.in_sigmas(difference) <= MOST_SIGMAS for difference in differences)
            and all(map(math.isfinite, losses))
        ):
            return BEYOND
        if not right_gradient:
            return NOT_ROUNDING
        return WITHIN if is_known else NO_VERDICT
