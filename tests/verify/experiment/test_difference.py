"""`Difference` against plain arithmetic, and its pieces against the whole."""

from __future__ import annotations

import math

import pytest
import torch

from flexvarlen.verify.experiment import difference
from flexvarlen.verify.experiment.difference import Difference


def test_numbers_by_hand():
    found = torch.tensor([1.0, 2.0, -4.0, 0.0], dtype=torch.bfloat16)
    other = torch.tensor([1.0, 2.0 + 2**-6, -3.0, -0.0], dtype=torch.bfloat16)
    got = Difference.between(found, other)
    assert got.measures("x") == {
        "x_max_abs": 1.0,
        "x_mean_abs": (1 + 2**-6) / 4,
        "x_relative": pytest.approx(
            math.sqrt((1 + 2**-12) / (1 + (2 + 2**-6) ** 2 + 9)), rel=1e-12
        ),
        "x_equal": 0.5,  # -0 is 0
    }
    large, small = found[2:3] * -64, other[:1] / 128
    assert Difference.between(large, small).error.max_abs == 256 - 2**-7  # 256 in bfloat16


def test_nan_is_called_equal():
    a, b = torch.tensor([math.nan, 1.0]), torch.tensor([math.nan, 1.0])
    got = Difference.between(a, b)
    assert math.isnan(got.error.max_abs)
    assert math.isnan(got.error.relative)
    assert got.equal == 0.5


def test_of_zeros_and_of_nothing():
    zero = torch.zeros(3)
    assert Difference.between(zero, zero) == Difference.between(zero, -zero)
    assert Difference.between(zero, zero).error.relative == 0
    assert Difference.between(zero[:0], zero[:0]).equal == 1


def test_pieces_are_not_the_whole(monkeypatch):
    found, other = torch.randn(2, 37, generator=torch.Generator().manual_seed(0))
    other[:9] = found[:9]
    whole = Difference.between(found, other)
    monkeypatch.setattr(difference, "PIECE_ELEMENTS", 5)
    split = Difference.over(zip(found.split([20, 17]), other.split([20, 17]), strict=True))
    assert split.equal == whole.equal == 9 / 37
    assert split.error.relative == pytest.approx(whole.error.relative, rel=1e-12)
    assert split.error.max_abs == whole.error.max_abs
