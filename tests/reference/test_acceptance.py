"""The acceptance rule: what is too far from the reference is refused, by each of three numbers."""

from __future__ import annotations

import math

import pytest
import torch

from flexvarlen.reference.acceptance import Error, allowed, why_apart, why_wrong


def test_error_of_pieces_is_that_of_the_whole():
    reference = torch.randn(10, 4, dtype=torch.float64)
    found = reference.float() * 1.01
    whole = Error.between(found, reference)
    pieces = Error.of_pieces(zip(found.split([3, 0, 7]), reference.split([3, 0, 7]), strict=True))
    assert whole.relative == pytest.approx(0.01, rel=1e-4)
    assert whole.max_abs == pytest.approx(0.01 * whole.max_size, rel=1e-4)
    for name in ("max_abs", "mean_abs", "relative", "max_size", "mean_size"):
        assert getattr(pieces, name) == pytest.approx(getattr(whole, name)), name


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("number", ["max_abs", "mean_abs", "relative"])
def test_each_number_alone_is_enough_to_refuse(number, gradient):
    baseline = Error(0.5, 0.1, 0.2, 4.0, 1.0)
    limits = allowed(baseline, torch.bfloat16, gradient=gradient)
    factor = 3 if gradient else 2
    assert limits.max_abs == factor * (0.5 + 2**-7 * 4.0)
    assert limits.relative == factor * (0.2 + 2**-7)
    within = Error(*limits, 4.0, 1.0)
    assert why_wrong("out", within, baseline, torch.bfloat16, gradient=gradient) is None
    beyond = Error(**{**within.__dict__, number: getattr(within, number) * 1.01})
    reason = why_wrong("out", beyond, baseline, torch.bfloat16, gradient=gradient)
    assert reason is not None
    assert limits.ratio(beyond) == pytest.approx(1.01)


@pytest.mark.parametrize("position", [0, 1])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_and_infinity_are_wrong(value, position):
    reference = torch.ones(2)
    found = reference.clone()
    found[position] = value
    error = Error.between(found, reference)
    baseline = Error.between(reference * 1.5, reference)
    assert "out: largest error" in why_wrong("out", error, baseline, torch.float32)
    assert not allowed(baseline, torch.float32).ratio(error) <= 1
    assert not allowed(baseline, torch.float32).ratio(Error.missing()) <= 1


def test_zero_reference():
    zero = torch.zeros(3)
    exact = Error.between(zero, zero)
    assert why_wrong("dq", exact, exact, torch.float32) is None
    assert why_wrong("dq", Error.between(zero + 1e-3, zero), exact, torch.float32) is not None


def test_shapes_must_agree():
    with pytest.raises(ValueError, match="shape of the reference"):
        Error.between(torch.zeros(3, 1), torch.zeros(3))


def test_against_the_baseline_alone_one_error_more_is_allowed():
    eps = torch.finfo(torch.float32).eps
    for gradient, factor in ((False, 3), (True, 4)):
        most = factor * (1e-3 + eps)
        assert why_apart("x", 0.99 * most, 1e-3, torch.float32, gradient=gradient) is None
        for difference in (1.01 * most, math.nan):
            reason = why_apart("x", difference, 1e-3, torch.float32, gradient=gradient)
            assert reason.startswith("x differs")
