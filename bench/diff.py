"""`diff`: two files of rows compared, before and after, with a verdict for each case.

A time has changed if the bands p20–p80 of before and after do not overlap and the medians differ by
more than a threshold: spread alone is no verdict, nor is a difference too small to matter. Of fewer
than three repeats there is no band, and so no verdict. A peak of memory that torch's allocator
counted has no spread: the threshold alone decides. On a CPU it is the process's growth, which a run
before it may hide: it is not compared.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flexvarlen.markdown import markdown
from flexvarlen.rows import Row, read_rows

Verdict = Literal[
    "slower",
    "worse",
    "larger",
    "faster",
    "better",
    "smaller",
    "unchanged",
    "not comparable",
    "new",
    "lost",
]
"""Of a row. "worse": was right and timed, and is so no more; "better": the other way round.
"larger", "smaller": of a peak of memory."""

ORDER: tuple[Verdict, ...] = (
    "worse", "slower", "larger", "better", "faster", "smaller", "not comparable", "lost", "new",
    "unchanged",
)  # fmt: skip
PERCENTILES = ("p20", "p50", "p80")
FEWEST_REPEATS = 3  # of fewer, p20 and p80 are what lies between two samples
PEAK = "peak_mib"
RATE = "_per_s"  # in the name of a measure of which more is better


@dataclass(frozen=True)
class Change:
    """One row before and after; one timing of it, where it has several.

    Attributes:
        timing: name of the measure without its percentile, "device_ms", or "peak_mib"; empty where
            none.
        before, after: p20, p50, p80, in the unit of that name, of a peak all the same; None where
            there are none.
        reason: why it is not comparable, or what became of it.
    """

    suite: str
    case: Mapping[str, Any]
    machine: str
    verdict: Verdict
    timing: str = ""
    before: tuple[float, float, float] | None = None
    after: tuple[float, float, float] | None = None
    reason: str = ""

    @property
    def ratio(self) -> float | None:
        """After over before, of the medians."""
        if self.before is None or self.after is None or self.before[1] == 0:
            return None
        return self.after[1] / self.before[1]


@dataclass(frozen=True)
class Diff:
    """All changes, the worst first, and where the two files were made elsewhere or otherwise.

    Attributes:
        environments: by name of what differs, its values before and after, with commas between.
    """

    changes: Sequence[Change]
    environments: Mapping[str, tuple[str, str]]
    threshold: float

    @property
    def slower(self) -> bool:
        """Whether anything got slower, takes more memory, or is right and timed no more."""
        return any(change.verdict in ("slower", "larger", "worse") for change in self.changes)

    def markdown(self) -> str:
        """What differs between the runs, the rule, the counts, a line a case and timing."""
        if self.environments:
            lines = [[name, *values] for name, values in self.environments.items()]
            where = f"Made elsewhere or otherwise:\n\n{markdown(['', 'before', 'after'], lines)}"
        else:
            where = "Both on the same machine, versions and commit."
        counts = Counter(change.verdict for change in self.changes)
        said = ", ".join(f"{counts[name]} {name}" for name in ORDER if counts[name])
        rule = (
            "Slower or faster: the bands p20–p80 do not overlap, and the medians differ by more "
            f"than {self.threshold:.3g} of the smaller. Larger or smaller: the peaks of memory "
            f"differ by more than that. Not comparable: fewer than {FEWEST_REPEATS} repeats, too."
        )
        tables = [
            f"{suite}:\n\n{_table([x for x in self.changes if x.suite == suite])}"
            for suite in dict.fromkeys(change.suite for change in self.changes)
        ]
        return "\n\n".join([where, f"{said or 'No rows'}. {rule}", *tables])


def diff(before: Iterable[Path], after: Iterable[Path], *, threshold: float = 0.02) -> Diff:
    """Compare rows of the same suite, case, variant, pass and GPU.

    Args:
        before, after: JSON lines of rows; of equal rows in several files the last counts.
        threshold: share of the smaller median by which medians must differ.

    Raises:
        ValueError: the threshold is negative, a file holds no rows, or lines that are none.
    """
    if threshold < 0:
        raise ValueError(f"threshold must be at least 0, got {threshold}; give a share, 0.02.")
    old, new = _rows(before, "before"), _rows(after, "after")
    changes: list[Change] = []
    for key in dict.fromkeys((*old, *new)):
        changes += _changes(old.get(key), new.get(key), threshold)
    changes.sort(key=lambda change: ORDER.index(change.verdict))
    return Diff(changes, _environments(old.values(), new.values()), threshold)


def _rows(paths: Iterable[Path], name: str) -> dict[str, Row]:
    paths = list(paths)
    found = {
        json.dumps([row.suite, row.case, _machine(row)], sort_keys=True): row
        for row in read_rows(paths)
    }
    if not found:
        files = ", ".join(path.name for path in paths)
        raise ValueError(f"{name} must hold rows, got none in {files or 'no file'}; name others.")
    return found


def _machine(row: Row) -> str:
    where = row.environment
    return str(where.get("gpu") or where.get("cpu") or where.get("device") or "unknown")


def _environments(before: Iterable[Row], after: Iterable[Row]) -> dict[str, tuple[str, str]]:
    sides = [_values(before), _values(after)]
    return {
        name: (sides[0].get(name, "–"), sides[1].get(name, "–"))
        for name in dict.fromkeys((*sides[0], *sides[1]))
        if sides[0].get(name) != sides[1].get(name)
    }


def _values(rows: Iterable[Row]) -> dict[str, str]:
    found: dict[str, set[str]] = {}
    for row in rows:
        for name, value in row.environment.items():
            if name != "started_utc":
                found.setdefault(name, set()).add("–" if value is None else str(value))
    return {name: ", ".join(sorted(values)) for name, values in found.items()}


def _changes(old: Row | None, new: Row | None, threshold: float) -> list[Change]:
    row = new or old
    assert row is not None

    def change(verdict: Verdict, reason: str = "") -> Change:
        return Change(row.suite, row.case, _machine(row), verdict, reason=reason)

    if old is None or new is None:
        return [change("new" if old is None else "lost", row.status)]
    if "ok" not in (old.status, new.status):
        return [
            change("unchanged" if old.status == new.status else "not comparable", _said(old, new))
        ]
    if new.status != "ok":
        return [change("worse", _said(old, new))]
    if old.status != "ok":
        return [change("better", _said(old, new))]
    times = timings(new.measures)
    both = [name for name in timings(old.measures) if name in times]
    timed = [_timed(old, new, name, threshold) for name in both]
    return [
        *(timed or [change("not comparable", "no timing in both")]),
        *_peaks(old, new, threshold),
    ]


def _said(old: Row, new: Row) -> str:
    why = new.reason if new.status != "ok" else old.reason
    became = new.status if old.status == new.status else f"{old.status} → {new.status}"
    return became + (f": {why}" if why else "")


def timings(measures: Mapping[str, Any]) -> list[str]:
    """Names of what has p20, p50 and p80, without these; host times only where no others are.

    >>> ms = {f"{name}_ms_p{p}": 1.0 for name in ("host", "device") for p in (20, 50, 80)}
    >>> timings(ms), timings({"ms_p50": 1.0})
    (['device_ms'], [])
    """
    found = [
        name.removesuffix("_p50")
        for name in measures
        if name.endswith("_p50")
        and all(_is_number(measures.get(f"{name.removesuffix('p50')}{p}")) for p in PERCENTILES)
    ]
    return [name for name in found if not name.startswith("host_")] or found


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _timed(old: Row, new: Row, timing: str, threshold: float) -> Change:
    a, b = (_percentiles(row.measures, timing) for row in (old, new))
    few = [n for row in (old, new) if (n := repeats_of(row.measures, timing)) is not None]
    if few and min(few) < FEWEST_REPEATS:
        counts = " and ".join(map(str, few))
        reason = f"of {counts} repeats; {FEWEST_REPEATS} are needed"
        return Change(
            new.suite, new.case, _machine(new), "not comparable", timing, a, b, reason=reason
        )
    more = b[0] > a[2] and b[1] > a[1] * (1 + threshold)
    less = b[2] < a[0] and a[1] > b[1] * (1 + threshold)
    if RATE in timing:
        more, less = less, more
    verdict: Verdict = "slower" if more else "faster" if less else "unchanged"
    return Change(new.suite, new.case, _machine(new), verdict, timing, a, b)


def repeats_of(measures: Mapping[str, Any], timing: str) -> int | None:
    """How many calls a timing is of; None where the row does not say.

    >>> repeats_of({"device_repeats": 30, "repeats": 2}, "device_ms"), repeats_of({}, "ms")
    (30, None)
    """
    prefix = timing.rpartition("_")[0]
    found: int | None = measures.get(f"{prefix}_repeats", measures.get("repeats"))
    return found


def _peaks(old: Row, new: Row, threshold: float) -> list[Change]:
    """Of torch's allocator, on a GPU; none where one side has none."""
    peaks = [row.measures.get(PEAK) for row in (old, new)]
    if not new.environment.get("gpu") or not all(_is_number(peak) for peak in peaks):
        return []
    a, b = (float(peak) for peak in peaks if peak is not None)
    larger, smaller = b > a * (1 + threshold), a > b * (1 + threshold)
    verdict: Verdict = "larger" if larger else "smaller" if smaller else "unchanged"
    place = (new.suite, new.case, _machine(new))
    return [Change(*place, verdict, PEAK, (a, a, a), (b, b, b))]


def _percentiles(measures: Mapping[str, Any], timing: str) -> tuple[float, float, float]:
    low, middle, high = (float(measures[f"{timing}_{p}"]) for p in PERCENTILES)
    return low, middle, high


# --- Markdown ------------------------------------------------------------------------------------


def _table(changes: Sequence[Change]) -> str:
    fields = _varying(changes)
    lines = [
        [
            change.verdict,
            *(_shown(change.case.get(field)) for field in fields),
            change.machine,
            change.timing,
            _band(change.before),
            _band(change.after),
            "–" if change.ratio is None else f"{change.ratio:.3f}",
            change.reason,
        ]
        for change in changes
    ]
    header = ["verdict", *fields, "machine", "timing", "before", "after", "after ÷ before", ""]
    return markdown(header, lines)


def _varying(changes: Sequence[Change]) -> list[str]:
    """Fields of the cases in which they differ; the variant first."""
    names = dict.fromkeys(("variant", "pass"))
    names |= dict.fromkeys(name for change in changes for name in change.case)

    def values(name: str) -> set[str]:
        return {_shown(change.case.get(name)) for change in changes}

    return [
        name
        for name in names
        if values(name) != {"–"} and (name == "variant" or len(values(name)) > 1)
    ]


def _shown(value: object) -> str:
    return "–" if value is None else str(value)


def _band(values: tuple[float, float, float] | None) -> str:
    if values is None:
        return "–"
    low, middle, high = (f"{value:.4g}" for value in values)
    if low == high:
        return middle
    return f"{middle} ({low}–{high})"
