"""`Difference`, held against plain arithmetic on a few numbers, and its parts against the whole."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexvarlen.drift import difference
from flexvarlen.drift.difference import Difference, ulp


def test_numbers_by_hand():
    found = torch.tensor([1.0, 2.0, -4.0, 0.0], dtype=torch.bfloat16)
    truth = torch.tensor([1.0, 2.0 + 2**-6, -3.0, -0.0], dtype=torch.bfloat16)
    got = Difference.between(found, truth)
    assert got.max_abs == 1.0
    assert got.mean_abs == (1 + 2**-6) / 4
    assert got.relative == pytest.approx(
        math.sqrt((1 + 2**-12) / (1 + (2 + 2**-6) ** 2 + 9)), rel=1e-12
    )
    assert got.max_ulps == 32.0  # numbers between 4 and 8 are 2**-5 apart
    assert got.mean_ulps == 33 / 4
    assert got.equal == 0.5  # -0 is 0
    assert not got.is_zero


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_neighbour_is_one_ulp_away(dtype):
    x = torch.tensor([1.0, 1.9, 3.0, 1e-3, 500.0], dtype=dtype)
    bits = {2: torch.int16, 4: torch.int32}[x.element_size()]
    above = (x.view(bits) + 1).view(dtype)
    got = Difference.between(above, x)
    assert got.max_ulps == got.mean_ulps == 1.0
    assert got.equal == 0.0


def test_ulps_of_zero_and_of_subnormals_are_finite():
    smallest = torch.finfo(torch.float32).tiny * torch.finfo(torch.float32).eps
    x = torch.tensor([0.0, smallest])
    assert ulp(x, torch.float32).tolist() == [smallest, smallest]
    assert Difference.between(torch.tensor([smallest]), torch.tensor([0.0])).max_ulps == 1.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_ulps_are_bounded_where_the_truth_is_next_to_zero(dtype):
    truth = torch.tensor([0.0, torch.finfo(dtype).tiny, -1.0, 1.999], dtype=dtype)
    for found in (torch.full_like(truth, 0.1), torch.ones_like(truth)):
        got = Difference.between(found, truth)
        assert 1 < got.mean_ulps < got.max_ulps <= 4 / torch.finfo(dtype).eps


def test_nan_is_seen_unless_both_have_it():
    a, b = torch.tensor([math.nan, 1.0]), torch.tensor([math.nan, 1.0])
    same = Difference.between(a, b)
    assert same.is_zero
    assert same.finite == 0.5
    got = Difference.between(a, torch.tensor([0.0, 1.0]))
    assert math.isnan(got.max_abs)
    assert math.isnan(got.relative)
    assert got.equal == 0.5
    wide = Difference.between(a, b.double())
    assert wide.is_zero


def test_infinities():
    inf = math.inf
    same = Difference.between(torch.tensor([-inf]), torch.tensor([-inf]))
    assert same.is_zero
    assert same.finite == 1.0
    assert Difference.between(torch.tensor([1.0]), torch.tensor([-inf])).max_abs == inf


def test_against_fp64():
    truth = torch.tensor([1.0 + 2**-9, 2.0], dtype=torch.float64)
    got = Difference.between(truth.bfloat16(), truth)
    assert got.max_abs == 2**-9
    assert got.max_ulps == 0.25  # bfloat16 numbers at 1 are 2**-7 apart
    assert got.equal == 0.5


def test_of_zeros_alone():
    zeros = torch.zeros(3)
    assert Difference.between(zeros, zeros).relative == 0.0
    assert Difference.between(zeros + 1, zeros).relative == math.inf
    assert Difference.between(zeros[:0], zeros[:0]).is_zero


def test_other_shapes():
    with pytest.raises(ValueError, match=r"one shape, got \(2,\) and \(3,\)"):
        Difference.between(torch.zeros(2), torch.zeros(3))


@given(st.lists(st.integers(0, 40), min_size=1, max_size=5), st.integers(1, 17))
def test_pieces_are_the_whole(sizes, piece):
    generator = torch.Generator().manual_seed(sum(sizes))
    found, truth = (torch.randn(sum(sizes), generator=generator) for _ in range(2))
    truth[::3] = found[::3]
    whole = Difference.between(found, truth)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(difference, "_PIECE", piece)
        parts = Difference.over(zip(found.split(sizes), truth.split(sizes), strict=True))
    for name in ("max_abs", "equal", "finite", "elements"):
        assert getattr(parts, name) == getattr(whole, name)
    for name in ("mean_abs", "relative", "mean_ulps"):
        assert getattr(parts, name) == pytest.approx(getattr(whole, name), rel=1e-9)


def test_as_measures_and_back():
    got = Difference.between(torch.randn(5), torch.randn(5))
    measures = got.measures("dq")
    assert measures["dq_max_abs"] == got.max_abs
    assert Difference.of_measures(measures, "dq") == got
    assert Difference.of_measures(measures, "dk") is None
