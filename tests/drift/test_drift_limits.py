"""`--fail-above`: a user's own limits on rows made by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from flexvarlen.drift.report.thresholds import (
    COMPARE_MEASURES,
    MODEL_MEASURES,
    OP_MEASURES,
    TRAINING_MEASURES,
    Measured,
    broken_limits,
    measured,
    parse_thresholds,
)
from flexvarlen.equivalence.report import Row as CompareRow
from tests.drift.drift_rows import every_row, model_rows, op_row, training_rows


def limits(text, rows, known=OP_MEASURES):
    return broken_limits(parse_thresholds([text], known), measured(rows))


@pytest.mark.parametrize(
    ("text", "broken"),
    [
        ("dq_relative=1e-2", None),
        (
            "dq_relative=1e-3",
            "dq_relative is 0.002 in drift-op name=64,64 dtype=bfloat16 backend=fa",
        ),
        ("relative=1", None),
        ("relative=0.1", "out_relative is 0.7 in drift-op name=64,64 dtype=bfloat16 backend=flex"),
        ("ratio_out=1", "ratio_out is 7 in"),
        ("max_ulps=0", "out_max_ulps is 2.1 in"),
    ],
)
def test_limit_is_passed_or_not(text, broken):
    said = limits(text, [row for row in every_row() if row.suite == "drift-op"])
    assert (said == []) if broken is None else (broken in said[0])


def test_peers_error_is_taken_for_ours():
    row = op_row("fa3", "exact", ratio=0.1, out=1e-3)
    assert row.measures["peer_out_relative"] == 0.5
    assert limits("relative=0.01", [row]) == []


def test_nan_is_below_a_limit():
    assert "nan" in limits("relative=1", [op_row("fa3", "place", out=math.nan)])[0]
    assert limits("relative=1", [op_row("fa3", "place", out=1.0)]) == []


def test_negative_difference_is_below_a_limit():
    assert limits("loss_difference=1e-3", model_rows("fa3", 2e-3), MODEL_MEASURES)
    assert not limits("loss_difference=1e-2", model_rows("fa3", 2e-3), MODEL_MEASURES)


def test_list_is_held_to_its_largest():
    rows = [Measured("run", {"angles": [1.0, 3.0, 2.0]})]
    assert "3" in broken_limits(parse_thresholds(["angles=2.5"], ["angles"]), rows)[0]
    assert broken_limits(parse_thresholds(["angles=3"], ["angles"]), rows) == []


def test_rounding_twin_is_held_to_a_limit():
    rows = training_rows()
    moved = replace(rows[3], measures=rows[3].measures | {"angles": [9.0]})
    assert rows[3].case["variant"] == "rounding"
    rows = [*rows[:3], moved, *rows[4:]]
    assert limits("angles=1", rows, TRAINING_MEASURES) == []
    assert limits("angles=0.15", rows, TRAINING_MEASURES)


def test_limit_on_nothing_passes():
    said = limits("dq_relative=1", [op_row("fa3", "place", out=0.0)])
    assert said == ["fail-above dq_relative=1: no row has such a measure."]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("dq_relative", "must be MEASURE=VALUE"),
        ("=1", "must name a measure"),
        ("relativ=1", "got 'relativ'; choose among out_max_abs"),
        ("kl_mean=1", "must name a measure of this command"),
        ("equal=1", "must name a measure"),
        ("relative=", "must have a value of at least 0"),
        ("relative=-1", "must have a value of at least 0"),
        ("relative=nan", "must have a value of at least 0"),
    ],
)
def test_bad_limit_is_a_sentence(text, words):
    with pytest.raises(ValueError, match=words):
        parse_thresholds([text], OP_MEASURES)


def test_known_measures_are_those_of_the_rows():
    """A name that no row ever has could never fail."""
    ops = [row for row in every_row() if row.suite == "drift-op"]
    found = {name for row in ops for name in row.measures}
    assert set(OP_MEASURES) <= found
    models = {name for row in model_rows("x", 1.0) for name in row.measures}
    assert set(MODEL_MEASURES) <= models
    assert set(COMPARE_MEASURES) <= set(CompareRow.__dataclass_fields__)
