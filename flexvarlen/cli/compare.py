"""The command `flexvarlen compare`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flexvarlen.cli.console import (
    CPU_MODELS,
    FAILURE,
    FINDING,
    STOPPED,
    Device,
    Dtype,
    RowTokens,
    Seed,
    Text,
    Train,
    console,
    device_of,
    dtype_of,
    one_line_errors,
    progress_bar,
    quiet_transformers,
)

if TYPE_CHECKING:
    from flexvarlen.verify.compare import Report


def compare(
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            help="llama, qwen2, qwen3 or qwen3_5_text (tiny, random weights), a geometry such as "
            "qwen3:1.7b or qwen3:1.7b@14 (14 layers), a folder, or a hub name. Repeatable. "
            "[default: llama, qwen3 and qwen3_5_text]",
            show_default=False,
        ),
    ] = None,
    backend: Annotated[
        str,
        typer.Option("--backend", help="all, or comma-separated names; see flexvarlen doctor."),
    ] = "all",
    tokens: RowTokens = None,
    text: Text = None,
    dtype: Dtype = None,
    compile: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Run under torch.compile.")
    ] = False,
    train: Train = True,
    seed: Seed = 0,
    out: Annotated[
        Path, typer.Option("--out", help="Folder for records.jsonl, table.md and compare.png.")
    ] = Path("compare"),
    device: Device = None,
) -> None:
    """Check that packed outputs and gradients are right on every backend, and how fast each is.

    The reference is each document alone, in float64. Exit code 1 if a backend of flexvarlen leaks,
    or its error is more than twice (gradients: three times) that of a plain model of the dtype;
    2 if no backend of flexvarlen could run. Ctrl-C keeps what was measured, with exit code 130.
    """
    with one_line_errors(compare):
        from flexvarlen.report.records import append_records, require_file
        from flexvarlen.verify import compare as comparison
        from flexvarlen.verify.experiment.variant import variant_names
        from flexvarlen.verify.models import NamedModels

        quiet_transformers()
        where = device_of(device)
        what = dtype_of(dtype, where)
        named = NamedModels(
            model or CPU_MODELS, text or [], where
        )  # mistakes raise before any work
        variant_names(backend, where)
        require_file(out / "records.jsonl")
        report, stopped = comparison.Report(()), False
        for spec in named.specs:
            try:
                built, row = named.load(spec.name, what, tokens, seed)
                with progress_bar(spec.label) as progress:
                    found = comparison.compare(
                        built,
                        row,
                        backend,
                        train=train,
                        compile=compile,
                        seed=seed,
                        name=spec.label,
                        progress=progress,
                    )
            except KeyboardInterrupt as stop:
                stopped = True
                found = getattr(stop, "report", comparison.Report(()))
            report += found
            if found.measured:
                append_records(out / "records.jsonl", found.records)  # the next one may fail
            if stopped:
                break
        _print_report(report, out, stopped)
    if stopped:
        raise typer.Exit(STOPPED)
    if not report.passed:
        raise typer.Exit(FINDING)
    if not report.ran:
        raise typer.Exit(FAILURE)


def _print_report(report: Report, out: Path, stopped: bool) -> None:
    """Print tables, notes and sentences; write files, unless nothing was measured."""
    written = f"Nothing was measured or written to {out}."
    if report.measured:
        written = f"Written: {', '.join(map(str, [out / 'records.jsonl', *report.show(out)]))}"
        for table in report.tables(console.width):
            console.print(table.rich(console.width))
            console.print()
    for line in (*report.notes(), written, ""):
        console.print(line, style="dim", markup=False, highlight=False)
    if stopped:
        left = ": these are the results so far" if report.measured else ""
        console.print(f"Stopped by Ctrl-C{left}.", markup=False, highlight=False)
    if report.records:
        console.print(report.sentence(), markup=False, highlight=False)
