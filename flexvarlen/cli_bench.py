"""The commands `flexvarlen bench SUITE`, `report`, `diff`. Heavy imports happen inside."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flexvarlen.cli_console import (
    NOT_RIGHT,
    Device,
    Text,
    console,
    device_of,
    errors,
    progress_bar,
    sentences,
)

if TYPE_CHECKING:
    from flexvarlen.bench.runner import Ended, Run
    from flexvarlen.bench.suite import Options

bench = typer.Typer(
    no_args_is_help=True,
    help="Benchmarks: rows of JSON, tables and figures that anyone can make again.",
)

SUITES = {
    "varlen-study": "Every varlen kernel on 13 packings, in one call and one call a document.",
    "varlen-overhead": "What varlen costs over fixed lengths, and determinism over none.",
    "scaling": "Attention from 512 to 16,384 tokens: time, memory, up to out-of-memory.",
    "padding": "Packed against padded attention.",
    "sdpa-backends": "SDPA's kernels, each forced, beside the packed backends on equal work.",
    "sdpa-gradients": "Errors of SDPA's gradients, kernel by kernel, where one is wrong.",
    "model": "Training and generation of whole models, packed, padded and one by one.",
    "mask-build": "Building document BlockMasks, ours beside create_block_mask's.",
    "kernels": "Every backend beside the raw kernel that it wraps, and what auto takes.",
}
"""What `all` runs, with the line of the help; `flexvarlen.bench.suite` knows the modules."""
OTHERS = {"clock-check": "Whether the clock of all suites agrees with a profiler's trace."}

Files = Annotated[list[Path] | None, typer.Argument(help="JSON lines of rows.", show_default=False)]


@dataclass(frozen=True)
class _Asked:
    """The options of a run, as they were typed."""

    out: Path
    quick: bool
    cases: str | None
    variants: str | None
    seconds: float | None
    until: float | None
    again: bool
    text: list[Path] | None
    device: str | None
    commit: str | None


def _add(name: str, summary: str) -> None:
    def run(
        out: Annotated[
            Path,
            typer.Option(
                help="File of rows (.jsonl), or a folder for SUITE-GPU.jsonl; what it holds is not "
                "measured again."
            ),
        ] = Path("build/bench"),
        quick: Annotated[
            bool, typer.Option("--quick", help="Small cases, to see that all works.")
        ] = False,
        cases: Annotated[
            str | None,
            typer.Option(
                metavar="REGEX", help="Only cases whose name this finds.", show_default=False
            ),
        ] = None,
        variants: Annotated[
            str | None,
            typer.Option(help="Only these, with commas between.", show_default=False),
        ] = None,
        seconds: Annotated[
            float | None,
            typer.Option(
                min=0.0,
                help="Of timing a case, about. [default: 3, 0.1 with --quick]",
                show_default=False,
            ),
        ] = None,
        until: Annotated[
            float | None,
            typer.Option(
                min=0.0, metavar="S", help="Begin no case after S seconds.", show_default=False
            ),
        ] = None,
        again: Annotated[
            bool, typer.Option("--again", help="Measure what the file holds, too.")
        ] = False,
        list_: Annotated[
            bool, typer.Option("--list", help="Print the cases' names and stop.")
        ] = False,
        text: Text = None,
        device: Device = None,
        commit: Annotated[
            str | None,
            typer.Option(help="To record, where git cannot tell it.", show_default=False),
        ] = None,
    ) -> None:
        asked = _Asked(out, quick, cases, variants, seconds, until, again, text, device, commit)
        _bench(list(SUITES) if name == "all" else [name], asked, list_)

    run.__doc__ = summary
    bench.command(name=name)(run)


for _name, _summary in {**SUITES, "all": "All of these, one after another.", **OTHERS}.items():
    _add(_name, _summary)


@bench.command()
def report(
    files: Files = None,
    page: Annotated[
        list[Path] | None,
        typer.Option(
            help="A Markdown file whose marked sections are replaced. Repeatable.",
            show_default=False,
        ),
    ] = None,
    compare: Annotated[
        Path | None,
        typer.Option(help="The rows.jsonl of flexvarlen compare.", show_default=False),
    ] = None,
    figures: Annotated[
        Path | None, typer.Option(help="Folder for the PNGs.", show_default=False)
    ] = None,
) -> None:
    """Tables and figures, from rows alone."""
    with sentences():
        from flexvarlen.bench.report import report as rendered

        text = rendered(files or (), pages=page or (), figures=figures, compare=compare)
    console.print(text, markup=False, highlight=False, soft_wrap=True)


@bench.command()
def diff(
    before: Annotated[Path, typer.Argument(help="JSON lines of rows.")],
    after: Annotated[Path, typer.Argument(help="The same cases, measured later.")],
    threshold: Annotated[
        float, typer.Option(min=0.0, help="Share by which medians must differ.")
    ] = 0.02,
) -> None:
    """Faster, slower or unchanged, case by case; exit code 1 if one is slower."""
    with sentences():
        from flexvarlen.bench.diff import diff as compared

        found = compared([before], [after], threshold=threshold)
    console.print(found.markdown(), markup=False, highlight=False, soft_wrap=True)
    if found.slower:
        raise typer.Exit(NOT_RIGHT)


def _bench(names: Sequence[str], asked: _Asked, only_list: bool) -> None:
    from flexvarlen.bench.suite import DeviceLost

    with sentences():
        from flexvarlen.bench.runner import chosen_cases
        from flexvarlen.bench.suite import suite_of
        from flexvarlen.rows import require_folder

        options = _options(asked)
        found = chosen_cases([suite_of(name) for name in names], options, asked.cases)
        if only_list:
            for suite, cases in found.items():
                for case in cases:
                    console.print(f"{suite.name} {case.name}", markup=False, highlight=False)
            return
        if len(names) > 1 and asked.out.suffix == ".jsonl":
            raise ValueError(
                f"out must be a folder for several suites, got {str(asked.out)!r}; name a folder."
            )
        if len(names) > 1 and asked.variants is not None:
            raise ValueError(
                f"variants must be of one suite, got {asked.variants!r} for all; name a suite."
            )
        require_folder(asked.out.parent if asked.out.suffix == ".jsonl" else asked.out)
    is_right, begin = True, time.perf_counter()
    for suite in found:
        path = _file_of(suite.name, asked.out, options)
        try:
            with sentences():
                left = (asked.until or float("inf")) - (time.perf_counter() - begin)
                is_right &= _measure(suite, options, asked, path, left)
        except DeviceLost as lost:
            errors.print(
                f"{suite.name}: {lost}. What was measured is kept; run again to go on.",
                style="red",
                markup=False,
                highlight=False,
            )
            raise typer.Exit(NOT_RIGHT) from lost
    if not is_right:
        raise typer.Exit(NOT_RIGHT)


def _options(asked: _Asked) -> Options:
    from flexvarlen.bench.suite import Options

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False)

    chosen = None
    if asked.variants is not None:
        chosen = tuple(name.strip() for name in asked.variants.split(",") if name.strip())
    device = device_of(asked.device)
    return Options(
        device=device,
        quick=asked.quick or device.type == "cpu",  # the sizes that a CPU can run
        variants=chosen,
        seconds=asked.seconds if asked.seconds is not None else 0.1 if asked.quick else 3.0,
        text=tuple(asked.text) if asked.text else None,
        say=say,
    )


def _file_of(suite: str, out: Path, options: Options) -> Path:
    """The file of rows: `out`, or in the folder `out` one named by suite and GPU."""
    import torch

    if out.suffix == ".jsonl":
        return out
    if not options.on_gpu:
        return out / f"{suite}-cpu.jsonl"
    gpu = torch.cuda.get_device_name(options.device).lower().removeprefix("nvidia ")
    gpu = gpu.replace(" ", "-")
    return out / f"{suite}-{gpu}{'-quick' if options.quick else ''}.jsonl"


def _measure(suite: Any, options: Options, asked: _Asked, path: Path, until_s: float) -> bool:
    """Run a suite and print its tables; whether every number that was checked is right."""
    from flexvarlen.bench.runner import Run, run_suite
    from flexvarlen.rows import read_rows

    run = Run(
        out=path,
        cases=asked.cases,
        until_s=until_s,
        again=asked.again,
        commit=asked.commit,
    )
    with progress_bar(left=True) as bar:
        ended = run_suite(suite, options, run, _titled(bar, suite.name))
    rows = [row for row in read_rows([path]) if row.suite == suite.name]
    console.print(suite.section(rows), markup=False, highlight=False, soft_wrap=True)
    _tell(suite.name, ended, run)
    return not any(row.status in ("wrong", "failed") for row in rows)


def _titled(bar: Callable[[int, int, str], None], title: str) -> Callable[[int, int, str], None]:
    def show(done: int, total: int, what: str) -> None:
        bar(done, total, f"{title}: {what}" if what else title)

    return show


def _tell(name: str, ended: Ended, run: Run) -> None:
    parts = [f"{ended.measured} cases measured", f"{ended.done_before} done before"]
    if ended.left:
        parts.append(f"{ended.left} left as time was up: run again to go on")
    console.print(f"{name}: {', '.join(parts)}. Rows in {run.out}.", markup=False, highlight=False)
