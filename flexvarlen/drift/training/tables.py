"""Training drift as sentences and tables, from rows alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flexvarlen.drift.grid import NOTHING, Grid, nan_last, number
from flexvarlen.drift.training.verdict import (
    BAND_ANGLES,
    BAND_SIGMAS,
    PASSED,
    ROUNDING,
    SUITE,
    VERDICT,
    last_quarter,
)
from flexvarlen.rows import Row

RULE = (
    f"The rule: a variant whose mean loss over the last quarter of the steps is more than "
    f"{BAND_SIGMAS:g} σ from the baseline's, or that has a loss that is not finite, is beyond seed "
    f"noise; else one whose first gradient is more than {BAND_ANGLES:g} times as far from the "
    "baseline's as that of the rounding twin (all parameters moved by one unit in the last place) "
    "is not rounding; else it is within seed noise, by losses alone where these angles were not "
    "taken. σ is the standard deviation of that mean over the baseline's seeds."
)

_COLUMNS = (
    "variant",
    "verdict",
    "loss, last quarter",
    "difference",
    "in σ",
    "first angle °",
    "largest angle °",
)


def comparisons(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows of "drift-training", a list a comparison: one model, dtype, steps and tokens."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if row.suite == SUITE:
            case = row.case
            key = (case["model"], case["dtype"], case["steps"], case["tokens"])
            found.setdefault(key, []).append(row)
    return list(found.values())


def verdict_of(runs: Sequence[Row]) -> Row | None:
    """The verdict's row of a comparison; None where the run did not come to its end."""
    return next((row for row in runs if row.case["variant"] == VERDICT), None)


def training_sentences(rows: Sequence[Row]) -> list[str]:
    """A sentence a variant that ran: the verdict and its numbers."""
    said = []
    for runs in comparisons(rows):
        row = verdict_of(runs)
        for name, entry in {} if row is None else row.measures["variants"].items():
            beside = f"{name} against {runs[0].measures['baseline']}"
            said.append(f"{what(runs)}, {beside}: {_judgement(entry, row)}")
    return said


def what(runs: Sequence[Row]) -> str:
    """What a comparison trained."""
    case = runs[0].case
    return f"{case['model']}, {case['dtype']}, {case['steps']} steps of {case['tokens']:,} tokens"


def _judgement(entry: dict[str, Any], row: Row | None) -> str:
    assert row is not None
    of = row.measures
    text = (
        f"{entry['verdict']}. The last quarter's mean loss is {entry['loss']:.5f} instead of "
        f"{of['baseline_loss']:.5f}, {number(entry['sigmas'])} σ away (σ = {of['sigma']:.2g} over "
        f"n = {of['n']} seeds)"
    )
    if entry["equal"]:
        text += "; every loss is equal, bit for bit"
    if entry["angle"] is None or of["rounding_angle"] is None:
        return text + "."
    return (
        f"{text}; the first gradient is {number(entry['angle'])}° away, where one unit in the last "
        f"place of every parameter makes {number(of['rounding_angle'])}°."
    )


def training_grids(rows: Sequence[Row]) -> list[Grid]:
    """A table a comparison."""
    return [_grid(runs) for runs in comparisons(rows)]


def _grid(runs: Sequence[Row]) -> Grid:
    verdict = verdict_of(runs)
    judged: dict[str, Any] = {} if verdict is None else verdict.measures["variants"]
    lines = [_line(row, judged) for row in runs if row.case["variant"] != VERDICT]
    bad = {i for i, line in enumerate(lines) if line[1] not in (*PASSED, *_NO_VERDICT)}
    return Grid(f"Training, {what(runs)}", _COLUMNS, tuple(lines), frozenset(bad))


_NO_VERDICT = ("the baseline", "its rounding twin", "unsupported", "oom", "skipped", NOTHING)


def _line(row: Row, judged: dict[str, Any]) -> tuple[str, ...]:
    name, baseline = row.case["variant"], row.measures["baseline"]
    if row.status != "ok":
        return (name, row.status, *[NOTHING] * 5)
    entry = judged.get(name, {})
    angles = row.measures.get("angles") or [None]
    said = _NO_VERDICT[0] if name == baseline else entry.get("verdict", NOTHING)
    if name == ROUNDING:
        said = _NO_VERDICT[1]
    return (
        f"{name}, seed {row.case['seed']}",
        said,
        f"{last_quarter(row.measures['losses']):.5f}",
        number(entry.get("difference")),
        number(entry.get("sigmas")),
        number(angles[0]),
        number(max(angles, key=nan_last) if angles[0] is not None else None),
    )
