"""The table from which `auto` chooses, made from the records, and what is lost by choosing from it.

    python -m flexvarlen.bench.kernel_table

writes `flexvarlen/attention/auto/kernel_times.json` from the records in `bench/results`, and prints
how much slower than the fastest kernel those would be that `auto` took for each case of the table
if it did not know this case.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch

from flexvarlen.attention.auto import table
from flexvarlen.attention.auto.table import Case
from flexvarlen.attention.call import AttentionCall
from flexvarlen.mask.spec import MaskSpec
from flexvarlen.report.records import Record, read_records

RESULTS = Path(__file__).with_name("results")
SUITES = ("kernels", "trees")
KERNELS = ("fa3", "fa4", "flex_fa4", "fa2", "flex", "varlen", "cudnn")
"""The kernels whose times the table contains."""

CAPABILITIES = {"NVIDIA H200": (9, 0), "NVIDIA H100 80GB HBM3": (9, 0)}
"""Compute capabilities of the GPUs that records name, as records do not contain them."""

SOURCE = ("torch", "triton", "flash_attn", "flash_attn_3", "flash_attn_4")
"""The versions that a case names."""


# ---- the table ----


def table_of(records: Iterable[Record]) -> dict[str, Any]:
    """The table as JSON: the cases of both suites that ran, and where.

    Raises:
        KeyError: a GPU is not in `CAPABILITIES`.
    """
    sources: list[dict[str, Any]] = []
    cases: dict[str, dict[str, Any]] = {}
    for record in records:
        case, times = record.case, _times(record)
        if case["variant"] not in KERNELS or record.suite not in SUITES or not times:
            continue
        source = _source(record)
        if source not in sources:
            sources.append(source)
        kind = {"source": sources.index(source)} | _kind(record)
        ms = cases.setdefault(json.dumps(kind), kind | {"ms": {}})["ms"]
        own = ms.setdefault(case["variant"], [None] * 4)
        ms[case["variant"]] = [
            known if new is None else float(f"{new:.4g}")
            for known, new in zip(own, times, strict=True)
        ]
    return {
        "made_by": "python -m flexvarlen.bench.kernel_table, from bench/results; do not edit",
        "ms": "forward and backward on the device, forward and backward on the host",
        "sources": sources,
        "cases": list(cases.values()),
    }


def _times(record: Record) -> list[float | None]:
    """Forward and backward on the device and on the host, as far as the record has them.

    Empty if the device waited for the host, so that its time is not that of the kernel.
    """
    found = record.measures
    if record.status != "ok" or found.get("host_bound"):
        return []
    if record.suite == "trees":
        if record.case["kind"] != "attention":
            return []
        clocks = [f"{p}_{c}_ms_p50" for c in ("device", "host") for p in ("forward", "backward")]
        return [found[clock] for clock in clocks]
    device, host = found["device_ms_p50"], found["host_ms_p50"]
    forward = record.case["pass"] == "forward"
    return [device, None, host, None] if forward else [None, device, None, host]


def _kind(record: Record) -> dict[str, Any]:
    """The fields of `Case` but for the times and their source."""
    case, found, tree = record.case, record.measures, record.suite == "trees"
    if tree:
        heads, prefix = case["heads"], "forward_"
    else:
        heads, prefix = [case[x] for x in ("num_heads", "num_kv_heads", "head_dim")], ""
    return {
        "depth": len(case["levels"]) if tree else 1,
        "causal": True if tree else case["causal"],
        **dict(zip(("num_heads", "num_kv_heads", "head_dim"), heads, strict=True)),
        "tokens": case["tokens"],
        "capacity": found[f"{prefix}capacity"],
        "longest": found[f"{prefix}max_seqlen_bound"],
    }


def _source(record: Record) -> dict[str, Any]:
    where = record.environment
    versions = {name: where[name] for name in SOURCE if where.get(name) is not None}
    capability = list(CAPABILITIES[where["gpu"]])
    return {
        "gpu": where["gpu"],
        "capability": capability,
        **versions,
        "commit": where["git_commit"],
    }


def as_text(found: Mapping[str, Any]) -> str:
    """The file: a line for each source and each case."""
    parts = []
    for name, value in found.items():
        if isinstance(value, list):
            lines = ",\n".join(f"  {json.dumps(one)}" for one in value)
            parts.append(f' "{name}": [\n{lines}\n ]')
        else:
            parts.append(f' "{name}": {json.dumps(value)}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


# ---- replayed without each case in turn ----

INSTALLED: Mapping[str, tuple[str, ...]] = {
    "all kernels": KERNELS,
    "FA2 alone": ("fa2", "flex", "varlen", "cudnn"),
    "torch alone": ("flex", "varlen", "cudnn"),
}
"""What a machine may have, torch's own kernels included."""


@dataclass(frozen=True)
class Replayed:
    """What `auto` would take for a case that it does not know; `ratio`: of their times."""

    case: Case
    needs_grad: bool
    compiled: bool
    taken: str
    fastest: str
    ratio: float

    def __str__(self) -> str:
        passes = "forward and backward" if self.needs_grad else "forward"
        mode = "compiled" if self.compiled else "eager"
        kind = str(self.case).partition(" (")[0]
        return (
            f"{self.ratio:.2f} ({self.taken} instead of {self.fastest}; {kind}; {passes}, {mode})"
        )


def replay(cases: Sequence[Case], installed: Sequence[str]) -> list[Replayed]:
    """Choose for each case from the others: forward and training, eager and compiled."""
    return [
        _replayed(case, [x for x in cases if x is not case], installed, needs_grad, compiled)
        for case, needs_grad, compiled in product(cases, (False, True), (False, True))
    ]


def _replayed(
    case: Case, others: Sequence[Case], installed: Sequence[str], needs_grad: bool, compiled: bool
) -> Replayed:
    spec = MaskSpec.of(causal=case.causal)
    call = AttentionCall(
        torch.device("cuda"),
        torch.bfloat16,
        case.num_heads,
        case.num_kv_heads,
        case.head_dim,
        spec.with_trees() if case.depth > 1 else spec,
        needs_grad=needs_grad,
    )
    by_host = not compiled and table.is_host_bound(call, case.tokens)
    near = table.nearest(call, case.bucket, case.source["capability"], others)
    own = {n: t for n, t in case.times(needs_grad).items() if n in installed}
    order = table.fastest_first(near.times(needs_grad), by_host=by_host)
    taken = next(name for name in order if name in own)
    fastest = table.fastest_first(own, by_host=by_host)[0]
    clock = "host_ms" if by_host else "device_ms"
    ratio = getattr(own[taken], clock) / getattr(own[fastest], clock)
    return Replayed(case, needs_grad, compiled, taken, fastest, ratio)


def mean_ratio(found: Sequence[Replayed]) -> float:
    return geometric_mean(one.ratio for one in found)


def sentences(cases: Sequence[Case]) -> list[str]:
    """What is lost, for each of `INSTALLED`."""
    said = []
    for name, installed in INSTALLED.items():
        found = replay(cases, installed)
        worst = max(found, key=lambda one: one.ratio)
        near = sum(one.ratio <= 1.02 for one in found)
        said.append(
            f"{name}: in the geometric mean {mean_ratio(found):.3f} times the fastest kernel's "
            f"time, within 2% of it in {near} of {len(found)} calls; at worst {worst}"
        )
    return said


def main() -> None:
    records = read_records(RESULTS / f"{name}-h200.jsonl" for name in SUITES)
    found = table_of(records)
    table.PATH.write_text(as_text(found), encoding="utf-8")
    cases = table.read_cases(found)
    print(f"{table.PATH.name}: {len(cases)} cases, {table.PATH.stat().st_size:,} bytes")
    for sentence in sentences(cases):
        print(f"- {sentence}")


if __name__ == "__main__":
    main()
