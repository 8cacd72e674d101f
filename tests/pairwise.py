"""Fewer combinations of parameters: each value of one meets each value of every other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, combinations, product
from typing import Any

import pytest


def pairwise(factors: Mapping[str, Sequence[Any]]) -> list[tuple[Any, ...]]:
    """Combinations, one value a factor, that hold every pair of values of two factors.

    Greedy: a combination begins with a pair that is still missing; each further value is the one
    with the most missing pairs, the first of equals. So it is the same in every process.
    """
    values = list(factors.values())
    if len(values) < 2:
        return list(product(*values))
    missing = {
        frozenset([(i, a), (j, b)]): None
        for i, j in combinations(range(len(values)), 2)
        for a in range(len(values[i]))
        for b in range(len(values[j]))
    }
    made = []
    while missing:
        chosen = dict(sorted(next(iter(missing))))
        for factor in range(len(values)):
            if factor not in chosen:
                gained = [
                    sum(frozenset([(factor, n), other]) in missing for other in chosen.items())
                    for n in range(len(values[factor]))
                ]
                chosen[factor] = gained.index(max(gained))
        for pair in combinations(chosen.items(), 2):
            missing.pop(frozenset(pair), None)
        made.append(tuple(chosen[factor] for factor in range(len(values))))
    return [tuple(of[n] for of, n in zip(values, row, strict=True)) for row in sorted(made)]


def sampled(factors: Mapping[str, Sequence[Any]], *, whole: bool) -> list[Any]:
    """Parameters of a test: pairwise combinations of the factors' values, or all of them.

    Values with the mark `gpu` and those without are sampled apart: each part holds every pair.
    """
    params = [[_param(value) for value in values] for values in factors.values()]
    rows = list(product(*params))
    if not whole:
        on_gpu = [[x for x in values if _needs_gpu(x)] or values for values in params]
        elsewhere = [[x for x in values if not _needs_gpu(x)] for values in params]
        parts = [elsewhere] if on_gpu == params == elsewhere else [elsewhere, on_gpu]
        rows = [row for part in parts if all(part) for row in pairwise(dict(enumerate(part)))]
    return [
        pytest.param(
            *chain(*(x.values for x in row)),
            marks=list(chain(*(x.marks for x in row))),
            id="-".join(x.id for x in row),
        )
        for row in rows
    ]


def _param(value: Any) -> Any:
    """The value as a parameter with an id."""
    if not isinstance(value, type(pytest.param())):
        return pytest.param(value, id=str(value))
    name = value.id or "-".join(map(str, value.values))
    return pytest.param(*value.values, marks=value.marks, id=name)


def _needs_gpu(param: Any) -> bool:
    return any(mark.name == "gpu" for mark in param.marks)
