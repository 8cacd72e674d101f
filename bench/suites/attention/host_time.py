"""Suite "host-time": what a call of ours costs the host over the raw kernel's own function.

Documents so short that the device waits for the host; many calls in a round, our calls and the
raw ones in turns, the clock read before the first and after the last launch.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch

import flexvarlen as fv
from flexvarlen.bench.suites import FrozenCase
from flexvarlen.bench.suites.attention.inputs import Inputs
from flexvarlen.bench.suites.attention.packed import RAW, first_of
from flexvarlen.bench.suites.attention.tables import where
from flexvarlen.measure.timing import synchronize
from flexvarlen.reference.acceptance import Error
from flexvarlen.report.records import Record, by_machine, grouped
from flexvarlen.report.table import Column, Table
from flexvarlen.runner.each import measure_passes
from flexvarlen.runner.suite import Finding, Findings, Options, Suite, require_known

KERNELS = ("fa2", "fa3", "fa4", "varlen")
FORWARD, BOTH = "forward", "forward and backward"
PASSES = {FORWARD: FORWARD, "forward for a backward": "forward, gradients enabled", BOTH: BOTH}
"""The passes by their names in the table."""
ROUNDS, CALLS, UNTIMED = 15, 200, 5


@dataclass(frozen=True)
class HostTimeCase(FrozenCase):
    """Documents of one row."""

    documents: tuple[int, ...] = (128, 128)
    heads: tuple[int, int] = (32, 8)
    head_dim: int = 128
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        return "documents-" + "-".join(map(str, self.documents))


class HostTime(Suite[HostTimeCase]):
    name: ClassVar[str] = "host-time"

    def cases(self, options: Options) -> Sequence[HostTimeCase]:
        return [HostTimeCase()]

    def variants(self, case: HostTimeCase, options: Options) -> Sequence[str]:
        return KERNELS

    def measure(self, case: HostTimeCase, variants: Sequence[str], options: Options) -> Findings:
        kind = (case.heads, case.head_dim, getattr(torch, case.dtype), options.device, True)
        inputs = Inputs.random(case.documents, *kind)
        require_known(variants, RAW)
        passes = {pass_: partial(_host_time, inputs, pass_, options) for pass_ in PASSES}
        return measure_passes(case.name, variants, passes, options.device)

    def tables(self, records: Sequence[Record]) -> Iterable[Table]:
        return map(_table, by_machine(records))


SUITE = HostTime()


def _host_time(inputs: Inputs, pass_: str, options: Options, kernel: str) -> Finding:
    """Microseconds of our call, of the raw one, and of the difference, round by round."""
    needs_grad = pass_ != FORWARD
    raw = RAW[kernel](inputs, needs_grad)
    leaves = inputs.leaves(needs_grad)
    layout = fv.PackedLayout.from_lengths(inputs.lengths, device=inputs.q.device)
    ours = partial(fv.packed_attention, *leaves, layout, backend=kernel)
    out = first_of(ours())
    apart = Error.between(out, raw.as_THD(raw.forward())).relative
    if not apart < 0.02:
        wrong = f"our output and the raw kernel's differ by {apart:.2g}, relative"
        return Finding(kernel, "wrong", wrong, pass_=pass_)
    calls: dict[str, Callable[[], Any]] = {"ours": ours, "raw": raw.forward}
    if pass_ == BOTH:
        calls = {
            "ours": lambda: torch.autograd.grad(ours(), leaves, inputs.grad_out),
            "raw": lambda: raw.backward(raw.forward()),
        }
    rounds, per_round = (2, 3) if options.quick else (ROUNDS, CALLS)
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            found[name].append(_microseconds(call, per_round, options.device))
    found["more"] = [x - y for x, y in zip(found["ours"], found["raw"], strict=True)]
    measures: dict[str, Any] = {"rounds": rounds, "calls": per_round}
    for name, values in found.items():
        tenths = statistics.quantiles(values, n=10, method="inclusive")
        measures |= {f"{name}_us_p{10 * i + 10}": tenths[i] for i in (1, 4, 7)}
    return Finding(kernel, "ok", None, measures, pass_)


def _microseconds(call: Callable[[], Any], calls: int, device: torch.device) -> float:
    for _ in range(UNTIMED):
        call()
    synchronize(device)
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    seconds = time.perf_counter() - begin
    synchronize(device)
    return seconds / calls * 1e6


def _table(records: Sequence[Record]) -> Table:
    kernels = grouped(records, "variant")

    def cell(pass_: str) -> Callable[[str], str]:
        def text(kernel: str) -> str:
            own = [r for r in kernels[kernel] if r.case.get("pass") == pass_ and r.status == "ok"]
            if not own:
                return "–"
            m = own[-1].measures
            more, low, high = (m[f"more_us_p{p}"] for p in (50, 20, 80))
            both = f"{m['ours_us_p50']:.0f}, {m['raw_us_p50']:.0f}"
            return f"{both}; {more:+.0f} ({low:+.0f} to {high:+.0f})"

        return text

    columns = [
        Column("kernel", lambda x: f"`{x}`"),
        *(Column(title, cell(x)) for x, title in PASSES.items()),
    ]
    return Table.of(
        kernels,
        columns,
        "Microseconds of the host for a call on two documents of 128 tokens, 32/8 heads of 128, "
        "bfloat16: flexvarlen, the raw kernel's function; their difference in a round, median "
        f"(20th to 80th percentile); {where(records)}",
    )
