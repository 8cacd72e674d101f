"""Rows of attention as tables and figures want them: by case, variant and pass, of one run."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flexvarlen.bench.attention.clock import host_bound
from flexvarlen.bench.mask_build.tables import Notes
from flexvarlen.markdown import markdown
from flexvarlen.rows import Row

PASSES = ("forward", "backward")
HOST_BOUND, ALONE = "†", "‡"
LEGEND = {
    HOST_BOUND: "the device waited for the host: no time of its kernels, and never the best",
    ALONE: "timed alone, as it did not fit in memory beside the others: not interleaved with them",
}
"""What marks of times mean."""


@dataclass(frozen=True)
class Measured:
    """One case's rows of its latest run, by variant and pass.

    Attributes:
        case: of the rows, without the variant and the pass.
    """

    case: Mapping[str, Any]
    rows: Mapping[tuple[str, str], Row]

    def variants(self) -> list[str]:
        """In the order of the rows."""
        return list(dict.fromkeys(variant for variant, _ in self.rows))

    def passes(self) -> list[str]:
        """In the order of the rows."""
        return list(dict.fromkeys(pass_ for _, pass_ in self.rows))

    def value(self, variant: str, pass_: str, name: str) -> Any:
        """A measure of what was timed; None where it was not, or has no such measure."""
        row = self.rows.get((variant, pass_))
        return None if row is None or row.status != "ok" else row.measures.get(name)

    def ms(self, variant: str, pass_: str, at: str = "p50") -> float | None:
        """Milliseconds of the device; None where they were not measured."""
        found: float | None = self.value(variant, pass_, f"device_ms_{at}")
        return found

    def ratio(self, slow: str, fast: str, pass_: str) -> float | None:
        """How many times as long one takes as the other; None unless both kernels were timed."""
        if self.host_bound(slow, pass_) or self.host_bound(fast, pass_):
            return None
        both = self.ms(slow, pass_), self.ms(fast, pass_)
        return None if both[0] is None or not both[1] else both[0] / both[1]

    def tflops(self, variant: str, pass_: str, at: str = "p50") -> float | None:
        """Of unmasked work, by the device's time; None where that was not measured."""
        ms, p50 = self.ms(variant, pass_, at), self.ms(variant, pass_)
        found: float | None = self.value(variant, pass_, "tflops")
        if self.host_bound(variant, pass_) or found is None or not ms or p50 is None:
            return None
        return found * p50 / ms

    def host_bound(self, variant: str, pass_: str) -> bool:
        """Whether the device waited for the host, so that its time is none of kernels."""
        row = self.rows.get((variant, pass_))
        return row is not None and row.status == "ok" and host_bound(row.measures)

    def status(self, variant: str, pass_: str) -> str:
        """That of the row, or "host-bound" where it has no time of kernels."""
        return "host-bound" if self.host_bound(variant, pass_) else self.rows[variant, pass_].status

    def timed_alone(self, variants: Sequence[str], pass_: str) -> list[str]:
        """Those of the variants that were not interleaved with the others."""
        return [name for name in variants if self.value(name, pass_, "timed_alone")]

    def mark(self, variant: str, pass_: str) -> str:
        """What stands behind a time, of `LEGEND`; "" behind most."""
        bound = HOST_BOUND if self.host_bound(variant, pass_) else ""
        return bound + (ALONE if self.timed_alone([variant], pass_) else "")

    def why_none(self, variants: Sequence[str], pass_: str) -> str:
        """Which of the variants have no time, and why."""
        said = []
        for name in variants:
            row = self.rows.get((name, pass_))
            if row is None:
                said.append(f"`{name}` was not measured")
            elif row.status != "ok":
                said.append(f"`{name}` is {row.status} ({row.reason})")
            elif self.host_bound(name, pass_):
                said.append(f"the device waited for the host under `{name}`")
        return "; ".join(said)


def measured_cases(rows: Sequence[Row]) -> list[Measured]:
    """The cases of one machine's rows, each as its latest run has it.

    Rows of two runs are never compared: one that measured a case again replaces all of its rows.
    """
    return [runs[0] for runs in _runs_by_case(rows)]


def measured_runs(rows: Sequence[Row]) -> list[Measured]:
    """The cases of one machine's rows, each run of other variants apart, the latest first.

    For cases too long for one run: what a later run measured again is left out of the earlier.
    """
    return [run for runs in _runs_by_case(rows) for run in runs]


def _runs_by_case(rows: Sequence[Row]) -> list[list[Measured]]:
    found: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        runs = found.setdefault(json.dumps(_without_variant(row.case), sort_keys=True), {})
        runs.setdefault(_started(row), []).append(row)
    cases = []
    for runs in found.values():
        seen: set[str] = set()
        kept = []
        for _, own in sorted(runs.items(), reverse=True):
            by_variant = {
                (row.case["variant"], row.case.get("pass", "")): row
                for row in own
                if row.case["variant"] not in seen
            }
            if by_variant:
                kept.append(Measured(_without_variant(own[0].case), by_variant))
            seen.update(row.case["variant"] for row in own)
        cases.append(kept)
    return cases


def _without_variant(case: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in case.items() if name not in ("variant", "pass")}


def _started(row: Row) -> str:
    return row.environment.get("started_utc") or ""


def all_variants(cases: Sequence[Measured]) -> list[str]:
    """Of all cases, in the order of the rows."""
    return list(dict.fromkeys(name for each in cases for name in each.variants()))


def by_shape(rows: Sequence[Row], *fields: str) -> list[list[Row]]:
    """One machine's rows in groups that a header with these fields of a case is right of.

    The largest group first: a quick run's stands behind the whole one's.
    """
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(json.dumps([row.case.get(x) for x in fields]), []).append(row)
    return sorted(groups.values(), key=len, reverse=True)


def legend(text: str) -> str:
    """What the marks in a table mean, below it; empty if it has none."""
    return "".join(f"\n\n{mark} {said}." for mark, said in LEGEND.items() if mark in text)


def three_digits(value: float) -> str:
    """A figure to three digits, thousands whole.

    >>> three_digits(0.01234), three_digits(12.0), three_digits(12345.6)
    ('0.0123', '12.0', '12,346')
    """
    return f"{value:#.3g}".rstrip(".") if abs(value) < 1000 else f"{value:,.0f}"


@dataclass(frozen=True)
class Grid:
    """A table: a line a case and pass, a column a variant.

    Attributes:
        header: of the columns before the variants'.
        line: what stands in them, of a case and a pass.
        value: what a variant's column shows, of a case, variant and pass; None: the status.
        best: "min" or "max" of a line is bold; None: nothing.
        device: values follow from the device's time: what is host-bound is marked, and not best.
        clocked: values follow from a time: what was timed alone is marked.

    Forwards stand first, then backwards.
    """

    header: Sequence[str]
    line: Callable[[Measured, str], Sequence[str]]
    value: Callable[[Measured, str, str], float | None]
    best: str | None = "min"
    device: bool = True
    clocked: bool = True

    def markdown(self, cases: Sequence[Measured], passes: Sequence[str] = PASSES) -> str:
        """The table and, numbered below it, why cells are empty."""
        variants, notes, lines = all_variants(cases), Notes(), []
        for pass_ in passes:
            for each in (x for x in cases if pass_ in x.passes()):
                found = {name: self.value(each, name, pass_) for name in variants}
                known = [
                    value
                    for name, value in found.items()
                    if value is not None and not (self.device and each.host_bound(name, pass_))
                ]
                choose = {"min": min, "max": max}.get(self.best or "")
                best = choose(known) if choose is not None and known else None
                shown = [self._cell(each, name, pass_, found[name], best, notes) for name in found]
                lines.append([*self.line(each, pass_), *shown])
        table = markdown([*self.header, *(f"`{x}`" for x in variants)], lines)
        return table + legend(table) + notes.text()

    def _cell(
        self,
        each: Measured,
        name: str,
        pass_: str,
        value: float | None,
        best: float | None,
        notes: Notes,
    ) -> str:
        if value is not None:
            mark = each.mark(name, pass_) if self.clocked else ""
            mark = mark if self.device else mark.replace(HOST_BOUND, "")
            shown = three_digits(value) + mark
            return f"**{shown}**" if value == best and HOST_BOUND not in mark else shown
        row = each.rows.get((name, pass_))
        if row is None or row.status == "ok":
            return HOST_BOUND if self.device and each.host_bound(name, pass_) else ""
        return notes.status(row).replace("unsupported", "–")
