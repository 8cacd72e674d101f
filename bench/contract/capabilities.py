"""`flexvarlen.bench.contract.capabilities`: what each backend can do, by its own checks.

Every cell is what `flexvarlen.why_not` answers on the machine where the rows were made; nothing
runs but its checks.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from flexvarlen import BACKENDS, why_not
from flexvarlen.markdown import markdown
from flexvarlen.rows import Row, append_row, commit_of, run_environment

SUITE = "capabilities"
BASE: dict[str, Any] = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
FEATURES: dict[str, dict[str, Any]] = {
    "forward": {"needs_grad": False},
    "backward": {},
    "sliding window": {"window": 1024},
    "softcap": {"softcap": 30.0},
    "sinks": {"sinks": True},
    "LSE": {"return_lse": True, "needs_grad": False},
    "chunks": {"chunk": 1024},
    "prefix": {"prefix": True},
    "other keys": {"cross": True},
    "deterministic": {"deterministic": True},
    "batch invariant": {"batch_invariant": True},
}
"""Asked of the backward if the backend has one. Every backend that runs does causal and
bidirectional documents, grouped-query attention and a scale of the caller's."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HEAD_DIMS = tuple(range(8, 264, 8))


def measure(device: str, commit: str | None) -> list[Row]:
    """A row a backend: why not, by feature; its dtypes and head dimensions."""
    environment = run_environment(torch.device(device), commit)
    rows = []
    for name in BACKENDS:
        case = {"backend": name, **BASE}

        def ask(name: str = name, **options: Any) -> str | None:
            asked = {"device": device, "dtype": torch.bfloat16, **BASE, **options}
            return why_not(name, **asked)

        missing = ask(needs_grad=False)
        if missing is not None:
            rows.append(Row(SUITE, case, "unsupported", missing, environment=environment))
            continue
        trains = ask() is None
        reasons = {
            feature: ask(**({"needs_grad": trains} | options))
            for feature, options in FEATURES.items()
            if feature != "backward"
        } | {"backward": ask()}
        dtypes = [
            str(dtype).removeprefix("torch.")
            for dtype in DTYPES
            if ask(dtype=dtype, needs_grad=trains) is None
        ]
        dims = [d for d in HEAD_DIMS if ask(head_dim=d, needs_grad=trains) is None]
        measures = {"why_not": reasons, "dtypes": dtypes, "head_dims": dims}
        rows.append(Row(SUITE, case, "ok", None, measures, environment))
    return rows


def capabilities_section(rows: Sequence[Row]) -> str:
    """A table for each machine, of its latest run."""
    machines: dict[str, list[Row]] = {}
    for row in rows:
        machines.setdefault(_machine(row), []).append(row)
    return "\n".join(_table(_latest(own)) for own in machines.values())


def _machine(row: Row) -> str:
    return row.environment.get("gpu") or "CPU"


def _latest(rows: Sequence[Row]) -> list[Row]:
    started = [row.environment.get("started_utc") or "" for row in rows]
    return [row for row, start in zip(rows, started, strict=True) if start == max(started)]


def _table(rows: Sequence[Row]) -> str:
    """One run's table, its reasons below."""
    environment, case = rows[0].environment, rows[0].case
    notes: dict[str, int] = {}
    lines = []
    for row in rows:
        name = row.case["backend"]
        if row.status != "ok":
            number = notes.setdefault(row.reason or "", len(notes) + 1)
            lines.append([f"`{name}`", f"({number})", *[""] * (len(FEATURES) + 1)])
            continue
        cells = []
        for feature in FEATURES:
            reason = row.measures["why_not"][feature]
            if reason is None:
                cells.append("yes")
            else:
                cells.append(f"({notes.setdefault(reason, len(notes) + 1)})")
        dtypes = ", ".join(
            {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}[dtype]
            for dtype in row.measures["dtypes"]
        )
        lines.append([f"`{name}`", *cells, _ranges(row.measures["head_dims"]), dtypes])
    heading = (
        f"{_machine(rows[0])}, torch {environment['torch']}{commit_of(environment)}; "
        f"{case['num_heads']} query heads over {case['num_kv_heads']} KV heads of "
        f"{case['head_dim']}:"
    )
    body = markdown(["backend", *FEATURES, "head_dim", "dtypes"], lines)
    reasons = "\n\n".join(f"({number}) {reason}" for reason, number in notes.items())
    return f"{heading}\n\n{body}\n\n{reasons}\n"


def _ranges(dims: list[int]) -> str:
    """Multiples as a range: 8, 16, 24 and 32 are "8–32 by 8".

    >>> _ranges([32, 64, 96, 128]), _ranges([64])
    ('32–128 by 32', '64')
    """
    steps = {b - a for a, b in itertools.pairwise(dims)}
    if len(dims) > 2 and len(steps) == 1:
        return f"{dims[0]}–{dims[-1]} by {steps.pop()}"
    return ", ".join(map(str, dims))


def main(argv: list[str] | None = None) -> None:
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(
        prog="python -m flexvarlen.bench.contract.capabilities", description=summary
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--commit", help="recorded in place of what git finds here")
    parser.add_argument("--out", type=Path, help="JSON lines to append to")
    arguments = parser.parse_args(argv)
    rows = measure(arguments.device, arguments.commit)
    for row in rows:
        if arguments.out is not None:
            append_row(arguments.out, row)
    print(capabilities_section(rows))


if __name__ == "__main__":
    main()
