"""What the records of a drift say, in one sentence for each suite; and whether they pass."""

from __future__ import annotations

from collections.abc import Sequence

from flexvarlen.report.records import Record, in_short
from flexvarlen.report.table import nan_last, share
from flexvarlen.verify.drift.report.tables import RATIOS
from flexvarlen.verify.drift.training.verdict import ROUNDING
from flexvarlen.verify.experiment.variant import THEIRS


def passed(records: Sequence[Record]) -> bool:
    """Whether no backend of flexvarlen is wrong or failed; transformers' own may leak."""
    return not any(_is_finding(record) for record in records)


def sentences(records: Sequence[Record]) -> list[str]:
    """A sentence for each finding, once for records that share the reason; else one a suite."""
    findings: dict[str, list[str]] = {}
    for record in records:
        if _is_finding(record):
            verb = "is wrong" if record.status == "wrong" else "failed"
            text = f"{record.case['variant']} {verb}: {in_short(record.reason or '')}"
            findings.setdefault(text, []).append(_case(record))
    if findings:
        return [f"{text} ({'; '.join(dict.fromkeys(where))})" for text, where in findings.items()]
    made = (_operators(records), _models(records), _trainings(records))
    return [text for text in made if text] or ["Nothing was compared."]


def record_name(record: Record) -> str:
    """Which record it is, for a sentence.

    >>> record_name(Record("drift-op", {"name": "64", "variant": "flex"}, "ok"))
    'flex: 64'
    """
    return f"{record.case['variant']}: {_case(record)}"


def _is_finding(record: Record) -> bool:
    return record.status in ("wrong", "failed") and not _is_theirs(record)


def _is_theirs(record: Record) -> bool:
    return str(record.case["variant"]).startswith(THEIRS)


def _case(record: Record) -> str:
    names = ("name", "model", "dtype", "comparison")
    return ", ".join(str(record.case[name]) for name in names if record.case.get(name))


def _ran(records: Sequence[Record], suite: str) -> list[Record]:
    return [record for record in records if record.suite == suite and record.status == "ok"]


def _worst(records: Sequence[Record], measure: str) -> Record:
    return max(records, key=lambda record: nan_last(record.measures[measure]))


def _operators(records: Sequence[Record]) -> str:
    ran = _ran(records, "drift-op")
    found = [
        (record.measures[name], name, record)
        for record in ran
        for name in RATIOS
        if record.measures.get(name) is not None
    ]
    if not found:
        return f"{_count(ran)} of attention, no errors against the reference." if ran else ""
    ratio, name, record = max(found, key=lambda one: nan_last(one[0]))
    part = name.rpartition("_")[2]
    return (
        f"{_count(ran)} of attention: all errors are within the acceptance rule, the largest "
        f"{share(ratio)} of what it allows ({part} of {record_name(record)})."
    )


def _models(records: Sequence[Record]) -> str:
    ran = [record for record in _ran(records, "drift-model") if not _is_theirs(record)]
    if not ran:
        return ""
    worst = _worst(ran, "logits_relative")
    size = worst.measures["logits_relative"]
    if size == 0:
        return f"{_count(ran)} of models: all logits have the same bits."
    return (
        f"{_count(ran)} of models: logits differ by at most {size:.1e} relative "
        f"({record_name(worst)})."
    )


def _trainings(records: Sequence[Record]) -> str:
    ran = [
        record
        for record in _ran(records, "drift-training")
        if record.case["variant"] not in (record.case["baseline"], ROUNDING)
    ]
    if not ran:
        return ""
    worst = _worst(ran, "sigmas")
    return (
        f"All {len(ran)} trainings are within seed noise of {worst.case['baseline']}; the largest "
        f"difference of losses is {worst.measures['sigmas']:.2g} σ ({record_name(worst)})."
    )


def _count(records: Sequence[Record]) -> str:
    return f"{len(records)} comparison{'s' * (len(records) != 1)}"
