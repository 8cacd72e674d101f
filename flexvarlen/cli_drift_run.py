"""What `flexvarlen drift op` does, and what all of `drift` share; options: `cli_drift.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import typer

import flexvarlen as fv
from flexvarlen.cli_console import NOT_RIGHT, console, device_of, dtype_of, errors, progress_bar
from flexvarlen.doctor import parse_heads
from flexvarlen.drift.report.complete import backends_left, has_case
from flexvarlen.drift.report.journal import Journal
from flexvarlen.drift.report.thresholds import (
    MODEL_MEASURES,
    OP_MEASURES,
    TRAINING_MEASURES,
    Threshold,
    broken_limits,
    measured,
    parse_thresholds,
)
from flexvarlen.equivalence.isolation_command import parse_lengths

if TYPE_CHECKING:
    from flexvarlen.drift.op.cases import OpCase

_MEASURES = {
    "drift-op": OP_MEASURES,
    "drift-model": MODEL_MEASURES,
    "drift-training": TRAINING_MEASURES,
}


@dataclass(frozen=True)
class Place:
    """What all commands ask: where it runs, in what, and where the rows go.

    Attributes:
        device, dtypes: of the tensors.
        folder: of the files.
        journal: the file of rows there.
        limits: the user's own.
        commit: to record, or None.
        suite: of the rows that the limits are for.
    """

    device: torch.device
    dtypes: tuple[torch.dtype, ...]
    folder: Path
    journal: Journal
    limits: tuple[Threshold, ...]
    commit: str | None
    suite: str

    @classmethod
    def of(
        cls,
        device: str | None,
        dtypes: str | None,
        out: Path,
        resume: bool,
        fail_above: Sequence[str] | None,
        commit: str | None,
        suite: str,
    ) -> Place:
        """From the options; raises a ValueError for what they cannot mean."""
        limits = parse_thresholds(fail_above or [], _MEASURES[suite])
        where = device_of(device)
        each = tuple(dtype_of(name, where) for name in (split_names(dtypes) if dtypes else [None]))
        journal = Journal(out, where, resume=resume)
        return cls(where, each, out, journal, tuple(limits), commit, suite)


# ---- drift op ----


def cases_of(
    suite: str | None,
    lengths: str | None,
    heads: str,
    head_dim: int,
    causal: bool,
    window: int | None,
    device: torch.device,
) -> list[OpCase]:
    """The cases of a suite, or of one's own lengths; raises a ValueError for what is neither."""
    from flexvarlen.drift.op.cases import SUITES, OpCase

    if lengths is None:
        name = suite or ("cpu" if device.type == "cpu" else "varlen-study")
        if name not in SUITES:
            raise ValueError(
                f"suite must be one of {', '.join(SUITES)}, got {name!r}; choose one, or give "
                "--lengths."
            )
        return list(SUITES[name])
    if suite is not None:
        raise ValueError(
            f"suite must not be given together with lengths, got {suite!r}; leave one out."
        )
    query, kv = parse_heads(heads)
    each = [parse_lengths(text) for text in lengths.split(";")]
    return [
        OpCase(",".join(map(str, one)), one, query, kv, head_dim, causal, window) for one in each
    ]


def run_op(
    place: Place,
    cases: Sequence[OpCase],
    backends: str,
    *,
    comparisons: str,
    compile: bool,
    train: bool,
    seed: int,
) -> None:
    """The cases that the file lacks, one after another.

    Raises:
        DeviceLostError: a backend broke the device; the rows are kept.
    """
    from flexvarlen.drift.op.comparisons import COMPARISONS, compiled_backends, operator_drift

    names = backend_names(backends)
    wanted = list(COMPARISONS) if comparisons == "all" else split_names(comparisons)
    if not compile:
        wanted = [name for name in wanted if name != "eager-compiled"]
    shared: dict[str, Any] = {"device": place.device, "comparisons": wanted, "train": train}
    operator_drift([], names, **shared)  # all mistakes before any work
    todo = [(dtype, case) for dtype in place.dtypes for case in cases]
    with progress_bar() as show:
        for done, (dtype, case) in enumerate(todo):

            def say(what: str, done: int = done) -> None:
                show(done, len(todo), what)

            row_case = case.as_row_case(dtype, train=train, seed=seed)
            left = backends_left(place.journal, "drift-op", row_case, names)
            compiled = compiled_backends(left, place.device)
            if has_case(place.journal, row_case, left, wanted, compiled):
                continue
            operator_drift(
                [case],
                left,
                dtypes=(dtype,),
                compile=compiled,
                seed=seed,
                commit=place.commit,
                append=place.journal.append,
                progress=say,
                **shared,
            )


# ---- what options mean ----


def split_names(text: str) -> list[str]:
    """At the commas."""
    return [part.strip() for part in text.split(",")]


def backend_names(text: str) -> list[str]:
    """All, or those named."""
    return list(fv.BACKENDS) if text == "all" else split_names(text)


def dtype_name(dtype: torch.dtype) -> str:
    """As in a row, e.g. "bfloat16"."""
    return str(dtype).removeprefix("torch.")


# ---- what is shown ----


def run_to_end(run: Callable[[], None]) -> bool:
    """Run, as long as there is a device; False, and a sentence, if it was lost."""
    from flexvarlen.drift.op.failures import DeviceLostError

    try:
        run()
    except DeviceLostError as error:
        text = f"{error} The rows are kept: --resume goes on, without it in this case."
        errors.print(text, style="red", markup=False, highlight=False)
        return False
    return True


def finish(place: Place, *, whole: bool) -> None:
    """Tables, sentences, files; then the exit code.

    Args:
        place: of the run.
        whole: whether it came to its end.

    Raises:
        typer.Exit: with code 1 if a backend of ours is wrong or broke, a limit is passed, or the
            run is not whole. What another machine measured does not count.
    """
    report = place.journal.report()
    console.print(report.table(console.width))
    for note in report.notes():
        console.print(note, style="dim", markup=False, highlight=False)
    console.print()
    for said in report.sentences():
        console.print(f"- {said}", markup=False, highlight=False)
    if place.journal.note is not None:
        console.print(f"{place.folder}: {place.journal.note}", markup=False, highlight=False)
    for path in report.save(place.folder):
        console.print(f"wrote {path}", highlight=False)
    judged = place.journal.measured_here()
    rows = [row for row in judged.rows if row.suite == place.suite]
    broken = broken_limits(place.limits, measured(rows))
    for sentence in broken:
        errors.print(sentence, style="red", markup=False, highlight=False)
    if broken or not judged.passed or not whole:
        raise typer.Exit(NOT_RIGHT)
