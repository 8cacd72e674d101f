"""What an earlier run's rows leave to do: for `--resume`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

from flexvarlen.drift.report.journal import Journal
from flexvarlen.rows import Row


def backends_left(journal: Journal, case: dict[str, Any], backends: Sequence[str]) -> list[str]:
    """Without those that lost the device in this case: they would again, and nothing get on."""
    from flexvarlen.drift.op.failures import LOST

    lost = {
        row.case["backend"] for row in journal.every("drift-op", **case) if LOST in row.measures
    }
    return [name for name in backends if name not in lost]


def has_case(
    journal: Journal, case: dict[str, Any], backends: Sequence[str], comparisons: Sequence[str]
) -> bool:
    """Whether the file has all of a case."""

    def has(backend: str, **more: Any) -> bool:
        return journal.has("drift-op", **case, backend=backend, **more)

    refused = {
        name
        for name in backends
        if any(
            row.status == "unsupported" for row in journal.rows("drift-op", **case, backend=name)
        )
    }
    for comparison in comparisons:
        if comparison != "backend-backend":
            if not all(has(name, comparison=comparison) for name in backends):
                return False
            continue
        for one, other in combinations([name for name in backends if name not in refused], 2):
            pair = {"comparison": comparison}
            if not has(one, other=other, **pair) and not has(other, other=one, **pair):
                return False
    return True


def has_model(
    journal: Journal, case: dict[str, Any], backend: str, comparisons: Sequence[str], *, lean: bool
) -> bool:
    """Whether the file has all of a backend; a comparison of dtypes has a dtype of its own.

    What an earlier run left out for being lean is there for another lean run alone.
    """
    shared = {name: value for name, value in case.items() if name != "dtype"}

    def has(comparison: str) -> bool:
        own = shared if comparison == "dtype" else case
        own = own | {"backend": backend, "comparison": comparison}
        return _has(journal, "drift-model", own, lean)

    return all(map(has, comparisons))


def has_attribution(journal: Journal, case: dict[str, Any], backend: str, *, lean: bool) -> bool:
    """Whether the file has all of a backend's runs; `lean` as above."""
    from flexvarlen.drift.model.attribution import WHAT

    shared = {**case, "backend": backend}
    return all(_has(journal, "drift-attribution", shared | {"what": what}, lean) for what in WHAT)


def _has(journal: Journal, suite: str, case: dict[str, Any], lean: bool) -> bool:
    return any(lean or row.status != "skipped" for row in journal.rows(suite, **case))


def has_training(
    journal: Journal,
    case: dict[str, Any],
    variants: Sequence[str],
    baseline: str,
    seeds: Sequence[int],
    lr: float,
) -> bool:
    """Whether the file has the verdict on just these trainings."""
    from flexvarlen.drift.training.verdict import VERDICT

    def of(variant: str) -> list[Row]:
        found = journal.rows("drift-training", **case, variant=variant)
        return [row for row in found if row.measures.get("baseline") == baseline]

    verdicts = [row for row in of(VERDICT) if list(row.measures["seeds"]) == list(seeds)]
    trained = [[row for row in of(name) if row.measures.get("lr") == lr] for name in variants]
    return bool(verdicts) and all(trained)
