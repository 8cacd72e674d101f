"""A sample of combinations that leaves out a pair would never run what only that pair breaks."""

from __future__ import annotations

from itertools import combinations, product
from math import prod

import pytest

from tests.pairwise import pairwise, sampled

FACTORS = [
    {"a": "xyz", "b": "12"},
    {"a": range(3), "b": range(8), "c": range(6)},
    {"a": range(5), "b": range(2), "c": range(21), "d": range(2), "e": range(3)},
    {"a": range(1), "b": range(4), "c": range(1)},
]


def pairs_of(rows, count):
    return {(i, j, row[i], row[j]) for row in rows for i, j in combinations(range(count), 2)}


@pytest.mark.parametrize("factors", FACTORS, ids=lambda x: "x".join(x))
def test_every_pair_is_there_in_few_combinations(factors):
    rows, sizes = pairwise(factors), sorted(len(values) for values in factors.values())
    assert pairs_of(rows, len(factors)) == pairs_of(product(*factors.values()), len(factors))
    assert len(rows) == len(set(rows)) <= min(prod(sizes), 1.5 * sizes[-1] * sizes[-2] + 1)
    assert rows == pairwise(factors)  # workers must collect the same tests


def test_one_factor_keeps_all_its_values():
    assert pairwise({"a": "xyz"}) == [("x",), ("y",), ("z",)]


def test_what_needs_a_gpu_is_sampled_by_itself():
    """Else pairs of the others would be covered by tests alone that the CPU does not run."""
    gpu = [pytest.param(n, marks=pytest.mark.gpu) for n in ("g", "h")]
    factors = {"kernel": ["c", *gpu], "mask": "123", "rows": "xy"}
    rows = [tuple(param.values) for param in sampled(factors, whole=False)]
    for kernels in ({"c"}, {"g", "h"}):
        own = [row for row in rows if row[0] in kernels]
        assert pairs_of(own, 3) == pairs_of(product(sorted(kernels), "123", "xy"), 3)
    assert len(sampled(factors, whole=True)) == 3 * 3 * 2
