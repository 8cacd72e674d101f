"""What `flexvarlen drift model` and `drift train` do; their options are in `cli_drift.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from flexvarlen.cli_console import progress_bar
from flexvarlen.cli_drift_run import Place, backend_names, dtype_name, split_names
from flexvarlen.drift.report.complete import backends_left, has_attribution, has_model, has_training
from flexvarlen.equivalence.corpus import DEFAULT_TOKENS, packed_rows, packed_text, read_documents
from flexvarlen.equivalence.models import build_model, parse_model
from flexvarlen.equivalence.variants import THEIRS, variant_names

TRAINING_TOKENS = {"cpu": 256, "cuda": 8192}

Show = Callable[[int, int, str], None]
"""Called with the steps done, all steps, and what is being done."""


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
    """Each model in each dtype: the comparisons, then whose drift it is.

    Raises:
        DeviceLostError: a backend broke the device; the rows are kept.
    """
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
                "dtype": dtype_name(dtype),
                "tokens": batch.total_tokens,
                "seed": seed,
                "train": train,
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
            left = backends_left(place.journal, "drift-model", case, names)
            todo = [
                name
                for name in left
                if not has_model(place.journal, case, name, wanted, baseline, lean=lean)
            ]
            if todo:
                model_drift(model, batch, todo, comparisons=wanted, baseline=baseline, **shared)
            left = backends_left(place.journal, "drift-attribution", case, ours)
            todo = [n for n in left if not has_attribution(place.journal, case, n, lean=lean)]
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
    """The trainings of each dtype.

    Raises:
        DeviceLostError: a variant broke the device; the rows are kept.
    """
    from flexvarlen.drift.training.variants import check_training, training_drift

    _quiet_transformers()
    spec = parse_model(name)
    chosen, names = _seeds(seeds), backend_names(backends)
    check_training([baseline, *names], steps, chosen)  # all mistakes before any work
    read_documents(text)
    width = tokens or TRAINING_TOKENS[place.device.type]
    with progress_bar() as show:
        for dtype in place.dtypes:

            def make_model(seed: int, dtype: torch.dtype = dtype) -> Any:
                return build_model(spec.name, device=place.device, dtype=dtype, seed=seed)[0]

            case = {
                "model": spec.label,
                "steps": steps,
                "tokens": width,
                "dtype": dtype_name(dtype),
            }
            left = backends_left(place.journal, "drift-training", case, names, "variant")
            if has_training(place.journal, case, left, baseline, chosen, lr):
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
                left,
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
    parts = split_names(text)
    if not all(part.isdecimal() for part in parts):
        raise ValueError(
            f"seeds must be numbers from 0 with commas between, got {text!r}; write 0,1,2."
        )
    return [int(part) for part in parts]


def _quiet_transformers() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def _named(show: Show, name: str) -> Show:
    def named(done: int, total: int, what: str) -> None:
        show(done, total, f"{name}: {what}")

    return named
