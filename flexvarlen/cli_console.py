"""What the commands share: where they print, how they end, what their options mean."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

if TYPE_CHECKING:
    import torch

PLAIN_WIDTH = 140  # columns of the whole table, where the output is no terminal

console = Console()
if not console.is_terminal:  # a pipe or a file has room: no cut cells
    console = Console(width=max(console.width, PLAIN_WIDTH))
errors = Console(stderr=True)

CPU_MODELS = ("llama", "qwen3")
USER_ERROR, NOT_RIGHT = 2, 1
"""Exit codes: bad input; a backend of ours that is wrong or leaks."""

Dtype = Annotated[
    str | None,
    typer.Option(
        help="float32, bfloat16 or float16. [default: float32, bfloat16 on a GPU]",
        show_default=False,
    ),
]
Device = Annotated[
    str | None, typer.Option(help="[default: cuda if there is one]", show_default=False)
]
Text = Annotated[
    list[Path] | None,
    typer.Option(
        help="A text file of documents, instead of Python's help topics. Repeatable.",
        show_default=False,
    ),
]
Train = Annotated[
    bool, typer.Option("--train/--no-train", help="Forward and backward, or forward alone.")
]
RowTokens = Annotated[
    int | None,
    typer.Option(
        min=2,
        help="Tokens of the packed row. [default: 1024, 8192 on a GPU]",
        show_default=False,
    ),
]
FailAbove = Annotated[
    list[str] | None,
    typer.Option(
        metavar="MEASURE=VALUE",
        help="End with exit code 1 if a measure is larger in any row; MEASURE is a name as in "
        "rows.jsonl, or the end of several (relative, max_abs). Repeatable.",
        show_default=False,
    ),
]
"""Options of several commands; `dtype_of` and `device_of` read the first two."""


@contextmanager
def sentences() -> Iterator[None]:
    """A user's mistake ends the command with its sentence, not with a traceback."""
    try:
        yield
    except (ValueError, NotImplementedError, OSError) as error:
        errors.print(str(error), style="red", markup=False, highlight=False)
        raise typer.Exit(USER_ERROR) from error


def device_of(name: str | None) -> torch.device:
    """The device of that name; None: a GPU if there is one. Raises a ValueError for others."""
    import torch

    on_gpu = torch.cuda.is_available()
    kind, _, index = (name or ("cuda" if on_gpu else "cpu")).partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()):
        raise ValueError(f"device must be cpu or cuda, got {name!r}; choose one.")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device must be one that torch sees, got {name}; run flexvarlen doctor.")
    return torch.device(name or kind)


def dtype_of(name: str | None, device: torch.device) -> torch.dtype:
    """The dtype of that name; None: the device's usual one. Raises a ValueError for others."""
    import torch

    if name is None:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in known:
        raise ValueError(f"dtype must be one of {', '.join(known)}, got {name!r}; choose one.")
    return known[name]


@contextmanager
def progress_bar(*, left: bool = False) -> Iterator[Callable[[int, int, str], None]]:
    """What shows the steps done, all steps, and what is being done.

    On a terminal a bar, gone in the end; elsewhere a line a step, to standard error.

    `left`: the bar also tells about how long it will still take.
    """
    from rich import progress as rich_progress
    from rich.markup import escape

    if not console.is_terminal:
        begin = time.perf_counter()

        def tell(done: int, total: int, what: str) -> None:
            if done < total:
                line = f"{time.perf_counter() - begin:7.1f} s  {done + 1} of {total}: {what}"
                errors.print(line, markup=False, highlight=False, soft_wrap=True)

        yield tell
        return
    columns = [
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(),
        rich_progress.MofNCompleteColumn(),
        rich_progress.TimeElapsedColumn(),
    ]
    if left:
        columns += [
            rich_progress.TextColumn("left"),
            rich_progress.TimeRemainingColumn(),
        ]
    # Cases take minutes: the speed is that of the whole run.
    bar = rich_progress.Progress(
        *columns, console=console, transient=True, speed_estimate_period=86_400
    )
    with bar:
        task = bar.add_task("", total=None)

        def show(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=escape(what))

        yield show
