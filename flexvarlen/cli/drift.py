"""The commands `flexvarlen drift op`, `model` and `rollout`. Heavy imports happen inside."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from zlib import crc32

import typer

from flexvarlen.cli.console import (
    CPU_MODELS,
    FAILURE,
    FINDING,
    Again,
    Commit,
    Device,
    Dtype,
    RowTokens,
    Seed,
    Text,
    Train,
    console,
    device_of,
    dtype_of,
    errors,
    names_in,
    one_line_errors,
    progress_bar,
    quiet_transformers,
)

if TYPE_CHECKING:
    import torch

    from flexvarlen.runner.suite import Options, Suite

drift = typer.Typer(
    no_args_is_help=True,
    help="How far outputs and gradients move when only the backend, the batching or the "
    "compilation changes. Ends with exit code 1 on a finding, 2 on bad usage, a failure, "
    "or if nothing was compared.",
)

Dtypes = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        help="float32, bfloat16 or float16, or several, comma-separated. [default: float32, "
        "bfloat16 on a GPU]",
        show_default=False,
    ),
]
Backends = Annotated[
    str,
    typer.Option(
        "--backend",
        help="all, or comma-separated names. On a CPU all excludes slow compilers.",
    ),
]
Out = Annotated[Path, typer.Option("--out", help="Folder for records.jsonl and report.md.")]
FailAbove = Annotated[
    list[str] | None,
    typer.Option(
        "--fail-above",
        metavar="MEASURE=VALUE",
        help="End with exit code 1 if a measure is larger in any record; MEASURE is a name as in "
        "the records, or a suffix of several (relative, max_abs). Repeatable.",
        show_default=False,
    ),
]


@drift.command()
def op(
    suite: Annotated[
        str | None,
        typer.Option(
            "--suite", help="varlen-study, gqa or cpu. [default: cpu, varlen-study on a GPU]"
        ),
    ] = None,
    backend: Backends = "all",
    comparisons: Annotated[
        str,
        typer.Option(
            "--comparisons",
            help="all, or exact, batch-serial, run-run, backend-backend.",
        ),
    ] = "all",
    dtype: Dtypes = None,
    train: Train = True,
    device: Device = None,
    seed: Seed = 0,
    out: Out = Path("drift"),
    again: Again = False,
    fail_above: FailAbove = None,
    commit: Commit = None,
) -> None:
    """Compare attention alone: batch with serial, backend with backend, each with float64.

    A finding is an error above the acceptance rule, or a measure above your own limit.
    """
    with one_line_errors(op):
        from flexvarlen.verify.experiment.operator import OperatorDrift, backend_variants
        from flexvarlen.verify.experiment.operator_cases import suite_cases

        where = device_of(device)
        cases = suite_cases(suite or ("cpu" if where.type == "cpu" else "varlen-study"))
        dtypes = _dtypes(dtype, where)
        drift_op = OperatorDrift.of(cases, dtypes, names_in(comparisons), train=train, seed=seed)
        options = _options(where, backend_variants(names_in(backend)))
        _run(drift_op, options, out, again, commit, fail_above)


@drift.command(name="model")
def model_command(
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model", help="llama, qwen3:1.7b@14, a folder, a hub name. [default: qwen3]"
        ),
    ] = None,
    text: Text = None,
    tokens: RowTokens = None,
    backend: Backends = "all",
    comparisons: Annotated[
        str,
        typer.Option(
            "--comparisons",
            help="all, or packed-alone, packed-padded, backend-backend, eager-compiled, dtype.",
        ),
    ] = "all",
    dtype: Dtypes = None,
    train: Train = True,
    device: Device = None,
    seed: Seed = 0,
    out: Out = Path("drift"),
    again: Again = False,
    fail_above: FailAbove = None,
    commit: Commit = None,
) -> None:
    """Compare a model on one batch: packed with alone and padded, backends, dtypes, compiled.

    A finding is a backend of flexvarlen that fails, or is off from each document alone in float64
    by more than the acceptance rule allows; or a measure above your own limit.
    """
    with one_line_errors(model_command):
        from flexvarlen.verify.compare.pairs import ModelDrift, cases_of
        from flexvarlen.verify.corpus import DEFAULT_TOKENS
        from flexvarlen.verify.models import NamedModels

        where = device_of(device)
        named = NamedModels(model or [CPU_MODELS[1]], text or [], where)
        cases = [
            case
            for spec, what in product(named.specs, _dtypes(dtype, where))
            for case in cases_of(
                names_in(comparisons),
                model=spec.label,
                dtype=str(what).removeprefix("torch."),
                tokens=tokens or DEFAULT_TOKENS[where.type],
                train=train,
                seed=seed,
                load=partial(named.load, spec.name, what, tokens, seed),
                text=named.checksum,
            )
        ]
        options = _options(where, _variants(backend, where))
        _run(ModelDrift(cases), options, out, again, commit, fail_above)


@drift.command()
def rollout(
    responses: Annotated[
        Path,
        typer.Option(
            "--responses",
            help="JSON lines, a response on each: vLLM's RequestOutput or server, SGLang's "
            "/generate, or prompt_ids, completion_ids and logprobs; also temperature.",
        ),
    ],
    model: Annotated[str, typer.Option("--model", help="The folder or hub name that sampled.")],
    temperature: Annotated[
        float | None,
        typer.Option(
            "--temperature",
            help="Of the sampling, for lines that do not say. [default: each line's]",
            show_default=False,
        ),
    ] = None,
    logprobs_mode: Annotated[
        str | None,
        typer.Option(
            "--logprobs-mode",
            help="raw_logprobs (vLLM's default: before temperature and processors) or "
            "processed_logprobs, for lines that do not say. Lines of vLLM at another temperature "
            "than 1 are refused without it; lines without a temperature, unless it is "
            "raw_logprobs. [default: processed_logprobs, for vLLM none]",
            show_default=False,
        ),
    ] = None,
    tokens: RowTokens = None,
    backend: Backends = "all",
    dtype: Dtype = None,
    device: Device = None,
    seed: Seed = 0,
    out: Out = Path("drift"),
    again: Again = False,
    fail_above: FailAbove = None,
    commit: Commit = None,
) -> None:
    """Compare a model's log-probabilities with those of the engine that sampled.

    By token and response, for each backend, packed and alone, with head and model in float32: which
    comes closest, and what causes the rest. Broken files are refused.
    """
    with one_line_errors(rollout):
        from flexvarlen.verify.corpus import DEFAULT_TOKENS
        from flexvarlen.verify.models import build_model, checked_model
        from flexvarlen.verify.rollout.consistency import require_consistent
        from flexvarlen.verify.rollout.drift import RolloutCase, RolloutDrift
        from flexvarlen.verify.rollout.responses import read_responses

        where = device_of(device)
        what = dtype_of(dtype, where)
        found = read_responses(responses, temperature, logprobs_mode)
        label, options = checked_model(model).label, _options(where, _variants(backend, where))
        built, _ = build_model(model, device=where, dtype=what, seed=seed)
        row = tokens or DEFAULT_TOKENS[where.type]
        require_consistent(built.eval(), found, row)
        case = RolloutCase(
            model=label,
            dtype=str(what).removeprefix("torch."),
            file=responses.name,
            crc32=crc32(responses.read_bytes()),
            tokens=row,
            responses=tuple(found),
            base=built,
        )
        _run(RolloutDrift([case]), options, out, again, commit, fail_above)


# ---- what options mean ----


def _dtypes(text: str | None, device: torch.device) -> list[torch.dtype]:
    return [dtype_of(name, device) for name in (names_in(text) if text else [None])]


def _variants(backends: str, device: torch.device) -> tuple[str, ...] | None:
    from flexvarlen.verify.experiment.variant import variant_names

    return None if backends == "all" else tuple(variant_names(backends, device))


def _options(device: torch.device, variants: tuple[str, ...] | None) -> Options:
    from flexvarlen.runner.suite import Options

    quiet_transformers()

    def say(line: str) -> None:
        errors.print(line, style="dim", markup=False, highlight=False)

    return Options(device, variants=variants, say=say)


# ---- the run, and what is shown ----


def _run(
    suite: Suite[Any],
    options: Options,
    out: Path,
    again: bool,
    commit: str | None,
    fail_above: Sequence[str] | None,
) -> None:
    """Measure cases that the folder lacks; print the table and the findings.

    Raises:
        typer.Exit: with code 1 if there is a finding, 2 if the run failed or nothing was compared.
    """
    from flexvarlen.report.records import require_file
    from flexvarlen.runner.run import RunRequest, records_of_run, run_suite
    from flexvarlen.runner.suite import DeviceLost
    from flexvarlen.verify.compare.drift_report import DriftReport, Threshold

    limits = list(map(Threshold.of, fail_above or []))
    lost, run = None, RunRequest(out / "records.jsonl", again=again, commit=commit)
    require_file(out / "records.jsonl")
    try:
        with progress_bar() as show:
            ended = run_suite(suite, options, run, show)
        options.say(f"{suite.name}: {ended.counts}. Records in {run.out}.")
    except DeviceLost as error:
        lost = f"{error}. Results so far are kept; run again to continue without it."
    report = DriftReport(tuple(records_of_run(suite, options, run)))
    findings = report.broken_limits(limits)
    report.save(out / "report.md")
    for table in report.tables(console.width):
        console.print(table.rich(console.width))
    console.print()
    for sentence in [*report.sentences(), *findings, *([lost] if lost else [])]:
        console.print(sentence, markup=False, highlight=False)
    if lost:
        raise typer.Exit(FAILURE)
    if findings or not report.passed:
        raise typer.Exit(FINDING)
    if not report.compared:
        raise typer.Exit(FAILURE)
