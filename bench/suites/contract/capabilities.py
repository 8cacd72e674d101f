"""Suite "capabilities": what each backend can do, as `flexvarlen.why_not` says on this machine."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from flexvarlen import BACKENDS, why_not
from flexvarlen.bench.suites import FrozenCase
from flexvarlen.report.records import Record, by_machine, commits_of, latest_run, ran_on
from flexvarlen.report.table import Column, Table
from flexvarlen.runner.suite import Finding, Findings, Options, Suite

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
"""Asked for training where the backend has a backward. Every backend that runs does causal and
bidirectional documents, grouped-query attention and a scale of the caller's."""
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
HEAD_DIMS = tuple(range(8, 264, 8))


@dataclass(frozen=True)
class HeadsCase(FrozenCase):
    """The heads that backends are asked about."""

    name: ClassVar[str] = "heads"
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128


class Capabilities(Suite[HeadsCase]):
    """Nothing runs but the backends' own checks."""

    name: ClassVar[str] = "capabilities"

    def cases(self, options: Options) -> Sequence[HeadsCase]:
        return [HeadsCase()]

    def variants(self, case: HeadsCase, options: Options) -> Sequence[str]:
        return BACKENDS

    def measure(self, case: HeadsCase, variants: Sequence[str], options: Options) -> Findings:
        return [_finding(name, case.data(), options.device) for name in variants]

    def tables(self, records: Sequence[Record]) -> Iterable[Table]:
        return map(_table, map(latest_run, by_machine(records)))


def _finding(name: str, heads: dict[str, Any], device: torch.device) -> Finding:
    def ask(**options: Any) -> str | None:
        return why_not(name, **{"device": device, "dtype": torch.bfloat16, **heads, **options})

    missing = ask(needs_grad=False)
    if missing is not None:
        return Finding(name, "unsupported", missing)
    trains = ask() is None
    reasons = {
        feature: ask(**({} if feature == "backward" else {"needs_grad": trains} | options))
        for feature, options in FEATURES.items()
    }
    dtypes = [x for x in DTYPES if ask(dtype=getattr(torch, x), needs_grad=trains) is None]
    dims = [x for x in HEAD_DIMS if ask(head_dim=x, needs_grad=trains) is None]
    return Finding(name, "ok", None, {"why_not": reasons, "dtypes": dtypes, "head_dims": dims})


def _table(records: Sequence[Record]) -> Table:
    """A line for each backend; the records hold the reason of each "no"."""

    def feature(name: str) -> Callable[[Record], str]:
        def cell(record: Record) -> str:
            if record.status != "ok":
                return "not here" if name == "forward" else ""
            return "yes" if record.measures["why_not"][name] is None else "no"

        return cell

    columns = [
        Column("backend", lambda r: f"`{r.case['variant']}`"),
        *(Column(name, feature(name)) for name in FEATURES),
        Column("head_dim", lambda r: _ranges(r.measures.get("head_dims", []))),
        Column("dtypes", lambda r: ", ".join(DTYPES[x] for x in r.measures.get("dtypes", []))),
    ]
    case = records[0].case
    title = (
        f"{case['num_heads']} query heads over {case['num_kv_heads']} KV heads of "
        f"{case['head_dim']}; {ran_on(records[0].environment)}{commits_of(records)}"
    )
    return Table.of(records, columns, title)


def _ranges(dims: list[int]) -> str:
    """Multiples as a range: 8, 16, 24 and 32 are "8–32 by 8".

    >>> _ranges([32, 64, 96, 128]), _ranges([64])
    ('32–128 by 32', '64')
    """
    steps = {b - a for a, b in itertools.pairwise(dims)}
    if len(dims) > 2 and len(steps) == 1:
        return f"{dims[0]}–{dims[-1]} by {steps.pop()}"
    return ", ".join(map(str, dims))


SUITE = Capabilities()
