"""The command `flexvarlen doctor`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from flexvarlen.cli.console import console, one_line_errors, parse_tokens

if TYPE_CHECKING:
    from flexvarlen.attention.explain import Explanation
    from flexvarlen.cli.machine import BackendState


def doctor(
    explain: Annotated[
        bool,
        typer.Option(
            "--explain",
            help='Time the backends, as backend="auto" does, and say which it takes and why. What '
            "is measured is kept for later runs.",
        ),
    ] = False,
    tokens: Annotated[
        int | None,
        typer.Option(
            "--tokens",
            parser=parse_tokens,
            metavar="TOKENS",
            help="With --explain: tokens of the row. [default: 8k and 32k]",
            show_default=False,
        ),
    ] = None,
    mean: Annotated[
        int | None,
        typer.Option(
            "--mean",
            min=1,
            help="With --explain: mean tokens of a document. [default: 512 and 2048]",
            show_default=False,
        ),
    ] = None,
    heads: Annotated[
        str, typer.Option("--heads", help="With --explain: query heads/KV heads.")
    ] = "32/8",
    head_dim: Annotated[int, typer.Option("--head-dim", min=1, help="With --explain.")] = 128,
) -> None:
    """Say what auto takes on this machine, what every backend can do, and what to install."""
    with one_line_errors(doctor):
        import torch

        from flexvarlen.cli.machine import (
            DECODING,
            HEADS,
            backend_states,
            chosen_by_auto,
            explanations,
            facts,
            parse_heads,
            version_problems,
        )

        num_heads, num_kv_heads = parse_heads(heads)
        on_gpu = torch.cuda.is_available()
        device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
        console.print(chosen_by_auto(device, dtype), style="bold", markup=False, highlight=False)
        console.print()
        for name, fact in facts(device).items():
            console.print(f"{name:13} {fact}", highlight=False)
        for problem in version_problems():
            console.print(problem, style="bold red", markup=False, highlight=False)
        console.print(
            f"\nBackends on {device}, {str(dtype).removeprefix('torch.')}, {HEADS['num_heads']} "
            f"query and {HEADS['num_kv_heads']} KV heads of {HEADS['head_dim']}:",
            highlight=False,
        )
        _print_backends(backend_states(device, dtype), on_gpu)
        console.print(f"\n{DECODING}", highlight=False)
        if explain:
            asked = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
            for found in explanations(device, dtype, tokens=tokens, mean=mean, **asked):
                _print_explanation(found)


def _print_backends(states: list[BackendState], on_gpu: bool) -> None:
    """A line for each backend; on a CPU one for all that need a GPU."""
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("backend", "attn_implementation", "can", "why not, and what to do"):
        table.add_column(title)
    for state in states:
        if on_gpu or not state.needs_gpu:
            style = "" if state.reason is None else "yellow" if state.can == "run only" else "dim"
            reason = escape(state.reason or "")
            table.add_row(state.name, state.implementation, state.can, reason, style=style)
    console.print(table)
    if not on_gpu:
        names = ", ".join(state.name for state in states if state.needs_gpu)
        console.print(f"These need a CUDA device: {names}.", style="dim", highlight=False)


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
