"""The commands `flexvarlen bench list`, `SUITE`, `all`, `report`."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flexvarlen.bench.suites import SUITES, suite_of
from flexvarlen.cli.console import (
    FAILURE,
    FINDING,
    Again,
    Commit,
    Device,
    Text,
    console,
    device_of,
    errors,
    names_in,
    one_line_errors,
    progress_bar,
)

if TYPE_CHECKING:
    from flexvarlen.report.records import Record
    from flexvarlen.runner.run import RunRequest
    from flexvarlen.runner.suite import Options, Suite

bench = typer.Typer(
    no_args_is_help=True,
    help="Benchmarks: records as JSON lines, and tables and figures made from them.",
)

Files = Annotated[list[Path] | None, typer.Argument(help="JSON lines.", show_default=False)]


@bench.command("list")
def list_() -> None:
    """List the suites, and what each measures."""
    for name, entry in SUITES.items():
        console.print(f"{name:16} {entry.summary}", markup=False, highlight=False)


def _run(names: Sequence[str], options: Options, request: RunRequest, list_cases: bool) -> None:
    """Measure suites one after another; results are kept even if a later suite fails."""
    from flexvarlen.recurrent.fla_configs import use_fla_configs_once_imported
    from flexvarlen.report.records import require_file
    from flexvarlen.runner.run import chosen_cases
    from flexvarlen.runner.suite import DeviceLost
    from flexvarlen.verify.corpus import read_documents
    from flexvarlen.verify.experiment.variant import is_ours

    use_fla_configs_once_imported()
    read_documents(options.text or [])
    found = chosen_cases([suite_of(name) for name in names], options, request.cases)
    if list_cases:
        for suite, cases in found.items():
            for case in cases:
                console.print(f"{suite.name} {case.name}", markup=False, highlight=False)
        return
    single = request.out.suffix == ".jsonl"
    if len(names) > 1 and single:
        raise ValueError(
            f"out must be a folder for several suites, got {str(request.out)!r}; pass a folder."
        )
    if len(names) > 1 and options.variants is not None:
        raise ValueError(
            f"variants must be of one suite, got {','.join(options.variants)!r} for all; name a "
            "suite."
        )
    for suite in found if options.text else ():
        if not suite.reads_text:
            raise ValueError(
                f"text must be used with a suite that packs texts, got {suite.name}; remove it."
            )
    paths = {
        suite: request.out if single else request.out / _file_name(suite.name, options)
        for suite in found
    }
    for path in paths.values():
        require_file(path)
    right, measured, begin = True, False, time.perf_counter()
    for suite, path in paths.items():
        until_s = request.until_s - (time.perf_counter() - begin)
        try:
            records = _measure(suite, options, replace(request, out=path, until_s=until_s))
        except DeviceLost as lost:
            said = f"{suite.name}: {lost}. Results so far are kept; run again to continue."
            errors.print(said, style="red", markup=False, highlight=False)
            raise typer.Exit(FAILURE) from lost
        measured |= any(r.status in ("ok", "wrong") for r in records)
        bad = [r for r in records if r.status in ("wrong", "failed")]
        right &= not any(is_ours(r.case["variant"]) for r in bad)
    if not right:
        raise typer.Exit(FINDING)
    if not measured:
        raise typer.Exit(FAILURE)


def _file_name(suite: str, options: Options) -> str:
    """The name of a suite's file of records, with the GPU."""
    import torch

    if not options.on_gpu:
        return f"{suite}-cpu.jsonl"
    gpu = torch.cuda.get_device_name(options.device).lower().removeprefix("nvidia ")
    return f"{suite}-{gpu.replace(' ', '-')}{'-quick' if options.quick else ''}.jsonl"


def _measure(suite: Suite[Any], options: Options, run: RunRequest) -> list[Record]:
    """Run a suite, print the tables of all cases in the file, and return the requested records."""
    from flexvarlen.runner.run import records_held, records_of_run, run_suite

    with progress_bar(suite.name, left=True) as bar:
        ended = run_suite(suite, options, run, bar)
    records = records_held(suite, options, run)
    if records:
        _print_markdown(suite.section(records))
    options.say(f"{suite.name}: {ended.counts}. Records in {run.out}.")
    return records_of_run(suite, options, run)


def _print_markdown(text: str) -> None:
    """Print Markdown, rendered on a terminal and unchanged in a pipe."""
    from rich.markdown import Markdown

    if console.is_terminal:
        console.print(Markdown(text))
    else:
        console.print(text, markup=False, highlight=False, soft_wrap=True)


def _add(name: str, summary: str, suites: Sequence[str]) -> None:
    def run(
        out: Annotated[
            Path,
            typer.Option(
                "--out",
                help="File of records (.jsonl), or a folder for SUITE-GPU.jsonl; recorded cases "
                "are not measured again.",
            ),
        ] = Path("build/bench"),
        quick: Annotated[
            bool, typer.Option("--quick", help="Small cases, to check that everything works.")
        ] = False,
        cases: Annotated[
            str | None,
            typer.Option(
                "--cases",
                metavar="REGEX",
                help="Only cases whose name matches this regular expression.",
                show_default=False,
            ),
        ] = None,
        variants: Annotated[
            str | None,
            typer.Option("--variants", help="Only these, with commas between.", show_default=False),
        ] = None,
        seconds: Annotated[
            float | None,
            typer.Option(
                "--seconds",
                min=0.0,
                help="Approximate seconds spent timing each case. [default: 3, 0.1 with --quick]",
                show_default=False,
            ),
        ] = None,
        until: Annotated[
            float,
            typer.Option(
                "--until",
                min=0.0,
                metavar="S",
                help="Do not start a case after S seconds.",
                show_default=False,
            ),
        ] = math.inf,
        again: Again = False,
        list_: Annotated[
            bool, typer.Option("--list", help="Print the cases' names and stop.")
        ] = False,
        text: Text = None,
        device: Device = None,
        commit: Commit = None,
    ) -> None:
        with one_line_errors(run):
            from flexvarlen.runner.run import RunRequest
            from flexvarlen.runner.suite import Options

            where = device_of(device)
            whole = where.type != "cpu" or all(suite_of(name).whole_on_cpu for name in suites)
            options = Options(
                device=where,
                quick=quick or not whole,  # the sizes that a CPU can run
                variants=None if variants is None else tuple(names_in(variants)),
                seconds=seconds if seconds is not None else 0.1 if quick else 3.0,
                text=tuple(text) if text else None,
                say=partial(console.print, markup=False, highlight=False),
            )
            request = RunRequest(out, cases, until, again, commit)
            _run(suites, options, request, list_)

    run.__doc__ = summary
    bench.command(name=name)(run)


for _name, _entry in SUITES.items():
    _add(_name, _entry.summary, [_name])
_add("all", "All suites, one after another.", list(SUITES))


@bench.command()
def report(
    files: Files = None,
    page: Annotated[
        list[Path] | None,
        typer.Option(
            "--page",
            help="A Markdown file whose marked sections are replaced. Repeatable.",
            show_default=False,
        ),
    ] = None,
    figures: Annotated[
        Path | None, typer.Option("--figures", help="Folder for the PNGs.", show_default=False)
    ] = None,
    tables: Annotated[
        Path | None,
        typer.Option(
            "--tables",
            help="Folder for SUITE.md with all tables of a suite whose page shows few lines.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Make tables and figures from records."""
    with one_line_errors(report):
        from flexvarlen.bench.report import report as rendered

        text = rendered(files or (), pages=page or (), figures=figures, tables=tables)
        _print_markdown(text)
