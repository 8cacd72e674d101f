"""`flexvarlen.bench.kernels`: every backend beside the raw kernel that it wraps, cell by cell.

    python -m flexvarlen.bench.kernels --subset readme --out rows.jsonl
    python -m flexvarlen.bench.report rows.jsonl --readme README.md --figures bench/results

For each cell, in one run: inputs; each variant's output and gradients held against fp64 on sampled
documents, and against one another on the whole row; what is right is timed, forward and backward
alone, interleaved, behind 2 ms of other work for the device, which evicts its L2 cache:

    device  what the kernels take, back to back: what counts in a compiled graph
    host    until the call returns: Python and launches; eagerly the slower of the two decides

A row a cell, variant and pass. A cell whose rows are in `--out` is not measured again, so a run
that was cut short goes on where it ended. Variants: a backend's name, or "raw:" and that name.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import torch._dynamo.config
import torch._functorch.config

from flexvarlen.backends import BACKENDS
from flexvarlen.bench.kernels_cell import RAW_PREFIX
from flexvarlen.bench.kernels_cells import SUBSETS, Cell
from flexvarlen.bench.kernels_run import Run
from flexvarlen.bench.raw_kernels import RAW

CACHE = "FLEXVARLEN_CACHE"  # where "auto" keeps what it measured
OURS = ("flex", "flex_fa4", "varlen", "fa2", "fa3", "fa4", "nested", "cudnn", "auto")
OURS_ON_CPU = ("sdpa", "reference")


def default_variants(only: list[str] | None, on_cpu: bool) -> list[str]:
    """Each backend, then the raw kernel that it wraps; of those in `only`, if given.

    >>> default_variants(["fa3", "auto"], on_cpu=False)
    ['fa3', 'raw:fa3', 'auto']
    """
    ours = [*(OURS_ON_CPU if on_cpu else ()), *OURS]
    # cudnn is a candidate where torch has it, and wraps no function that users call.
    ours = [name for name in ours if name != "cudnn" or name in BACKENDS]
    found = []
    for name in ours if only is None else only:
        found.append(name)
        if name in RAW:
            found.append(RAW_PREFIX + name)
    return found


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(
        prog="python -m flexvarlen.bench.kernels",
        description=summary,
        epilog="python -m flexvarlen.bench.report --help: tables and figures of the rows.",
    )
    add = parser.add_argument
    add("--subset", choices=sorted(SUBSETS), help="default: grid; with --quick: quick")
    add("--cells", metavar="REGEX", help="only cells whose name this finds")
    add(
        "--only",
        nargs="+",
        metavar="BACKEND",
        help="only these, each with its raw kernel; a later run of some variants replaces the "
        "cell's others in the report, which shows a cell as its latest run has it",
    )
    add("--list", action="store_true", help="print the cells' names and stop")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--until", type=float, default=float("inf"), metavar="S", help="begin no cell later")
    add("--cell-seconds", type=float, default=3.0, help="of timing a cell, about; sets repeats")
    add("--auto-cache", type=Path, help="folder of auto's answers; default: a fresh one")
    add(
        "--again",
        action="store_true",
        help="measure cells whose rows are in --out too, but for variants that killed the device",
    )
    add("--commit", help="recorded in place of what git finds here")
    add("--out", type=Path, help="JSON lines to append to")
    add("--quick", action="store_true", help="tiny cells on the CPU, to see that all works")
    args = parser.parse_args(argv)
    if args.quick:
        args.device, args.subset = "cpu", args.subset or "quick"
        args.cell_seconds = min(args.cell_seconds, 0.1)
    args.variants = default_variants(args.only, on_cpu=args.device == "cpu")
    for name in args.variants:
        known = (*OURS, *OURS_ON_CPU, *BACKENDS)
        if name.removeprefix(RAW_PREFIX) not in known:
            parser.error(f"--only must name backends, got {name}; known: {', '.join(known)}")
    return args


def cells_of(args: argparse.Namespace) -> list[Cell]:
    """The cells asked for, those of one kind together and small ones first: kernels are shared."""
    cells = SUBSETS[args.subset or "grid"]()
    kinds = list(dict.fromkeys(cell.kind for cell in cells))
    cells.sort(key=lambda cell: (kinds.index(cell.kind), cell.tokens))
    return [cell for cell in cells if args.cells is None or re.search(args.cells, cell.name)]


@contextlib.contextmanager
def auto_cache(folder: Path | None) -> Iterator[None]:
    """What "auto" measures is kept in `folder` meanwhile; default: a fresh one, then deleted."""
    before = os.environ.get(CACHE)
    with contextlib.ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        os.environ[CACHE] = str(folder)
        try:
            yield
        finally:
            os.environ.pop(CACHE)
            if before is not None:
                os.environ[CACHE] = before


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    cells = cells_of(args)
    if args.list:
        sys.stdout.writelines(f"{cell.name}\n" for cell in cells)
        return
    # Dynamo's limits go by code object; a backward that is timed again and again keeps its buffers.
    limits = {"recompile_limit": 256, "accumulated_recompile_limit": 4096}
    keep = torch._functorch.config.patch(donated_buffer=False)
    with torch._dynamo.config.patch(limits), keep, auto_cache(args.auto_cache):
        run = Run(args)
        run.say(f"{run.environment['gpu'] or run.environment['cpu']}, torch {torch.__version__}")
        run.measure(cells)


if __name__ == "__main__":
    main()
