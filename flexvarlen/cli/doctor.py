"""The command `flexvarlen doctor`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from flexvarlen.cli.console import console, one_line_errors

if TYPE_CHECKING:
    from flexvarlen.cli.machine import BackendState


def doctor(
    install: Annotated[
        bool,
        typer.Option("--install", help="Download the best kernel for this machine from the Hub."),
    ] = False,
) -> None:
    """Show the best backend for this machine and how to get it, and what every backend supports.

    The first lines say what auto chooses, which kernel is best, and the command that installs it.
    """
    with one_line_errors(doctor):
        import torch

        from flexvarlen.cli import install as installing
        from flexvarlen.cli.machine import (
            DECODING,
            HEADS,
            backend_states,
            checked_scans,
            chosen_by_auto,
            facts,
            fla_configs,
            not_tried,
            version_problems,
        )

        here = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
        device, on_gpu = here.type, here.type != "cpu"
        dtype = torch.float32 if device in ("cpu", "mps") else torch.bfloat16
        advice = installing.install(here) if install else installing.advice(here)
        console.print(chosen_by_auto(device, dtype), style="bold", markup=False, highlight=False)
        for sentence in advice:
            console.print(sentence, markup=False, highlight=False)
        console.print()
        for name, fact in facts(device).items():
            console.print(f"{name:13} {fact}", highlight=False)
        if (said := fla_configs()) is not None:
            console.print(said, markup=False, highlight=False)
        for problem in version_problems():
            console.print(problem, style="bold red", markup=False, highlight=False)
        console.print(
            f"\nBackends on {device}, {str(dtype).removeprefix('torch.')}, {HEADS['num_heads']} "
            f"query and {HEADS['num_kv_heads']} KV heads of {HEADS['head_dim']}:",
            highlight=False,
        )
        _print_backends(backend_states(device, dtype), on_gpu)
        if (untried := not_tried(device)) is not None:
            console.print(untried, markup=False, highlight=False)
        console.print(f"\n{DECODING}", highlight=False)
        if (scans := checked_scans(device)) is not None:
            console.print(scans, markup=False, highlight=False)


def _print_backends(states: list[BackendState], on_gpu: bool) -> None:
    """Print a line for each backend; on a CPU, one line for all backends that need a GPU."""
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("backend", "attn_implementation", "can", "head_dim", "why not, and what to do"):
        table.add_column(title)
    for state in states:
        if on_gpu or not state.needs_gpu:
            style = "" if state.reason is None else "yellow" if state.can == "run only" else "dim"
            reason = escape(state.reason or "")
            cells = (state.name, state.implementation, state.can, state.head_dims, reason)
            table.add_row(*cells, style=style)
    console.print(table)
    if not on_gpu:
        names = ", ".join(state.name for state in states if state.needs_gpu)
        console.print(f"These need a CUDA device: {names}.", style="dim", highlight=False)
