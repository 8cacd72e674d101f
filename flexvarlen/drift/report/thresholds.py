"""`--fail-above MEASURE=VALUE`: a user's own limits, and the row that goes past one by most."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flexvarlen.drift.training.verdict import ROUNDING
from flexvarlen.rows import Row

# Of a Difference, those for which more is worse; `equal` and `elements` are no limits.
_DIFFERENCE = ("max_abs", "mean_abs", "relative", "max_ulps", "mean_ulps")
_PARTS = ("out", "lse", "dq", "dk", "dv")


def _differences(*prefixes: str) -> tuple[str, ...]:
    return tuple(f"{prefix}_{name}" for prefix in prefixes for name in _DIFFERENCE)


OP_MEASURES = (
    *_differences(*_PARTS),
    *(f"{of}ratio_{part}" for of in ("", "serial_") for part in _PARTS),
)
MODEL_MEASURES = (
    *_differences("logits", "hidden"),
    *("logprob_mean_abs", "logprob_max_abs", "logprob_p50", "logprob_p99"),
    *("kl_mean", "kl_max", "loss_difference", "gradient_relative", "worst_parameter_relative"),
)
TRAINING_MEASURES = ("sigmas", "angles")
COMPARE_MEASURES = (
    *("logits_max", "logits_mean", "loss_error", "gradient_max", "gradient_mean"),
    *("worst_gradient_share", "repacked_logits_max", "leaked_documents"),
    *("ms_p50", "peak_mib", "compile_s", "graph_breaks", "recompiles"),
)
"""What each command can be limited by: numbers of which more is worse."""


@dataclass(frozen=True)
class Threshold:
    """A limit.

    Attributes:
        text: as the user wrote it.
        measures: what it is for, by full names.
        limit: the largest value that passes.
    """

    text: str
    measures: tuple[str, ...]
    limit: float


@dataclass(frozen=True)
class Measured:
    """What a limit is held against: a row's name, for the sentence, and its measures."""

    name: str
    measures: Mapping[str, Any]


def parse_thresholds(texts: Sequence[str], known: Sequence[str]) -> list[Threshold]:
    """Limits from the command line.

    Args:
        texts: `MEASURE=VALUE` each; the measure is one of `known`, or an end of several of them:
            "relative" is all that end with "_relative".
        known: measures of the command.

    Raises:
        ValueError: another form, an unknown measure, or a value that is no number from 0 up.

    >>> parse_thresholds(["dq_relative=1e-2"], OP_MEASURES)
    [Threshold(text='dq_relative=1e-2', measures=('dq_relative',), limit=0.01)]
    """
    return [_threshold(text, known) for text in texts]


def _threshold(text: str, known: Sequence[str]) -> Threshold:
    name, equals, value = text.partition("=")
    name = name.strip()
    if not equals:
        raise ValueError(
            f"fail-above must be MEASURE=VALUE, got {text!r}; write for example {known[0]}=0.01."
        )
    meant = (name,) if name in known else tuple(k for k in known if name and k.endswith(f"_{name}"))
    if not meant:
        raise ValueError(
            f"fail-above must name a measure of this command, got {name!r}; choose among "
            f"{', '.join(known)}, or give the end of several, as max_abs."
        )
    try:
        limit = float(value)
    except ValueError:
        limit = math.nan
    if not limit >= 0:
        raise ValueError(
            f"fail-above must have a value of at least 0, got {value!r} for {name}; give a number."
        )
    return Threshold(text, meant, limit)


def measured(rows: Iterable[Row]) -> list[Measured]:
    """The rows of a drift that ran; not that of the rounding twin, which no backend answers for."""
    ran = [row for row in rows if row.status in ("ok", "wrong")]
    ran = [row for row in ran if row.case.get("variant") != ROUNDING]
    return [Measured(name_of(row), row.measures) for row in ran]


def name_of(row: Row) -> str:
    """A row in words: the entries of its case that say which it is.

    >>> name_of(Row("drift-op", {"name": "64", "dtype": "float32", "other": None}, "ok"))
    'drift-op name=64 dtype=float32'
    """
    left_out = ("lengths", "num_heads", "num_kv_heads", "head_dim", "causal", "window")
    shown = {k: v for k, v in row.case.items() if v is not None and k not in left_out}
    return " ".join([row.suite, *(f"{name}={value}" for name, value in shown.items())])


def broken_limits(thresholds: Iterable[Threshold], rows: Sequence[Measured]) -> list[str]:
    """A sentence for each limit that is passed, with its worst row; or that nothing was held to.

    A measure that no row has cannot pass: else a test that measures nothing would.
    """
    said = []
    for threshold in thresholds:
        found = [
            (value, measure, row.name)
            for row in rows
            for measure in threshold.measures
            if (value := _size(row.measures.get(measure))) is not None
        ]
        if not found:
            said.append(f"fail-above {threshold.text}: no row has such a measure.")
            continue
        value, measure, name = max(
            found, key=lambda one: math.inf if math.isnan(one[0]) else one[0]
        )
        if not value <= threshold.limit:
            said.append(f"fail-above {threshold.text}: {measure} is {value:.3g} in {name}.")
    return said


def _size(value: Any) -> float | None:
    """What is compared: the absolute value; of a list its largest; a NaN is above everything."""
    values = value if isinstance(value, list | tuple) else [value]
    numbers = [abs(float(one)) for one in values if isinstance(one, int | float)]
    if not numbers:
        return None
    return math.nan if any(map(math.isnan, numbers)) else max(numbers)
