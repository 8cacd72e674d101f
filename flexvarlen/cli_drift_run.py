"""What the commands of `flexvarlen drift` do; their options are in `cli_drift.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
import typer

import flexvarlen as fv
from flexvarlen.cli_console import NOT_RIGHT, console, device_of, dtype_of, errors, progress_bar
from flexvarlen.doctor import parse_heads
from flexvarlen.drift.report.complete import (
    backends_left,
    has_attribution,
    has_case,
    has_model,
    has_training,
)
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
from flexvarlen.equivalence.corpus import (
    DEFAULT_TOKENS,
    packed_rows,
    packed_text,
    read_documents,
)
from flexvarlen.equivalence.isolation_command import parse_lengths
from flexvarlen.equivalence.models import build_model, parse_model
from flexvarlen.equivalence.variants import THEIRS, variant_names

if TYPE_CHECKING:
    from flexvarlen.drift.op.cases import OpCase

TRAINING_TOKENS = {"cpu": 256, "cuda": 8192}

_MEASURES = {
    "drift-op": OP_MEASURES,
    "drift-model": MODEL_MEASURES,
    "drift-training": TRAINING_MEASURES,
}

Show = Callable[[int, int, str], None]
"""Called with the steps done, all steps, and what is being done."""


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
        each = tuple(dtype_of(name, where) for name in (_split(dtypes) if dtypes else [None]))
        journal = Journal(out, resume=resume)
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
    """The cases that the file lacks, one after another, as long as there is a device."""
    from flexvarlen.drift.op.comparisons import COMPARISONS, operator_drift
    from flexvarlen.drift.op.failures import DeviceLostError

    names = _backends(backends)
    wanted = list(COMPARISONS) if comparisons == "all" else _split(comparisons)
    if not compile:
        wanted = [name for name in wanted if name != "eager-compiled"]
    shared: dict[str, Any] = {"device": place.device, "comparisons": wanted, "train": train}
    operator_drift([], names, **shared)  # all mistakes before any work
    todo = [(dtype, case) for dtype in place.dtypes for case in cases]
    with progress_bar() as show:
        for done, (dtype, case) in enumerate(todo):

            def say(what: str, done: int = done) -> None:
                show(done, len(todo), what)

            row_case = case.as_row_case(dtype)
            left = backends_left(place.journal, row_case, names)
            if has_case(place.journal, row_case, left, wanted):
                continue
            try:
                operator_drift(
                    [case],
                    left,
                    dtypes=(dtype,),
                    seed=seed,
                    commit=place.commit,
                    append=place.journal.append,
                    progress=say,
                    **shared,
                )
            except DeviceLostError as error:
                text = f"{error} The rows are kept: --resume goes on, without it in this case."
                errors.print(text, style="red", markup=False, highlight=False)
                return


# ---- drift model ----


def run_model(
    place: Place,
    models: Sequence[str],
    text: Sequence[Path],
    tokens: int | None,
    backends: str,
    *,
    baseline: str,
    comparisons: str,
    attribution: bool,
    compile: bool,
    train: bool,
    seed: int,
) -> None:
    """Each model in each dtype: the comparisons, then whose drift it is."""
    from flexvarlen.drift.model.attribution import attribute
    from flexvarlen.drift.model.comparisons import comparison_names, model_drift
    from flexvarlen.drift.model.setting import is_lean

    _quiet_transformers()
    specs = [parse_model(name) for name in models]  # all mistakes before any work
    names, lean = variant_names(backends, place.device), is_lean(backends, place.device)
    variant_names([baseline], place.device)
    wanted = [n for n in comparison_names(comparisons) if compile or n != "eager-compiled"]
    read_documents(text)
    ours = [name for name in names if not name.startswith(THEIRS)]
    if attribution and "auto" in ours:
        raise ValueError(
            "backends must be names of kernels for --attribution, got 'auto'; name the one that it "
            "takes (flexvarlen doctor --explain), or pass --no-attribution."
        )
    with progress_bar() as show:
        for spec, dtype in [(spec, dtype) for spec in specs for dtype in place.dtypes]:
            model, tokenizer = build_model(spec.name, device=place.device, dtype=dtype, seed=seed)
            wide = tokens or DEFAULT_TOKENS[place.device.type]
            batch = packed_text(
                vocabulary=model.config.vocab_size,
                tokens=wide,
                seed=seed,
                files=text,
                tokenizer=tokenizer,
            )
            case = {
                "model": spec.label,
                "dtype": _name(dtype),
                "tokens": batch.total_tokens,
                "seed": seed,
            }
            shared: dict[str, Any] = {
                "train": train,
                "seed": seed,
                "name": spec.label,
                "commit": place.commit,
                "append": place.journal.append,
                "progress": _named(show, spec.label),
                "lean": lean,
            }
            todo = [n for n in names if not has_model(place.journal, case, n, wanted, lean=lean)]
            if todo:
                model_drift(model, batch, todo, comparisons=wanted, baseline=baseline, **shared)
            todo = [n for n in ours if not has_attribution(place.journal, case, n, lean=lean)]
            if attribution and todo:
                attribute(model, batch, todo, **shared)
            del model


# ---- drift train ----


def run_train(
    place: Place,
    name: str,
    text: Sequence[Path],
    tokens: int | None,
    backends: str,
    *,
    baseline: str,
    steps: int,
    seeds: str,
    lr: float,
) -> None:
    """The trainings of each dtype."""
    from flexvarlen.drift.training.variants import check_training, training_drift

    _quiet_transformers()
    spec = parse_model(name)
    chosen, names = _seeds(seeds), _backends(backends)
    check_training([baseline, *names], steps, chosen)  # all mistakes before any work
    read_documents(text)
    width = tokens or TRAINING_TOKENS[place.device.type]
    with progress_bar() as show:
        for dtype in place.dtypes:

            def make_model(seed: int, dtype: torch.dtype = dtype) -> Any:
                return build_model(spec.name, device=place.device, dtype=dtype, seed=seed)[0]

            case = {"model": spec.label, "steps": steps, "tokens": width, "dtype": _name(dtype)}
            if has_training(place.journal, case, names, baseline, chosen, lr):
                continue
            model, tokenizer = build_model(spec.name, device=place.device, dtype=dtype)
            vocabulary = model.config.vocab_size
            del model
            training_drift(
                make_model,
                packed_rows(
                    vocabulary=vocabulary,
                    tokens=width,
                    seeds=range(steps),
                    files=text,
                    tokenizer=tokenizer,
                ),
                names,
                model=spec.label,
                baseline=baseline,
                steps=steps,
                seeds=chosen,
                lr=lr,
                commit=place.commit,
                append=place.journal.append,
                progress=_named(show, spec.label),
            )


def _seeds(text: str) -> list[int]:
    parts = _split(text)
    if not all(part.isdecimal() for part in parts):
        raise ValueError(
            f"seeds must be numbers from 0 with commas between, got {text!r}; write 0,1,2."
        )
    return [int(part) for part in parts]


# ---- what options mean ----


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def _backends(text: str) -> list[str]:
    return list(fv.BACKENDS) if text == "all" else _split(text)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _quiet_transformers() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


# ---- what is shown ----


def _named(show: Show, name: str) -> Show:
    def named(done: int, total: int, what: str) -> None:
        show(done, total, f"{name}: {what}")

    return named


def finish(place: Place) -> None:
    """Tables, sentences, files; then the exit code.

    Raises:
        typer.Exit: with code 1 if a backend of ours is wrong or broke, or a limit is passed.
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
    rows = [row for row in report.rows if row.suite == place.suite]
    broken = broken_limits(place.limits, measured(rows))
    for sentence in broken:
        errors.print(sentence, style="red", markup=False, highlight=False)
    if broken or not report.passed:
        raise typer.Exit(NOT_RIGHT)
