"""The command `flexvarlen`: `doctor`, `compare`, `drift`, `verify`, `bench`; imports inside."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from flexvarlen.cli_bench import bench
from flexvarlen.cli_console import (
    CPU_MODELS,
    NOT_RIGHT,
    Device,
    Dtype,
    FailAbove,
    RowTokens,
    Text,
    Train,
    console,
    device_of,
    dtype_of,
    errors,
    progress_bar,
    sentences,
)
from flexvarlen.cli_drift import drift
from flexvarlen.cli_verify import verify

if TYPE_CHECKING:
    from flexvarlen.attention.explain import Explanation
    from flexvarlen.drift.report.thresholds import Threshold
    from flexvarlen.equivalence import Report

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Packed batches for Hugging Face models: what runs here, how fast, and is it right?",
)
app.command()(verify)
app.add_typer(drift, name="drift")
app.add_typer(bench, name="bench")


def main() -> None:
    """The entry point of the command."""
    app()


@app.command()
def compare(
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="llama, qwen2 or qwen3 (tiny, random weights), a geometry such as qwen3:1.7b or "
            "qwen3:1.7b@14 (14 layers), a folder, or a hub name. Repeatable. "
            "[default: llama and qwen3]",
            show_default=False,
        ),
    ] = None,
    backends: Annotated[
        str, typer.Option(help="all, or names with commas between; see flexvarlen doctor.")
    ] = "all",
    tokens: RowTokens = None,
    text: Text = None,
    dtype: Dtype = None,
    compile: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Run under torch.compile.")
    ] = False,
    train: Train = True,
    seed: Annotated[int, typer.Option(help="Of weights, documents and all else random.")] = 0,
    out: Annotated[
        Path, typer.Option(help="Folder for rows.jsonl, table.md and compare.png.")
    ] = Path("compare"),
    device: Device = None,
    fail_above: FailAbove = None,
) -> None:
    """Check that packed outputs and gradients are right on every backend, and how fast each is.

    The truth is each document alone, in float64. Ends with exit code 1 if a backend of flexvarlen
    leaks, or is less exact than twice a plain model of the same dtype (three times for gradients).
    """
    from flexvarlen.drift.report.thresholds import COMPARE_MEASURES, parse_thresholds

    with sentences():
        limits = parse_thresholds(fail_above or [], COMPARE_MEASURES)
        report = _compare(
            model or list(CPU_MODELS),
            backends,
            tokens,
            text or [],
            dtype,
            compile,
            train,
            seed,
            device,
            out,
        )
    console.print(report.table(console.width))
    for note in report.notes():
        console.print(note, style="dim", markup=False, highlight=False)
    console.print()
    for verdict in report.verdicts().values():
        console.print(verdict, markup=False, highlight=False)
    with sentences():
        for path in report.save(out):
            console.print(f"wrote {path}", highlight=False)
    broken = _broken(report, limits)
    for sentence in broken:
        errors.print(sentence, style="red", markup=False, highlight=False)
    if broken or not report.passed:
        raise typer.Exit(NOT_RIGHT)


@app.command()
def doctor(
    explain: Annotated[
        bool,
        typer.Option(
            "--explain",
            help='Time the backends, as backend="auto" does, and tell which it takes and why. What '
            "is measured is kept for later runs.",
        ),
    ] = False,
    tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="With --explain: tokens of the row. [default: 8192 and 32768]",
            show_default=False,
        ),
    ] = None,
    mean: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="With --explain: mean tokens of a document. [default: 512 and 2048]",
            show_default=False,
        ),
    ] = None,
    heads: Annotated[str, typer.Option(help="With --explain: query heads/KV heads.")] = "32/8",
    head_dim: Annotated[int, typer.Option(min=1, help="With --explain.")] = 128,
) -> None:
    """Tell what this machine has, which backends it can run, and what to install for the others."""
    import torch
    from rich.table import Table

    from flexvarlen.doctor import (
        DECODING,
        HEADS,
        backend_states,
        explanations,
        facts,
        parse_heads,
        version_problems,
    )

    with sentences():
        num_heads, num_kv_heads = parse_heads(heads)

    on_gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    for name, fact in facts(device).items():
        console.print(f"{name:13} {fact}", highlight=False)
    for problem in version_problems():
        console.print(problem, style="bold red", markup=False, highlight=False)
    console.print(
        f"\nBackends on {device}, {str(dtype).removeprefix('torch.')}, {HEADS['num_heads']} query "
        f"and {HEADS['num_kv_heads']} KV heads of {HEADS['head_dim']}:",
        highlight=False,
    )
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("backend", "attn_implementation", "can", "why not, and what to do"):
        table.add_column(title)
    for state in backend_states(device, dtype):
        style = "" if state.reason is None else "yellow" if state.can == "run only" else "dim"
        reason = escape(state.reason or "")
        table.add_row(state.name, state.implementation, state.can, reason, style=style)
    console.print(table)
    console.print(f"\n{DECODING}", highlight=False)
    if explain:
        asked = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        with sentences():
            for found in explanations(device, dtype, tokens=tokens, mean=mean, **asked):
                _print_explanation(found)


def _print_explanation(explanation: Explanation) -> None:
    from rich.table import Table

    from flexvarlen.attention.explain import milliseconds

    console.print(f"\n{explanation.call}; {explanation.layout}:", markup=False, highlight=False)
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("backend")
    table.add_column("device ms p50 (p20–p80)", justify="right")
    table.add_column("host ms", justify="right")
    table.add_column("why it was not timed")
    for candidate in explanation.candidates:
        chosen = candidate.name in (explanation.chosen, explanation.compiled)
        timing = candidate.timing
        table.add_row(
            candidate.name,
            "" if timing is None else milliseconds(timing.device),
            "" if timing is None else milliseconds(timing.host),
            escape(candidate.reason or ""),
            style="bold green" if chosen else "" if candidate.can else "dim",
        )
    console.print(table)
    console.print(explanation.sentence(), markup=False, highlight=False)


def _broken(report: Report, limits: list[Threshold]) -> list[str]:
    """The user's limits that a backend of ours passes: transformers' own may leak."""
    from flexvarlen.drift.report.thresholds import Measured, broken_limits

    ours = [row for row in report.rows if row.role == "flexvarlen"]
    return broken_limits(
        limits, [Measured(f"{row.model}, {row.backend}", vars(row)) for row in ours]
    )


def _compare(
    models: list[str],
    backends: str,
    tokens: int | None,
    text: list[Path],
    dtype_name: str | None,
    compile: bool,
    train: bool,
    seed: int,
    device_name: str | None,
    out: Path,
) -> Report:
    import transformers

    from flexvarlen.equivalence import Report, compare
    from flexvarlen.equivalence.corpus import DEFAULT_TOKENS, packed_text, read_documents
    from flexvarlen.equivalence.models import build_model, parse_model
    from flexvarlen.equivalence.variants import variant_names
    from flexvarlen.rows import require_folder

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    device = device_of(device_name)
    dtype = dtype_of(dtype_name, device)
    specs = [parse_model(name) for name in models]  # all mistakes before any work
    variant_names(backends, device)
    read_documents(text)
    require_folder(out)
    reports: list[Report] = []
    with progress_bar() as bar:
        for spec in specs:
            name = spec.label

            def show(done: int, total: int, what: str, name: str = name) -> None:
                bar(done, total, f"{name}: {what}")

            model, tokenizer = build_model(spec.name, device=device, dtype=dtype, seed=seed)
            batch = packed_text(
                vocabulary=model.config.vocab_size,
                tokens=tokens or DEFAULT_TOKENS[device.type],
                seed=seed,
                files=text,
                tokenizer=tokenizer,
            )
            reports.append(
                compare(
                    model,
                    batch,
                    backends,
                    train=train,
                    compile=compile,
                    seed=seed,
                    name=name,
                    progress=show,
                )
            )
    return Report(tuple(row for report in reports for row in report.rows))


if __name__ == "__main__":
    main()
