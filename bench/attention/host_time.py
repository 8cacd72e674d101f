"""`python -m flexvarlen.bench.attention.host_time`: host time of a call over the raw kernel's.

Documents so short that the device waits for the host, each call of ours in turn with the raw one of
`raw_kernels.py`: many calls a round, the clock read before the first and behind the last launch. A
call of "auto" in turn with one of the kernel that it takes, by name.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import flexvarlen as fv
from flexvarlen.bench.attention.raw_kernels import RAW, Inputs, Prepared, Unsupported
from flexvarlen.bench.bench_run import BenchRun
from flexvarlen.markdown import markdown
from flexvarlen.rows import Row, commit_of, one_line

SUITE = "host-time"
KERNELS = ("fa2", "fa3", "fa4", "varlen", "auto")
PASSES = ("forward", "forward for a backward", "forward and backward")
"""Without gradients; with a graph built, not used; with it used."""


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(
        prog="python -m flexvarlen.bench.attention.host_time", description=summary
    )
    add = parser.add_argument
    add("--kernels", nargs="+", default=list(KERNELS), choices=["auto", *sorted(RAW)])
    add("--documents", type=int, nargs="+", default=[128, 128], metavar="TOKENS")
    add("--heads", type=int, nargs=2, default=[32, 8], metavar=("H", "HKV"))
    add("--head-dim", type=int, default=128)
    add("--rounds", type=int, default=15)
    add("--calls", type=int, default=200, help="in a round")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--commit", help="recorded in place of what git finds here")
    add("--out", type=Path, help="JSON lines to append to")
    args = parser.parse_args(argv)
    if args.rounds < 2:
        parser.error(f"--rounds must be at least 2, for a spread, got {args.rounds}")
    return args


class Run(BenchRun):
    """The inputs of all kernels."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(SUITE, args)
        heads = (args.heads[0], args.heads[1])
        kind = (args.documents, heads, args.head_dim, torch.bfloat16, self.device, True)
        self.inputs = Inputs.random(*kind)
        self.layout = fv.PackedLayout.from_lengths(args.documents, device=self.device)

    def run(self) -> None:
        for kernel in self.args.kernels:
            for passes in PASSES:
                self.measure(kernel, passes)

    def measure(self, kernel: str, passes: str) -> None:
        """One row: both calls, and what ours takes more, round by round."""
        case = {
            "kernel": kernel,
            "passes": passes,
            "documents": self.args.documents,
            "heads": self.args.heads,
            "head_dim": self.args.head_dim,
            "dtype": "bfloat16",
        }
        try:
            ours, raw = self.calls(kernel, passes)
        except (Unsupported, NotImplementedError, ImportError) as error:
            self.append(case, "unsupported", one_line(error), {})
            return
        if not self.agree(kernel):
            self.append(case, "wrong", "ours and the raw kernel's own outputs are apart", {})
            return
        found: dict[str, list[float]] = {"ours": [], "raw": []}
        for _ in range(self.args.rounds):
            found["ours"].append(self.microseconds(ours))
            found["raw"].append(self.microseconds(raw))
        more = [mine - theirs for mine, theirs in zip(found["ours"], found["raw"], strict=True)]
        measures = {"rounds": self.args.rounds, "calls": self.args.calls}
        for name, values in (found | {"more": more}).items():
            tenths = statistics.quantiles(values, n=10, method="inclusive")
            p20, p50, p80 = (tenths[i] for i in (1, 4, 7))
            measures |= {f"{name}_us_p20": p20, f"{name}_us_p50": p50, f"{name}_us_p80": p80}
        self.append(case, "ok", None, measures)
        self.say(f"{kernel}, {passes}: {measures['more_us_p50']:+.1f} µs")

    def calls(self, kernel: str, passes: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
        """Ours and the other, each run once."""
        needs_grad = passes != "forward"
        other = self.other(kernel, needs_grad)
        leaves = self.inputs.leaves(needs_grad)
        both: list[tuple[Callable[[], Any], Sequence[torch.Tensor]]] = [
            (self.ours(kernel, leaves), leaves),
            (other.forward, other.leaves),
        ]
        found = [call for call, _ in both]
        if passes == "forward and backward":
            found = [partial(_step, call, xs, self.inputs.cotangent) for call, xs in both]
        for call in found:
            call()
        return found[0], found[1]

    def ours(self, kernel: str, leaves: Sequence[torch.Tensor]) -> Callable[[], Any]:
        q, k, v = leaves
        return partial(fv.packed_attention, q, k, v, self.layout, backend=kernel)

    def other(self, kernel: str, needs_grad: bool) -> Prepared:
        """The raw kernel; beside "auto" ours by the name that it takes."""
        if kernel != "auto":
            return RAW[kernel](self.inputs, needs_grad)
        leaves = self.inputs.leaves(needs_grad)
        taken = fv.explain(
            self.layout,
            dtype=leaves[0].dtype,
            num_heads=leaves[0].shape[1],
            num_kv_heads=leaves[1].shape[1],
            head_dim=leaves[0].shape[2],
            needs_grad=needs_grad,
        ).chosen
        return Prepared(self.ours(taken, leaves), leaves, self.inputs.cotangent)

    def agree(self, kernel: str) -> bool:
        """Whether both calls attend to the same."""
        ours, other = self.calls(kernel, "forward")
        mine, theirs = ours(), self.other(kernel, False).as_THD(other())
        return torch.allclose(mine.float(), theirs.float(), atol=2e-2, rtol=2e-2)

    def microseconds(self, call: Callable[[], Any]) -> float:
        """Of the host, a call."""
        for _ in range(5):
            call()
        self.synchronize()
        begin = time.perf_counter()
        for _ in range(self.args.calls):
            call()
        seconds = time.perf_counter() - begin
        self.synchronize()
        calls: int = self.args.calls
        return seconds / calls * 1e6

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _step(call: Callable[[], Any], leaves: Sequence[torch.Tensor], cotangent: torch.Tensor) -> Any:
    return torch.autograd.grad(call(), leaves, cotangent)


def host_time_section(rows: Sequence[Row]) -> str:
    """Kernels down, passes across: ours, the raw call's, and the difference's median and spread."""
    found = {(row.case["kernel"], row.case["passes"]): row for row in rows}
    kernels = dict.fromkeys(row.case["kernel"] for row in rows)
    lines = []
    for kernel in kernels:
        lines.append([f"`{kernel}`", *(_cell(found.get((kernel, passes))) for passes in PASSES)])
    runs: dict[str, dict[str, None]] = {}
    for row in rows:
        where = row.environment
        machine = f"{where.get('gpu') or where.get('cpu')}, torch {where.get('torch')}"
        runs.setdefault(machine + commit_of(where), {})[f"`{row.case['kernel']}`"] = None
    several = len(runs) > 1
    said = (run + (f" ({', '.join(own)})" if several else "") for run, own in runs.items())
    return (
        f"Microseconds of the host a call, documents of "
        f"{', '.join(map(str, rows[0].case['documents']))} tokens: ours − the raw kernel's own "
        f"function (`auto`: − the kernel that it takes, by name) = difference (p20–p80 over "
        f"rounds); {'; '.join(said)}:\n\n{markdown(['kernel', *PASSES], lines)}"
    )


def _cell(row: Row | None) -> str:
    if row is None or row.status != "ok":
        return "–"
    m = row.measures
    more, low, high = (m[f"more_us_p{p}"] for p in (50, 20, 80))
    return (
        f"{m['ours_us_p50']:.0f} − {m['raw_us_p50']:.0f} = {more:+.0f} ({low:+.0f} to {high:+.0f})"
    )


def main(argv: list[str] | None = None) -> None:
    Run(parse(argv)).run()


if __name__ == "__main__":
    main()
