"""The rule of seed noise: differences, means and gradients on either side of its limits."""

from __future__ import annotations

import math

import pytest

from flexvarlen.verify.experiment.seed_noise import (
    BEYOND,
    NO_VERDICT,
    NOT_ROUNDING,
    WITHIN,
    SeedNoise,
    final_loss,
)

NOISE = SeedNoise.of([1.0, 1.1, 1.2])
"""σ is 0.1: one seed may be 0.283 away, the mean of two 0.2, that of eight 0.1."""


def test_sigma_is_that_of_a_sample_of_three_seeds_at_least():
    assert NOISE.sigma == pytest.approx(0.1)
    assert SeedNoise.of([1.0, 1.1]).sigma is None


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ([0.28], WITHIN),
        ([0.29], BEYOND),
        ([-0.29], BEYOND),
        ([0.28, 0.28], BEYOND),  # no seed's alone
        ([0.19, 0.19], WITHIN),
        ([0.38, -0.38], WITHIN),
        ([0.41, -0.41], BEYOND),  # on average the same
        ([0.095] * 8, WITHIN),
        ([0.105] * 8, BEYOND),
        ([math.nan, 0.0], BEYOND),
        ([0.0], WITHIN),
    ],
)
def test_limit_is_on_the_mean_over_seeds_and_on_each(differences, verdict):
    assert NOISE.verdict(differences, [1.0], True) == verdict
    assert (abs(math.fsum(differences)) / len(differences) <= NOISE.allowed(len(differences))) == (
        NOISE.standard_errors(differences) <= 2
    )


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_loss_of_any_step_that_is_not_finite_is_beyond(loss):
    assert NOISE.verdict([0.0], [loss, 1.0, 1.0], True) == BEYOND


def test_wrong_gradient_comes_behind_the_losses_and_before_what_is_not_known():
    unknown = SeedNoise(None)
    assert NOISE.verdict([0.0], [1.0], False) == NOT_ROUNDING
    assert NOISE.verdict([0.5], [1.0], False) == BEYOND
    assert unknown.verdict([0.0], [1.0], False) == NOT_ROUNDING
    assert unknown.verdict([0.0], [1.0], True) == NOISE.verdict([], [], True) == NO_VERDICT


def test_seeds_that_agree_exactly_allow_no_difference():
    exact = SeedNoise.of([1.0] * 3)
    assert exact.verdict([0.0], [1.0], True) == WITHIN
    assert exact.verdict([1e-9], [1.0], True) == BEYOND
    assert exact.in_sigmas(1e-9) == math.inf


def test_last_quarter_is_rounded_up_and_at_most_50_steps():
    assert final_loss([9.0, 9.0, 9.0, 1.0]) == 1.0
    assert final_loss([9.0, 9.0, 9.0, 1.0, 3.0]) == 2.0
    assert final_loss([9.0] * 350 + [1.0] * 50) == 1.0
