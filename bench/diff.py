"""`diff`: the records of two files compared, before and after, with a verdict for each case.

A time has changed if the ranges p20–p80 of before and after do not overlap and the medians differ
by more than a threshold. With fewer than three repeats there is no range, and so no verdict. A
peak of memory on a GPU has no spread: the threshold alone decides.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexvarlen.report.records import Record, read_records
from flexvarlen.report.table import NOTHING, Column, Table

WORSE = ("worse", "slower", "larger")
VERDICTS = (*WORSE, "better", "faster", "smaller", "not comparable", "lost", "new", "unchanged")
"""In the order of the tables. "worse": was measured, and is refused or wrong now; "better": the
opposite. "larger", "smaller": of a peak of memory."""

FEWEST_REPEATS = 3
PEAK = "peak_mib"
RATE = "_per_s"  # in the name of a measure of which more is better
Range = tuple[float, float, float]
"""p20, p50 and p80."""


@dataclass(frozen=True)
class Change:
    """One measure of a case, before and after."""

    verdict: str
    record: Record
    measure: str = ""
    before: Range | None = None
    after: Range | None = None
    reason: str = ""

    @property
    def ratio(self) -> float | None:
        """After divided by before, of the medians."""
        if self.before is None or self.after is None or self.before[1] == 0:
            return None
        return self.after[1] / self.before[1]


@dataclass(frozen=True)
class Diff:
    """All changes, the worst first.

    Attributes:
        environments: by field, the values before and after, where these differ.
    """

    changes: Sequence[Change]
    environments: Mapping[str, tuple[str, str]]
    threshold: float

    @property
    def slower(self) -> bool:
        """Whether anything got slower, takes more memory, or works no more."""
        return any(change.verdict in WORSE for change in self.changes)

    def markdown(self) -> str:
        """What differs between the runs, the counts, and a table for each suite."""
        where = "Both on the same machine, versions and commit."
        if self.environments:
            lines = tuple((name, *values) for name, values in self.environments.items())
            where = Table("The runs differ", ("", "before", "after"), lines).markdown()
        counts = Counter(change.verdict for change in self.changes)
        said = ", ".join(f"{counts[name]} {name}" for name in VERDICTS if counts[name])
        rule = f"A median must differ by more than {self.threshold:.3g}, and p20–p80 not overlap."
        suites: dict[str, list[Change]] = {}
        for change in self.changes:
            suites.setdefault(change.record.suite, []).append(change)
        tables = [_table(suite, own).markdown() for suite, own in suites.items()]
        return "\n\n".join([where, f"{said}. {rule}", *tables])


def diff(before: Iterable[Path], after: Iterable[Path], *, threshold: float = 0.02) -> Diff:
    """Compare records of the same suite, case, variant, pass and machine.

    Args:
        before, after: JSON lines of records; of equal records the last counts.
        threshold: share of the smaller median by which medians must differ.

    Raises:
        ValueError: the threshold is negative, or a file holds no records.
    """
    if threshold < 0:
        raise ValueError(f"threshold must be at least 0, got {threshold}; give a share, 0.02.")
    old, new = _records(before, "before"), _records(after, "after")
    changes = [
        change
        for key in dict.fromkeys((*old, *new))
        for change in _changes(old.get(key), new.get(key), threshold)
    ]
    changes.sort(key=lambda change: VERDICTS.index(change.verdict))
    fields = _fields(old.values()), _fields(new.values())
    environments = {
        name: (fields[0].get(name, NOTHING), fields[1].get(name, NOTHING))
        for name in dict.fromkeys((*fields[0], *fields[1]))
        if fields[0].get(name) != fields[1].get(name)
    }
    return Diff(changes, environments, threshold)


def _records(paths: Iterable[Path], name: str) -> dict[str, Record]:
    paths = list(paths)
    found = {
        json.dumps([r.suite, r.case, _machine(r)], sort_keys=True): r for r in read_records(paths)
    }
    if not found:
        files = ", ".join(path.name for path in paths)
        raise ValueError(f"{name} must hold records, got none in {files}; name other files.")
    return found


def _machine(record: Record) -> str:
    where = record.environment
    return str(where.get("gpu") or where.get("cpu") or "unknown")


def _fields(records: Iterable[Record]) -> dict[str, str]:
    found: dict[str, set[str]] = {}
    for record in records:
        for name, value in record.environment.items():
            if name != "started_utc" and value is not None:
                found.setdefault(name, set()).add(str(value))
    return {name: ", ".join(sorted(values)) for name, values in found.items()}


def _changes(old: Record | None, new: Record | None, threshold: float) -> Iterator[Change]:
    if old is None or new is None:
        record = new or old
        assert record is not None
        yield Change("new" if old is None else "lost", record, reason=record.status)
        return
    if old.status != "ok" or new.status != "ok":
        verdict = "worse" if old.status == "ok" else "better" if new.status == "ok" else ""
        same = "unchanged" if old.status == new.status else "not comparable"
        why = (new if new.status != "ok" else old).reason or ""
        yield Change(verdict or same, new, reason=f"{old.status} → {new.status}: {why}")
        return
    shared = [name for name in timings(new.measures) if name in timings(old.measures)]
    if not shared:
        yield Change("not comparable", new, reason="no timing in both")
    for name in shared:
        yield _timed(old, new, name, threshold)
    a, b = (r.measures.get(PEAK) for r in (old, new))
    if new.environment.get("gpu") and a is not None and b is not None:
        larger, smaller = b > a * (1 + threshold), a > b * (1 + threshold)
        verdict = "larger" if larger else "smaller" if smaller else "unchanged"
        yield Change(verdict, new, PEAK, (a, a, a), (b, b, b))


def timings(measures: Mapping[str, Any]) -> list[str]:
    """Names of what has p20, p50 and p80; the host's time only where nothing else has.

    >>> ms = {f"{name}_ms_p{p}": 1.0 for name in ("host", "device") for p in (20, 50, 80)}
    >>> timings(ms), timings({"ms_p50": 1.0})
    (['device_ms'], [])
    """
    names = [name.removesuffix("_p50") for name in measures if name.endswith("_p50")]
    found = [
        name for name in names if all(measures.get(f"{name}_p{p}") is not None for p in (20, 80))
    ]
    return [name for name in found if not name.startswith("host_")] or found


def _timed(old: Record, new: Record, name: str, threshold: float) -> Change:
    a, b = (
        (r.measures[f"{name}_p20"], r.measures[f"{name}_p50"], r.measures[f"{name}_p80"])
        for r in (old, new)
    )
    prefix = f"{name.rpartition('_')[0]}_repeats"
    repeats = [r.measures.get(prefix, r.measures.get("repeats")) for r in (old, new)]
    few = [str(count) for count in repeats if count is not None and count < FEWEST_REPEATS]
    if few:
        reason = f"{' and '.join(few)} repeats; {FEWEST_REPEATS} are needed"
        return Change("not comparable", new, name, a, b, reason)
    more = b[0] > a[2] and b[1] > a[1] * (1 + threshold)
    less = b[2] < a[0] and a[1] > b[1] * (1 + threshold)
    if RATE in name:
        more, less = less, more
    return Change("slower" if more else "faster" if less else "unchanged", new, name, a, b)


def _table(suite: str, changes: Sequence[Change]) -> Table:
    fields = dict.fromkeys(("variant", "pass"))
    fields |= dict.fromkeys(name for change in changes for name in change.record.case)
    shown = [
        name
        for name in fields
        if name == "variant" or len({str(x.record.case.get(name)) for x in changes}) > 1
    ]

    def field(name: str) -> Column:
        return Column(name, lambda change: str(change.record.case.get(name, NOTHING)))

    columns = [
        Column("verdict", lambda change: change.verdict),
        *map(field, shown),
        Column("machine", lambda change: _machine(change.record)),
        Column("measure", lambda change: change.measure),
        Column("before", lambda change: _range(change.before)),
        Column("after", lambda change: _range(change.after)),
        Column("after ÷ before", lambda x: NOTHING if x.ratio is None else f"{x.ratio:.3f}"),
        Column("why", lambda change: change.reason),
    ]
    return Table.of(changes, columns, suite, lambda change: change.verdict in WORSE)


def _range(values: Range | None) -> str:
    if values is None:
        return NOTHING
    low, middle, high = (f"{value:.4g}" for value in values)
    return middle if low == high else f"{middle} ({low}–{high})"
