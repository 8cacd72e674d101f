"""The command `flexvarlen`, one file for each subcommand; torch is imported when one runs."""

from __future__ import annotations

from typing import Annotated

import typer

from flexvarlen._version import __version__
from flexvarlen.cli.bench import bench
from flexvarlen.cli.compare import compare
from flexvarlen.cli.doctor import doctor
from flexvarlen.cli.drift import drift
from flexvarlen.cli.tune import tune
from flexvarlen.cli.verify import verify

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # rich's own markup drops what stands in brackets
    help="Packed batches for Hugging Face models: what runs here, how fast, and is it right? "
    "Exit codes: 0 right; 1 a finding, such as a leak; 2 bad usage or a failure; 130 Ctrl-C.",
)
app.command()(doctor)
app.command()(compare)
app.command()(verify)
app.command()(tune)
app.add_typer(drift, name="drift")
app.add_typer(bench, name="bench")


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"flexvarlen {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    pass


def main() -> None:
    """The entry point of the command."""
    app()
