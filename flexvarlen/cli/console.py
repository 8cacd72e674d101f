"""Shared by the commands: output, exit codes and common options."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

if TYPE_CHECKING:
    import torch

PLAIN_WIDTH = 140  # width of a pipe or a file, which has room for whole tables
PIPE_SECONDS = 10.0  # between two lines of progress, if the output is not a terminal


def console_of(*, stderr: bool = False) -> Console:
    """A console as wide as its terminal; in a pipe, of width COLUMNS, else `PLAIN_WIDTH`."""
    found = Console(stderr=stderr)
    columns = os.environ.get("COLUMNS", "")
    if not found.is_terminal and not (columns.isdigit() and int(columns)):
        found.width = PLAIN_WIDTH
    return found


console, errors = console_of(), console_of(stderr=True)

CPU_MODELS = ("llama", "qwen3", "qwen3_5_text")
FINDING, FAILURE, STOPPED = 1, 2, 130
"""Exit codes: a leak, a wrong result or an exceeded limit; bad usage or a failure; Ctrl-C."""

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}
"""Short names of dtypes."""


def parse_tokens(text: str | int) -> int:
    """Parse a number of tokens; "8k" is 8192.

    >>> parse_tokens("8k"), parse_tokens("1000"), parse_tokens("1m")
    (8192, 1000, 1048576)
    """
    match = re.fullmatch(r"(\d+)([km]?)", str(text).strip().lower())
    found = int(match[1]) * {"": 1, "k": 2**10, "m": 2**20}[match[2]] if match else 0
    if found < 2:
        raise typer.BadParameter(f"must be at least 2 tokens, such as 1000 or 8k, got {text!r}.")
    return found


def names_in(text: str) -> list[str]:
    """Split comma-separated names.

    >>> names_in("sdpa, flex,")
    ['sdpa', 'flex']
    """
    return [name.strip() for name in text.split(",") if name.strip()]


Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        help="float32, bfloat16 or float16; or fp32, bf16, fp16. [default: float32, bfloat16 on a "
        "GPU]",
        show_default=False,
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        "--device", help="cpu, cuda or cuda:1. [default: cuda if there is one]", show_default=False
    ),
]
Text = Annotated[
    list[Path] | None,
    typer.Option(
        "--text",
        help="A text file of documents separated by form feeds; or .jsonl, one object per line "
        "with text or messages (in the tokenizer's chat template, else their contents joined by "
        "newlines). Repeatable. [default: Python's help topics]",
        show_default=False,
    ),
]
Train = Annotated[
    bool, typer.Option("--train/--no-train", help="Forward and backward, or only forward.")
]
Seed = Annotated[int, typer.Option("--seed", help="Random seed.")]
RowTokens = Annotated[
    int | None,
    typer.Option(
        "--tokens",
        parser=parse_tokens,
        metavar="TOKENS",
        help="Length of the packed row, e.g. 8192 or 8k. [default: 1024, 8192 on a GPU]",
        show_default=False,
    ),
]
Again = Annotated[bool, typer.Option("--again", help="Re-measure cases that are already recorded.")]
Commit = Annotated[
    str | None,
    typer.Option(
        "--commit", help="Commit to record when git cannot determine it.", show_default=False
    ),
]
"""Options of several commands; `dtype_of` and `device_of` read the first two."""


@contextmanager
def one_line_errors(command: Callable[..., None]) -> Iterator[None]:
    """End the command with one sentence and exit code 2 on any failure, never with a traceback.

    Args:
        command: the function of the command, whose parameters are its options.
    """
    try:
        yield
    except typer.Exit:
        raise
    except (ValueError, TypeError, NotImplementedError, OSError) as error:
        fail(_as_option(str(error), signature(command).parameters), error)
    except Exception as error:  # the boundary to the user: kernels raise types of their own
        fail(f"{type(error).__name__}: {' '.join(str(error).split())[:600]}", error)


def fail(sentence: str, error: Exception) -> None:
    """Print the sentence and end the command."""
    errors.print(sentence, style="red", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(FAILURE) from error


def _as_option(text: str, options: Collection[str]) -> str:
    """Replace the name of an argument in an error message by the option's name.

    An argument that takes several names is plural, its option may be singular.

    >>> _as_option("head_dim must be at least 1, got 0; raise it.", ["head_dim"])
    '--head-dim must be at least 1, got 0; raise it.'
    >>> _as_option("backends must be known, got x; choose one.", ["backend"])
    '--backend must be known, got x; choose one.'
    >>> _as_option("batch must hold two documents, got 1; pack several.", ["head_dim"])
    'batch must hold two documents, got 1; pack several.'
    """
    name, _, rest = text.partition(" ")
    option = name if name in options else name.removesuffix("s")
    if option in options and rest.startswith("must "):
        return f"--{option.replace('_', '-')} {rest}"
    return text


def quiet_transformers() -> None:
    """Silence transformers' warnings and progress bars."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def device_of(name: str | None) -> torch.device:
    """The device of that name; None: a GPU if available. Raises a ValueError for other names."""
    import torch

    on_gpu = torch.cuda.is_available()
    kind, _, index = (name or ("cuda" if on_gpu else "cpu")).partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()):
        raise ValueError(f"device must be cpu or cuda, got {name!r}; choose one.")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device must be available to torch, got {name}; run flexvarlen doctor.")
    return torch.device(name or kind)


def dtype_of(name: str | None, device: torch.device) -> torch.dtype:
    """The dtype of that name; None: the device's default. Raises a ValueError for other names."""
    import torch

    if name is None:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    full = DTYPES.get(name, name)
    if full not in known:
        names = ", ".join((*known, *DTYPES))
        raise ValueError(f"dtype must be one of {names}, got {name!r}; choose one.")
    return known[full]


@contextmanager
def progress_bar(
    title: str = "", *, left: bool = False
) -> Iterator[Callable[[int, int, str], None]]:
    """Return a function that shows the steps done, all steps, and the current step.

    On a terminal, one live line that disappears at the end; elsewhere a line every 10 s, on
    standard error.

    Args:
        title: what all steps belong to.
        left: also show an estimate of the remaining time.
    """
    from rich import progress as rich_progress
    from rich.markup import escape

    head = f"{title}: " if title else ""
    if not console.is_terminal:
        begin = last = time.perf_counter()

        def tell(done: int, total: int, what: str) -> None:
            nonlocal last
            now = time.perf_counter()
            if what and now - last >= PIPE_SECONDS:
                last = now
                line = f"{now - begin:5.0f} s  {done} of {total} done, {head}{what}"
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
        columns += [rich_progress.TextColumn("left"), rich_progress.TimeRemainingColumn()]
    # Cases take minutes: the speed is averaged over the whole run.
    bar = rich_progress.Progress(
        *columns, console=console, transient=True, speed_estimate_period=86_400
    )
    with bar:
        task = bar.add_task("", total=None)

        def show(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=escape(head + what))

        yield show
