"""The verdict on a training drift, by a stated rule, from rows alone.

Rounding differs between two kernels, so two trainings part, and in the end no weight is the same.
What matters is whether they part by more than two trainings that differ in the seed alone.

A variant is run on the baseline's first seed: the same parameters, the same rows in the same order.
Its verdict is

1. "beyond seed noise", if the mean loss of its last quarter of steps is more than 2σ away from the
   baseline's, or any loss is not finite. σ is the standard deviation (n - 1 in the denominator) of
   that mean over n >= 3 seeds of the baseline, each with other initial parameters and another
   order of the same rows;
2. else "not rounding", if its gradient at the first step, where the parameters are still the same,
   is more than 3 times as far (in degrees) from the baseline's as that of the rounding twin: the
   baseline with each initial parameter moved by one unit in its last place, up or down. For a small
   model learns in spite of a wrong attention, and losses alone would not tell;
3. else "within seed noise, by losses alone", where the variant's angle or the twin's was not taken;
4. else "within seed noise".
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from flexvarlen.equivalence.variants import THEIRS
from flexvarlen.rows import Row

SUITE = "drift-training"
VERDICT = "verdict"
ROUNDING = "rounding"
"""The variant of the baseline's rounding twin."""

WITHIN, BEYOND, NOT_ROUNDING = "within seed noise", "beyond seed noise", "not rounding"
BY_LOSSES = f"{WITHIN}, by losses alone"
PASSED = (WITHIN, BY_LOSSES)
BAND_SIGMAS = 2.0
# As everywhere for gradients. Right kernels gave 0.06 to 0.6 of the twin's angle (CPU, all dtypes).
BAND_ANGLES = 3.0


def last_quarter(losses: Sequence[float]) -> float:
    """Their mean over the last quarter of the steps."""
    count = math.ceil(len(losses) / 4)
    return math.fsum(losses[-count:]) / count


def verdict_row(rows: Sequence[Row]) -> Row:
    """The verdict on a comparison's runs, by the rule above; from its rows alone.

    Its measures: `baseline`, `n`, `seeds`, `sigma`, `baseline_loss`, `band` (what a variant may
    differ by), `rounding_angle` and `angle_limit` (degrees, at the first step; None where no angles
    were taken), `sigmas` (the largest difference of a variant, in σ), and `variants`: for each that
    ran its `loss`, `difference`, `sigmas`, first `angle`, whether all losses are `equal`, and
    `verdict`.
    """
    home = rows[0]
    name = str(home.measures["baseline"])
    ran = [row for row in rows if row.status == "ok"]
    noise = [row for row in ran if row.case["variant"] == name]
    twin = next((row for row in ran if row.case["variant"] == ROUNDING), None)
    means = [last_quarter(row.measures["losses"]) for row in noise]
    sigma = statistics.stdev(means)
    angle = None if twin is None else first_angle(twin)
    limit = None if angle is None else BAND_ANGLES * angle
    others = [row for row in ran if row.case["variant"] not in (name, ROUNDING)]
    found = {row.case["variant"]: _judge(row, home, sigma, limit) for row in others}
    return Row(
        SUITE,
        home.case | {"variant": VERDICT},
        "wrong" if any(_is_bad(name, entry) for name, entry in found.items()) else "ok",
        _why(found),
        {
            "baseline": name,
            "n": len(means),
            "seeds": [row.case["seed"] for row in noise],
            "sigma": sigma,
            "baseline_loss": last_quarter(home.measures["losses"]),
            "band": BAND_SIGMAS * sigma,
            "rounding_angle": angle,
            "angle_limit": limit,
            "sigmas": max((entry["sigmas"] for entry in found.values()), key=_size, default=0.0),
            "variants": found,
        },
        home.environment,
    )


def first_angle(row: Row) -> float | None:
    """Degrees between a run's gradient and the baseline's at the first step; None: not taken."""
    angles: list[float] = row.measures["angles"]
    return angles[0] if angles else None


def _judge(row: Row, home: Row, sigma: float, angle_limit: float | None) -> dict[str, Any]:
    loss, truth = last_quarter(row.measures["losses"]), last_quarter(home.measures["losses"])
    gap = abs(loss - truth)
    angle = first_angle(row)
    # Comparisons with NaN are False: a NaN anywhere is beyond.
    if not (gap <= BAND_SIGMAS * sigma and all(map(math.isfinite, row.measures["losses"]))):
        verdict = BEYOND
    elif angle is None or angle_limit is None:
        verdict = BY_LOSSES
    else:
        verdict = WITHIN if angle <= angle_limit else NOT_ROUNDING
    return {
        "loss": loss,
        "difference": loss - truth,
        "sigmas": gap / sigma if sigma > 0 else (0.0 if gap == 0 else math.inf),
        "angle": angle,
        "equal": row.measures["losses"] == home.measures["losses"],
        "verdict": verdict,
    }


def _is_bad(name: str, entry: dict[str, Any]) -> bool:
    """transformers' own may be wrong (it leaks): that is a finding, not a failure of ours."""
    return entry["verdict"] not in PASSED and not name.startswith(THEIRS)


def _size(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _why(found: dict[str, dict[str, Any]]) -> str | None:
    bad = [f"{name}: {e['verdict']}" for name, e in found.items() if e["verdict"] not in PASSED]
    return f"{', '.join(bad)}." if bad else None
