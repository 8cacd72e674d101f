"""The commands `flexvarlen drift op`, `model`, `train`, `report`. Heavy imports happen inside."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from flexvarlen.cli_console import (
    CPU_MODELS,
    Device,
    FailAbove,
    RowTokens,
    Text,
    Train,
    console,
    sentences,
)

drift = typer.Typer(
    no_args_is_help=True,
    help="How far outputs and gradients move when only the backend, the batching or the "
    "compilation changes.",
)

Dtypes = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        help="float32, bfloat16 or float16, or several with commas between. [default: float32, "
        "bfloat16 on a GPU]",
        show_default=False,
    ),
]
Backends = Annotated[str, typer.Option(help="all, or names with commas between.")]
Compile = Annotated[
    bool, typer.Option("--compile/--no-compile", help="Also compare compiled with eager.")
]
Seed = Annotated[int, typer.Option(help="Of all that is random.")]
Out = Annotated[Path, typer.Option(help="Folder for rows.jsonl, report.md and report.html.")]
Resume = Annotated[
    bool, typer.Option("--resume", help="Keep the rows in the folder; run what they lack.")
]
Commit = Annotated[
    str | None, typer.Option(help="To record, where git cannot tell it.", show_default=False)
]


@drift.command()
def op(
    suite: Annotated[
        str | None,
        typer.Option(
            help="varlen-study, gqa or cpu. [default: cpu, varlen-study on a GPU]",
            show_default=False,
        ),
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            help='Cases of your own instead: tokens of each document, as in "256; 320,320".',
            show_default=False,
        ),
    ] = None,
    heads: Annotated[str, typer.Option(help="With --lengths: query heads/KV heads.")] = "24/24",
    head_dim: Annotated[int, typer.Option(min=1, help="With --lengths.")] = 128,
    causal: Annotated[bool, typer.Option("--causal/--no-causal", help="With --lengths.")] = True,
    window: Annotated[
        int | None,
        typer.Option(min=1, help="With --lengths: keys that a query sees.", show_default=False),
    ] = None,
    backends: Backends = "all",
    comparisons: Annotated[
        str,
        typer.Option(
            help="all, or of exact, batch-serial, run-run, place, eager-compiled, backend-backend, "
            "runtime."
        ),
    ] = "all",
    dtype: Dtypes = None,
    train: Train = True,
    compile: Compile = True,
    device: Device = None,
    seed: Seed = 0,
    out: Out = Path("drift"),
    resume: Resume = False,
    fail_above: FailAbove = None,
    commit: Commit = None,
) -> None:
    """Compare attention alone: batch with serial, backend with backend, each with fp64.

    Ends with exit code 1 if a backend is less exact than twice plain attention in its dtype (three
    times for gradients).
    """
    with sentences():
        from flexvarlen.cli_drift_run import Place, cases_of, finish, run_op, run_to_end

        place = Place.of(device, dtype, out, resume, fail_above, commit, "drift-op")
        cases = cases_of(suite, lengths, heads, head_dim, causal, window, place.device)
        run = partial(
            run_op,
            place,
            cases,
            backends,
            comparisons=comparisons,
            compile=compile,
            train=train,
            seed=seed,
        )
        whole = run_to_end(run)
    finish(place, whole=whole)


@drift.command(name="model")
def model_command(
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="As in compare: llama, qwen3:1.7b@14, a folder, a hub name. Repeatable. "
            "[default: qwen3]",
            show_default=False,
        ),
    ] = None,
    text: Text = None,
    tokens: RowTokens = None,
    backends: Backends = "all",
    baseline: Annotated[
        str, typer.Option(help="The backend that the others are held against.")
    ] = "sdpa",
    comparisons: Annotated[
        str,
        typer.Option(
            help="all, or of packed-alone, packed-padded, backend-backend, eager-compiled, dtype."
        ),
    ] = "all",
    dtype: Dtypes = None,
    attribution: Annotated[
        bool,
        typer.Option(
            "--attribution/--no-attribution",
            help="Also what share attention, matmuls and norms have; and batch-invariant.",
        ),
    ] = True,
    train: Train = True,
    compile: Compile = True,
    device: Device = None,
    seed: Seed = 0,
    out: Out = Path("drift"),
    resume: Resume = False,
    fail_above: FailAbove = None,
    commit: Commit = None,
) -> None:
    """Compare a model on one batch: packed with alone and padded, backends, dtypes, compiled.

    Ends with exit code 1 if a backend of flexvarlen fails, or a limit of yours is passed. Whether
    a backend is right is what flexvarlen compare tells.
    """
    with sentences():
        from flexvarlen.cli_drift_model import run_model
        from flexvarlen.cli_drift_run import Place, finish, run_to_end

        place = Place.of(device, dtype, out, resume, fail_above, commit, "drift-model")
        run = partial(
            run_model,
            place,
            model or list(CPU_MODELS[1:]),
            text or [],
            tokens,
            backends,
            baseline=baseline,
            comparisons=comparisons,
            attribution=attribution,
            compile=compile,
            train=train,
            seed=seed,
        )
        whole = run_to_end(run)
    finish(place, whole=whole)


@drift.command(name="train")
def train_command(
    model: Annotated[
        str, typer.Option(help="As in compare; a checkpoint starts from its own parameters.")
    ] = CPU_MODELS[1],
    text: Text = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Tokens of each step's row. [default: 256, 8192 on a GPU]",
            show_default=False,
        ),
    ] = None,
    backends: Backends = "all",
    baseline: Annotated[
        str,
        typer.Option(
            help="What the others are held against: unpacked (each document in its own row), or a "
            "backend."
        ),
    ] = "unpacked",
    steps: Annotated[int, typer.Option(min=4, help="Of AdamW.")] = 20,
    seeds: Annotated[str, typer.Option(help="At least 3; the variants share the first.")] = "0,1,2",
    lr: Annotated[float, typer.Option(help="Learning rate, constant.")] = 1e-3,
    dtype: Dtypes = None,
    device: Device = None,
    out: Out = Path("drift"),
    resume: Resume = False,
    fail_above: FailAbove = None,
    commit: Commit = None,
) -> None:
    """Train with each backend from the same seed, and hold the losses against the seed's noise.

    Ends with exit code 1 if a backend of flexvarlen is beyond it.
    """
    with sentences():
        from flexvarlen.cli_drift_model import run_train
        from flexvarlen.cli_drift_run import Place, finish, run_to_end

        place = Place.of(device, dtype, out, resume, fail_above, commit, "drift-training")
        run = partial(
            run_train,
            place,
            model,
            text or [],
            tokens,
            backends,
            baseline=baseline,
            steps=steps,
            seeds=seeds,
            lr=lr,
        )
        whole = run_to_end(run)
    finish(place, whole=whole)


@drift.command()
def report(
    folders: Annotated[
        list[Path], typer.Argument(help="Folders with rows.jsonl, as runs left them.")
    ],
    out: Out = Path("drift"),
) -> None:
    """Write report and rows anew, of several runs together; nothing is measured.

    Of rows of one suite, case and GPU the last is taken; each GPU has tables of its own.
    """
    with sentences():
        from flexvarlen.drift.report.files import ROWS, DriftReport
        from flexvarlen.rows import require_folder

        require_folder(out)
        made = DriftReport.read(*folders)
        if (out / ROWS).is_file():
            lost = len(DriftReport.read(out, *folders).rows) - len(made.rows)
            if lost:
                raise ValueError(
                    f"out must hold no rows but those of the folders, got {str(out)!r} with {lost} "
                    "more; name it among the folders, or give another --out."
                )
        paths = made.save(out)
    for said in made.sentences():
        console.print(f"- {said}", markup=False, highlight=False)
    for path in paths:
        console.print(f"wrote {path}", highlight=False)
