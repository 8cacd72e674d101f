"""Whether two checkouts of flexvarlen give the same answers, bit for bit.

    python -m tests.same_answers OLD_CHECKOUT NEW_CHECKOUT

Runs a fixed sample of the combinations of `tests.cases`, families, heads, forms of a batch, modes
and backends, on each, and compares the bits of all outputs and gradients, or the sentences that are
raised. Prints a line for each case that differs, and exits with 1 if there is any. A checkout may
be a folder of files: `mkdir old && git archive COMMIT | tar -x -C old`.

With `--device cuda` the old checkout runs twice: what differs between its own runs may differ by
three times as much in the new one.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from tests.same_answers.cases import case_of, name_of, sample
from tests.same_answers.compare import differences

CHILD = Path(__file__).with_name("child.py")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("old", type=Path, metavar="OLD_CHECKOUT")
    add("new", type=Path, metavar="NEW_CHECKOUT")
    add("--device", choices=["cpu", "cuda"], default="cpu")
    add("--seed", type=int, default=0, metavar="N", help="of the sample")
    add("--cases", type=int, metavar="N", help="the first N of the sample; default: all")
    add("--only", default="", metavar="TEXT", help="cases whose name contains it")
    add("--processes", type=int, default=1, metavar="N", help="for each checkout; default: 1")
    add("--seconds", type=float, default=1e9, metavar="S", help="begin no case later")
    add("--verbose", action="store_true", help="print each case and its seconds")
    return parser.parse_args(argv)


def start(
    checkout: Path, cases: Path, out: Path, device: str, seconds: float, *, verbose: bool
) -> subprocess.Popen[bytes]:
    """The cases on a checkout, in a process of its own."""
    path = [str(checkout), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    # -P: the child's own folder is not on the path, so nothing comes from this checkout.
    command = [sys.executable, "-P", CHILD, cases, out, device, checkout, str(seconds)]
    errors = None if verbose else subprocess.DEVNULL
    return subprocess.Popen(command, cwd=checkout, env=environment, stderr=errors)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    begin = time.perf_counter()
    chosen = [x for x in sample(args.device, args.seed)[: args.cases] if args.only in name_of(x)]
    cases = [case_of(x, args.device) for x in chosen]
    sides = [args.old.resolve(), args.new.resolve()]
    if args.device == "cuda":
        sides.append(sides[0])
    parts = [cases[first :: args.processes] for first in range(args.processes)]
    with tempfile.TemporaryDirectory() as folder:
        running = []
        for number, part in enumerate(parts):
            torch.save(part, file := Path(folder) / f"cases{number}.pt")
            for side, checkout in enumerate(sides):
                out = Path(folder) / f"{side}-{number}.pt"
                process = start(
                    checkout, file, out, args.device, args.seconds, verbose=args.verbose
                )
                running.append((side, process, out))
        found: list[dict[str, Any]] = [{} for _ in sides]
        for side, process, out in running:
            if process.wait() != 0:
                sys.stderr.write(f"{sides[side]}: no answers; see --verbose.\n")
                return 2
            found[side] |= torch.load(out)
    ran = [name for name in found[0] if all(name in side for side in found)]
    old, new, *again = ({name: side[name] for name in ran} for side in found)
    lines = differences(old, new, *again)
    raised = sum(isinstance(x, str) and x == new[name] for name, x in old.items())
    for line in lines:
        sys.stdout.write(line + "\n")
    sys.stdout.write(
        f"{len(ran)} of {len(cases)} cases, {raised} of which raise the same, in "
        f"{time.perf_counter() - begin:.0f} s: "
        + (f"{len(lines)} DIFFER\n" if lines else "the same answers\n")
    )
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
