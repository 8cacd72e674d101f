"""`DriftReport`: records of a drift as tables and sentences; `Threshold`: a user's own limits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from flexvarlen.measure.machine import without_paths
from flexvarlen.report.records import Record, in_short, not_run
from flexvarlen.report.table import Table, nan_last, share
from flexvarlen.verify.compare.drift_tables import (
    BAD,
    DISPENSABLE,
    RATIOS,
    Measured,
    Records,
    measured,
    never_ran,
    tables,
)
from flexvarlen.verify.experiment.variant import is_ours
from flexvarlen.verify.rollout import report as rollout


class Threshold(NamedTuple):
    """`--fail-above MEASURE=VALUE`: a limit.

    Attributes:
        name: name of a measure, or a suffix: "relative" covers all that end with "_relative".
        limit: the largest value that passes.
    """

    name: str
    limit: float

    @classmethod
    def of(cls, text: str) -> Threshold:
        """Parse a threshold from the command line.

        Raises:
            ValueError: the text is not `MEASURE=VALUE`, or the value is not a number of at least 0.

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
        """The sizes of the measures of a record that this threshold limits."""
        return {
            name: size
            for name, value in record.measures.items()
            if (name == self.name or name.endswith(f"_{self.name}"))
            and (size := _size(value)) is not None
        }


@dataclass(frozen=True)
class DriftReport:
    """Records of `operator_drift`, `model_drift` or a `records.jsonl`."""

    records: tuple[Record, ...]

    @property
    def passed(self) -> bool:
        """Whether no backend of flexvarlen is wrong or failed; transformers' own may be."""
        return not any(map(_is_finding, self.records))

    @property
    def compared(self) -> bool:
        """Whether a variant ran."""
        return any(r.status in ("ok", "wrong") for r in self.records)

    def tables(self, width: int | None = None) -> list[Table]:
        """A table for each suite and machine, with the columns that fit into `width`."""
        found = tables(self.records)
        return found if width is None else [x.narrowed(width, DISPENSABLE) for x in found]

    def sentences(self) -> list[str]:
        """All sentences of the report: findings, other problems, then one sentence per suite.

        Records of a variant with the same reason share a sentence. The last sentences say why
        backends could not run at all.
        """
        idle = never_ran(self.records)
        found: dict[str, list[str]] = {}
        for record in sorted(self.records, key=lambda r: (not _is_finding(r), r.status not in BAD)):
            if record.status != "ok" and record not in idle:
                verb = VERBS.get(record.status, "did not run")
                text = f"{record.case['variant']} {verb}: {in_short(record.reason or '')}"
                found.setdefault(text, []).append(_case(record))
        said = [f"{text} ({'; '.join(dict.fromkeys(at))})" for text, at in found.items()]
        for suite, sentence in SENTENCES.items():
            ran = [r for r in self.records if r.suite == suite and r.status == "ok"]
            said += [sentence(ran)] if ran else []
        said = said or ["Nothing was compared."]
        return list(map(without_paths, [*said, *not_run(idle)]))

    def broken_limits(self, limits: Sequence[Threshold]) -> list[str]:
        """A sentence for each limit that is exceeded, with the worst record.

        A limit on a measure that no record has counts as exceeded: else a run that measures nothing
        would succeed.
        """
        ran, sentences = [r for r in self.records if r.status in ("ok", "wrong")], []
        for limit in limits:
            found = [(x, name, r) for r in ran for name, x in limit.measures(r).items()]
            text = f"fail-above {limit.name}={limit.limit:g}"
            if not found:
                known = dict.fromkeys(name for record in ran for name in record.measures)
                sentences.append(f"{text}: no record has such a measure, only {', '.join(known)}.")
                continue
            value, name, worst = _worst(found)
            if not value <= limit.limit:
                sentences.append(f"{text}: {name} is {value:.3g} in {_name(worst)}.")
        return sentences

    def save(self, path: Path) -> None:
        """Write tables and sentences as Markdown, and the picture of a rollout beside it."""
        parts = [table.markdown() for table in self.tables()]
        text = without_paths("\n\n".join(parts))
        path.write_text("\n\n".join([text, *self.sentences()]) + "\n", encoding="utf-8")
        rollout.draw([r for r in self.records if r.suite == "drift-rollout"], path.parent)


def _size(value: Any) -> float | None:
    """The absolute value, or the largest of a list; NaN if one is NaN; None for other types."""
    values = value if isinstance(value, list | tuple) else [value]
    numbers = [abs(float(x)) for x in values if type(x) in (int, float)]
    if not numbers:
        return None
    return math.nan if any(map(math.isnan, numbers)) else max(numbers)


def _is_finding(record: Record) -> bool:
    return record.status in BAD and is_ours(record.case["variant"])


def _worst(found: Sequence[Measured]) -> Measured:
    return max(found, key=lambda one: nan_last(one[0]))


def _name(record: Record) -> str:
    return f"{record.case['variant']}: {_case(record)}"


def _case(record: Record) -> str:
    names = ("name", "model", "dtype", "comparison", "pass")
    return ", ".join(str(record.case[name]) for name in names if record.case.get(name))


def _count(records: Records) -> str:
    return f"{len(records)} comparison{'s' * (len(records) != 1)}"


VERBS = {"wrong": "is wrong", "failed": "failed", "oom": "did not fit"}


def _operators(ran: Records) -> str:
    found = measured(ran, RATIOS)
    if not found:
        return f"{_count(ran)} of attention, no errors against the reference."
    ratio, name, record = _worst(found)
    part = name.rpartition("_")[2]
    return (
        f"{_count(ran)} of attention: all errors are within the acceptance rule, the largest "
        f"{share(ratio)} of what it allows ({part} of {_name(record)})."
    )


def _models(ran: Records) -> str:
    differences = []
    for what, name in (("logits", "logits_relative"), ("gradients", "gradient_relative")):
        if found := measured(ran, [name]):
            size, _, worst = _worst(found)
            where = f" ({_name(worst)})" if size else ""
            differences.append(f"{what} differ by at most {size:.1e}{where}")
    return f"{_count(ran)} of models within the acceptance rule: relative {', '.join(differences)}."


SENTENCES = {"drift-op": _operators, "drift-model": _models, "drift-rollout": rollout.sentence}
"""A sentence about a suite's records that ran without findings."""
