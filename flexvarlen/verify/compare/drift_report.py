"""`DriftReport`: the records of a drift as tables and sentences, and whether they pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flexvarlen.measure.machine import without_paths
from flexvarlen.report.records import Record, in_short, not_run
from flexvarlen.report.table import Table, nan_last, share
from flexvarlen.verify.compare.drift_tables import (
    BAD,
    DISPENSABLE,
    RATIOS,
    Records,
    never_ran,
    tables,
)
from flexvarlen.verify.compare.thresholds import Threshold, broken_limits
from flexvarlen.verify.experiment.variant import is_ours


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
        """A table for each suite and machine; of the columns that fit into `width`."""
        found = tables(self.records)
        return found if width is None else [x.narrowed(width, DISPENSABLE) for x in found]

    def sentences(self) -> list[str]:
        """All lines of the tables: findings, then what else is not "ok", then a sentence a suite.

        Records of a variant that share the reason share a sentence. Last, why backends could not
        run at all.
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
        """A sentence for each limit that a record passes."""
        ran = [r for r in self.records if r.status in ("ok", "wrong")]
        return broken_limits(limits, ran, _name)

    def save(self, path: Path) -> None:
        """Write tables and sentences as Markdown."""
        parts = [table.markdown() for table in self.tables()]
        text = without_paths("\n\n".join(parts))
        path.write_text("\n\n".join([text, *self.sentences()]) + "\n", encoding="utf-8")


def _is_finding(record: Record) -> bool:
    return record.status in BAD and is_ours(record.case["variant"])


def _name(record: Record) -> str:
    return f"{record.case['variant']}: {_case(record)}"


def _case(record: Record) -> str:
    names = ("name", "model", "dtype", "comparison")
    return ", ".join(str(record.case[name]) for name in names if record.case.get(name))


def _count(records: Records) -> str:
    return f"{len(records)} comparison{'s' * (len(records) != 1)}"


VERBS = {"wrong": "is wrong", "failed": "failed", "oom": "did not fit"}


def _operators(ran: Records) -> str:
    found = [
        (record.measures[name], name, record)
        for record in ran
        for name in RATIOS
        if record.measures.get(name) is not None
    ]
    if not found:
        return f"{_count(ran)} of attention, no errors against the reference."
    ratio, name, record = max(found, key=lambda one: nan_last(one[0]))
    part = name.rpartition("_")[2]
    return (
        f"{_count(ran)} of attention: all errors are within the acceptance rule, the largest "
        f"{share(ratio)} of what it allows ({part} of {_name(record)})."
    )


def _models(ran: Records) -> str:
    differences = []
    for what, name in (("logits", "logits_relative"), ("gradients", "gradient_relative")):
        found = [(r.measures[name], r) for r in ran if r.measures.get(name) is not None]
        if found:
            size, worst = max(found, key=lambda one: nan_last(one[0]))
            where = f" ({_name(worst)})" if size else ""
            differences.append(f"{what} differ by at most {size:.1e}{where}")
    return f"{_count(ran)} of models within the acceptance rule: relative {', '.join(differences)}."


SENTENCES = {"drift-op": _operators, "drift-model": _models}
"""Of a suite's records that ran, where none is a finding."""
