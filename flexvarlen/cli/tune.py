"""The command `flexvarlen tune`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from flexvarlen.cli.console import console, one_line_errors, parse_tokens

if TYPE_CHECKING:
    from flexvarlen.attention.explain import BackendReport


def tune(
    tokens: Annotated[
        int | None,
        typer.Option(
            "--tokens",
            parser=parse_tokens,
            metavar="TOKENS",
            help="Tokens of the row. [default: 8k and 32k]",
            show_default=False,
        ),
    ] = None,
    mean: Annotated[
        int | None,
        typer.Option(
            "--mean",
            min=1,
            help="Mean tokens of a document. [default: 512 and 2048]",
            show_default=False,
        ),
    ] = None,
    heads: Annotated[str, typer.Option("--heads", help="Query heads/KV heads.")] = "32/8",
    head_dim: Annotated[int, typer.Option("--head-dim", min=1, help="Of a head.")] = 128,
) -> None:
    """Time the backends on this GPU, for training and inference; auto then uses these times."""
    with one_line_errors(tune):
        import torch

        from flexvarlen.attention.auto.decide import CANDIDATES
        from flexvarlen.cli.machine import measured, parse_heads

        num_heads, num_kv_heads = parse_heads(heads)
        on_gpu = torch.cuda.is_available()
        device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
        if device not in CANDIDATES:
            raise ValueError(
                "tune times the kernels of a CUDA device, but found none; on a CPU auto uses sdpa."
            )
        heads_of_call = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        for found in measured(device, dtype, tokens=tokens, mean=mean, **heads_of_call):
            _print_report(found)


def _print_report(report: BackendReport) -> None:
    from rich.table import Table

    from flexvarlen.attention.explain import milliseconds

    console.print(f"\n{report.call}; {report.layout}:", markup=False, highlight=False)
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("backend")
    table.add_column("device ms p50 (p20–p80)", justify="right")
    table.add_column("host ms", justify="right")
    table.add_column("why it was not timed")
    for candidate in report.candidates:
        chosen = candidate.name in (report.chosen, report.compiled)
        timing = candidate.timing
        table.add_row(
            candidate.name,
            "" if timing is None else milliseconds(timing.device),
            "" if timing is None else milliseconds(timing.host),
            escape(candidate.reason or ""),
            style="bold green" if chosen else "" if candidate.can else "dim",
        )
    console.print(table)
    console.print(report.sentence(), markup=False, highlight=False)
