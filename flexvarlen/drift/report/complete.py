"""What an earlier run's rows leave to do: for `--resume`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

from flexvarlen.drift.report.journal import Journal
from flexvarlen.rows import Row


def backends_left(
    journal: Journal,
    suite: str,
    case: dict[str, Any],
    backends: Sequence[str],
    who: str = "backend",
) -> list[str]:
    """Without those that lost the device in this case: they would again, and nothing get on.

    Args:
        journal: of the rows.
        suite: theirs.
        case: what is about to run: entries of their case.
        backends: what is asked for.
        who: the entry of a row's case that names one.
    """
    from flexvarlen.drift.op.failures import LOST

    lost = {row.case[who] for row in journal.every(suite, **case) if LOST in row.measures}
    return [name for name in backends if name not in lost]


def has_case(
    journal: Journal,
    case: dict[str, Any],
    backends: Sequence[str],
    comparisons: Sequence[str],
    compiled: Sequence[str],
) -> bool:
    """Whether the file has all of a case.

    Args:
        journal: of the rows.
        case: as `OpCase.as_row_case`, with `train` and `seed`: rows of another seed, or of the
            forward alone, are none of this case.
        backends, comparisons: what is asked for.
        compiled: the backends that this run compiles: a row that says that one was not to be is
            none of theirs.
    """
    from flexvarlen.drift.op.failures import REFUSED

    def rows(backend: str, **more: Any) -> list[Row]:
        return journal.rows("drift-op", **case, backend=backend, **more)

    def has(backend: str, **more: Any) -> bool:
        found = rows(backend, **more)
        return any(row.status != "skipped" or backend not in compiled for row in found)

    refused = {name for name in backends if any(REFUSED in row.measures for row in rows(name))}
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
    journal: Journal,
    case: dict[str, Any],
    backend: str,
    comparisons: Sequence[str],
    baseline: str,
    *,
    lean: bool,
) -> bool:
    """Whether the file has all of a backend; a comparison of dtypes has a dtype of its own.

    `case` has `train` and `seed` too. The baseline matters for what is held against it alone. What
    an earlier run left out for being lean is there for another lean run alone.
    """
    shared = {name: value for name, value in case.items() if name != "dtype"}

    def has(comparison: str) -> bool:
        own = shared if comparison == "dtype" else case
        own = own | {"backend": backend, "comparison": comparison}
        own |= {"other": baseline} if comparison == "backend-backend" else {}
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
