"""The tables of operator drift, from rows alone, as Markdown.

Backends that cannot run any case of a dtype stand in no table: the report's notes say why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from flexvarlen.drift.difference import Difference
from flexvarlen.drift.grid import NOTHING, nan_last, share
from flexvarlen.markdown import markdown
from flexvarlen.rows import Row

FORWARD, BACKWARD = ("out", "lse"), ("dq", "dk", "dv")
PARTS = (*FORWARD, *BACKWARD)
STABILITY = ("run-run", "place", "eager-compiled")
BASELINES = ("fa2", "varlen", "flex", "sdpa")
"""What the others are held against, by preference: the study's, then what runs in most places."""


def study_tables(rows: Iterable[Row], *, baseline: str | None = None) -> str:
    """The three tables of the study, for each dtype: runtime, batch against serial, serial pairs.

    Args:
        rows: of the suite "drift-op"; others are left out.
        baseline: the backend that times are divided by, and that the third table holds the others
            against. Default: of `BASELINES` the first that ran, else the first that was timed.
    """
    rows = _that_run(rows)
    pieces = []
    for dtype in _dtypes(rows):
        own = [row for row in rows if row.case["dtype"] == dtype]
        first = baseline or _baseline(own)
        pieces += [
            f"### {dtype}: runtime of all documents in one call, ms",
            runtime_table(own, first),
            f"### {dtype}: all documents in one call against one call a document",
            differences_table(own, "batch-serial"),
            f"### {dtype}: one call a document, {first} against the others",
            differences_table(own, "backend-backend", only=first),
        ]
    return "\n\n".join(pieces) + "\n"


def runtime_table(rows: Iterable[Row], baseline: str) -> str:
    """Median milliseconds of forward and forward + backward; in brackets over the baseline's."""
    found = _by_case(rows, "runtime")
    backends = _unique(row.case["backend"] for row in _of(rows, "runtime"))
    lines = []
    for name, of_case in found.items():
        for title, key in (("forward", "ms_p50"), ("forward + backward", "both_ms_p50")):
            cells = [_runtime_cell(of_case, backend, baseline, key) for backend in backends]
            if any(cell != NOTHING for cell in cells):
                lines.append([name, title, *cells])
    return markdown(["documents", "pass", *backends], lines)


def _runtime_cell(of_case: dict[str, Row], backend: str, baseline: str, key: str) -> str:
    row = of_case.get(backend)
    if row is None or (row.status == "ok" and key not in row.measures):
        return NOTHING
    if row.status != "ok":
        return row.status if key == "ms_p50" else NOTHING
    value = row.measures[key]
    beside = of_case.get(baseline)
    if backend == baseline or beside is None or key not in beside.measures:
        return f"{value:.3g}"
    return f"{value:.3g} ({value / beside.measures[key]:.2f}×)"


def differences_table(rows: Iterable[Row], comparison: str, *, only: str | None = None) -> str:
    """Largest and mean absolute difference and share of equal elements, of each part.

    Args:
        rows: any.
        comparison: which of them. "batch-serial" has a last column: the largest error of one call
            a document against fp64, over what the rule allows.
        only: for "backend-backend": the pairs with this backend. Default: all pairs.
    """
    lines = []
    for row in _of(rows, comparison):
        pair = [row.case["backend"], row.case.get("other")]
        if only is not None and only not in pair:
            continue
        who = " : ".join(name for name in pair if name)
        who += " (wrong)" if row.status == "wrong" else ""
        beside = [_serial_cell(row)] if comparison == "batch-serial" else []
        cells = [*_cells(row, FORWARD + BACKWARD, _three_numbers), *beside]
        lines.append([row.case["name"], who, *cells])
    parts = [f"{part}: max, mean, equal" for part in PARTS]
    parts += ["one call a document: error over the allowed"] * (comparison == "batch-serial")
    return markdown(["documents", "backend", *parts], lines)


def _serial_cell(row: Row) -> str:
    ratios = [row.measures.get(f"serial_ratio_{part}") for part in PARTS]
    found = [ratio for ratio in ratios if ratio is not None]
    return f"{max(found, key=nan_last):.2g}" if found else NOTHING


def _three_numbers(difference: Difference, row: Row, part: str) -> str:
    if difference.is_zero:
        return "exact"
    return f"{difference.max_abs:.2e}, {difference.mean_abs:.2e}, {share(difference.equal)}"


def exact_table(rows: Iterable[Row]) -> str:
    """Largest error against fp64, the plain peer's, and the share of the allowed; what is wrong."""

    def cell(difference: Difference, row: Row, part: str) -> str:
        peer, ratio = row.measures[f"peer_{part}_max_abs"], row.measures[f"ratio_{part}"]
        return f"{difference.max_abs:.2e} ({peer:.2e}; {ratio:.2g})"

    lines = []
    for row in _of(_that_run(rows), "exact"):
        verdict = "right" if row.status == "ok" else row.measures.get("blame") or row.status
        who = [row.case["dtype"], row.case["name"], row.case["backend"]]
        lines.append([*who, *_cells(row, PARTS, cell), verdict])
    parts = [f"{part}: error (peer's; over the allowed)" for part in PARTS]
    return markdown(["dtype", "documents", "backend", *parts, "verdict"], lines)


def stability_table(rows: Iterable[Row]) -> str:
    """Run to run, at another place, compiled: "exact", or the part that differs most."""
    rows = _that_run(rows)
    lines = []
    for dtype in _dtypes(rows):
        own = [row for row in rows if row.case["dtype"] == dtype]
        found = {comparison: _by_case(own, comparison) for comparison in STABILITY}
        names = _unique(name for by_case in found.values() for name in by_case)
        for name in names:
            of_case = [by_case.get(name, {}) for by_case in found.values()]
            for backend in _unique(backend for each in of_case for backend in each):
                cells = [_stability_cell(each.get(backend)) for each in of_case]
                lines.append([dtype, name, backend, *cells])
    return markdown(["dtype", "documents", "backend", *STABILITY], lines)


def _stability_cell(row: Row | None) -> str:
    if row is None:
        return NOTHING
    if row.status != "ok":
        return row.status
    worst = _most_different(row, PARTS)
    return "exact" if worst is None else f"{worst[0]}: {worst[1].max_abs:.2e}"


# --- rows ----------------------------------------------------------------------------------------


def _of_suite(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row.suite == "drift-op"]


def _that_run(rows: Iterable[Row]) -> list[Row]:
    """Without the backends that nothing here can run: the report's notes say why not."""
    rows = _of_suite(rows)
    ran = {(r.case["dtype"], r.case["backend"]) for r in rows if r.status != "unsupported"}
    return [row for row in rows if (row.case["dtype"], row.case["backend"]) in ran]


def _of(rows: Iterable[Row], comparison: str) -> list[Row]:
    return [row for row in _of_suite(rows) if row.case["comparison"] == comparison]


def _by_case(rows: Iterable[Row], comparison: str) -> dict[str, dict[str, Row]]:
    """Case name -> backend -> row."""
    found: dict[str, dict[str, Row]] = {}
    for row in _of(rows, comparison):
        found.setdefault(row.case["name"], {})[row.case["backend"]] = row
    return found


def _dtypes(rows: Iterable[Row]) -> list[str]:
    return _unique(row.case["dtype"] for row in rows)


def _baseline(rows: Sequence[Row]) -> str:
    """The first of `BASELINES` that was timed, else that ran at all, else the first backend."""
    ran = [row for row in rows if row.status == "ok"]
    for found in (_of(ran, "runtime"), ran):
        names = _unique(row.case["backend"] for row in found)
        known = [name for name in BASELINES if name in names]
        if known or names:
            return str((known or names)[0])
    return str(rows[0].case["backend"])


def _unique(names: Iterable[Any]) -> list[str]:
    return list(dict.fromkeys(names))


def _differences(row: Row, parts: Sequence[str]) -> dict[str, Difference]:
    found = {part: Difference.of_measures(row.measures, part) for part in parts}
    return {part: difference for part, difference in found.items() if difference is not None}


def _most_different(row: Row, parts: Sequence[str]) -> tuple[str, Difference] | None:
    """The part with the largest difference relative to its size; None if all are equal."""
    differing = {p: d for p, d in _differences(row, parts).items() if not d.is_zero}
    if not differing:
        return None
    # A NaN is the largest.
    return max(
        differing.items(), key=lambda item: (item[1].relative != item[1].relative, item[1].relative)
    )


def _cells(
    row: Row, parts: Sequence[str], cell: Callable[[Difference, Row, str], str]
) -> list[str]:
    """A cell for each part; the status stands in the first if nothing was compared."""
    found = _differences(row, parts)
    if not found:
        return [row.status, *[NOTHING] * (len(parts) - 1)]
    return [cell(found[part], row, part) if part in found else NOTHING for part in parts]
