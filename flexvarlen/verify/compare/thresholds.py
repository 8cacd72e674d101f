"""`--fail-above MEASURE=VALUE`: a user's own limits, and the record furthest above one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from flexvarlen.report.records import Record
from flexvarlen.report.table import nan_last


class Threshold(NamedTuple):
    """A limit.

    Attributes:
        name: of a measure, or the end of several: "relative" is all that end with "_relative".
        limit: the largest value that passes.
    """

    name: str
    limit: float

    @classmethod
    def of(cls, text: str) -> Threshold:
        """From the command line.

        Raises:
            ValueError: no `MEASURE=VALUE`, or a value that is no number from 0 up.

        >>> Threshold.of("dq_relative=1e-2")
        Threshold(name='dq_relative', limit=0.01)
        """
        name, _, value = text.partition("=")
        try:
            limit = float(value)
        except ValueError:
            limit = math.nan
        if not (name.strip() and limit >= 0):
            raise ValueError(
                "fail_above must be MEASURE=VALUE, with a name as in the records and a number "
                f"from 0, got {text!r}; write for example out_relative=0.01."
            )
        return cls(name.strip(), limit)

    def measures(self, record: Record) -> dict[str, float]:
        """The sizes of what it limits in a record."""
        return {
            name: size
            for name, value in record.measures.items()
            if (name == self.name or name.endswith(f"_{self.name}"))
            and (size := _size(value)) is not None
        }


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
            for measure, value in threshold.measures(record).items()
        ]
        text = f"fail-above {threshold.name}={threshold.limit:g}"
        if not found:
            known = dict.fromkeys(name for record in records for name in record.measures)
            sentences.append(f"{text}: no record has such a measure, only {', '.join(known)}.")
            continue
        value, measure, name = max(found, key=lambda one: nan_last(one[0]))
        if not value <= threshold.limit:
            sentences.append(f"{text}: {measure} is {value:.3g} in {name}.")
    return sentences


def _size(value: Any) -> float | None:
    """The absolute value; of a list its largest; NaN if one is; None of what is no number."""
    values = value if isinstance(value, list | tuple) else [value]
    numbers = [abs(float(x)) for x in values if type(x) in (int, float)]
    if not numbers:
        return None
    return math.nan if any(map(math.isnan, numbers)) else max(numbers)
