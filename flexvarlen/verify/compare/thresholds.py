"""`--fail-above MEASURE=VALUE`: a user's own limits, and the record furthest above one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from flexvarlen.report.records import Record
from flexvarlen.report.table import nan_last
from flexvarlen.verify.compare.drift_tables import PARTS, RATIOS


def _differences(*prefixes: str) -> tuple[str, ...]:
    """Of a `Difference`, the numbers of which more is worse."""
    return tuple(map("_".join, product(prefixes, ("max_abs", "mean_abs", "relative"))))


OP_MEASURES = (*_differences(*PARTS), *RATIOS)
MODEL_MEASURES = (
    *_differences("logits"),
    *("layers_relative", "documents_relative", "logprob_mean_abs", "logprob_max_abs"),
    *("logprob_p99", "kl_mean", "kl_max", "loss_difference"),
    *("gradient_relative", "worst_parameter_relative"),
)
MEASURES = {"drift-op": OP_MEASURES, "drift-model": MODEL_MEASURES}
"""What each suite can be limited by."""


@dataclass(frozen=True)
class Threshold:
    """A limit.

    Attributes:
        text: as the user wrote it.
        measures: full names of what it limits.
        limit: the largest value that passes.
    """

    text: str
    measures: tuple[str, ...]
    limit: float


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
            f"fail_above must be MEASURE=VALUE, got {text!r}; write for example {known[0]}=0.01."
        )
    meant = (name,) if name in known else tuple(k for k in known if name and k.endswith(f"_{name}"))
    if not meant:
        raise ValueError(
            f"fail_above must name a measure of this command, got {name!r}; choose among "
            f"{', '.join(known)}, or give the end of several, as max_abs."
        )
    try:
        limit = float(value)
    except ValueError:
        limit = math.nan
    if not limit >= 0:
        raise ValueError(
            f"fail_above must have a value of at least 0, got {value!r} for {name}; give a number."
        )
    return Threshold(text, meant, limit)


def broken_limits(
    thresholds: Iterable[Threshold],
    records: Sequence[Record],
    name_of: Callable[[Record], str],
) -> list[str]:
    """A sentence for each limit that is passed, with the worst record.

    A limit on a measure that no record has is passed too: else a run that measures nothing would
    succeed.
    """
    sentences = []
    for threshold in thresholds:
        found = [
            (value, measure, name_of(record))
            for record in records
            for measure in threshold.measures
            if (value := _size(record.measures.get(measure))) is not None
        ]
        if not found:
            sentences.append(f"fail-above {threshold.text}: no record has such a measure.")
            continue
        value, measure, name = max(found, key=lambda one: nan_last(one[0]))
        if not value <= threshold.limit:
            sentences.append(f"fail-above {threshold.text}: {measure} is {value:.3g} in {name}.")
    return sentences


def _size(value: Any) -> float | None:
    """The absolute value; of a list its largest; NaN if one is."""
    values = value if isinstance(value, list | tuple) else [value]
    numbers = [abs(float(one)) for one in values if isinstance(one, int | float)]
    if not numbers:
        return None
    return math.nan if any(map(math.isnan, numbers)) else max(numbers)
