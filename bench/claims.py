"""What public sources claimed of attention, beside what the records say.

A claim is that `slow` takes N times as long as `fast`. Ratios are of medians of one run, on a
GPU; times in which the device waited for the host do not count.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flexvarlen.report.records import Record, by_machine
from flexvarlen.report.table import NOTHING, Column, Table

SLACK = 0.05  # timings of two tools are held to agree within 5%
Hold = Callable[[float, float], bool]
"""The ratio measured and the one claimed -> whether the claim holds."""


def speed_up(measured: float, claimed: float) -> bool:
    """At least as fast as claimed, within 5%."""
    return measured >= claimed * (1 - SLACK)


def within(measured: float, claimed: float) -> bool:
    """No further apart, either way.

    >>> within(0.95, 1.06), within(1.07, 1.06)
    (True, False)
    """
    return abs(measured - 1) <= claimed - 1


@dataclass(frozen=True)
class Claim:
    """That one variant takes N times as long as another.

    Attributes:
        what: of what it is said.
        ratio: the slow variant's time over the fast one's.
        gpu: where the source measured it; empty if it does not say.
        source: a link, or words.
        suite: that measures it.
        slow, fast: the variants.
        case: fields of the cases that are meant; several values in a tuple.
        slow_case: fields in which the slow variant's case differs from `case`.
        passes: forward, backward.
        clocks: "device": the kernels' time; "call": the host's, where that is longer.
        holds: the rule.
    """

    what: str
    ratio: float
    gpu: str
    source: str
    suite: str = ""
    slow: str = ""
    fast: str = ""
    case: Mapping[str, Any] = field(default_factory=dict)
    slow_case: Mapping[str, Any] = field(default_factory=dict)
    passes: Sequence[str] = ("forward",)
    clocks: Sequence[str] = ("device",)
    holds: Hold = speed_up

    def measured(self, records: Sequence[Record]) -> Iterator[float]:
        """The ratios of one machine's records."""
        own = [r for r in records if r.suite == self.suite and r.status == "ok"]
        for clock in self.clocks:
            fast_ms = self._times(own, self.case, clock)
            slow_ms = self._times(own, {**self.case, **self.slow_case}, clock)
            for (key, variant, pass_), ms in fast_ms.items():
                slow = slow_ms.get((key, self.slow, pass_))
                if variant == self.fast and pass_ in self.passes and slow is not None:
                    yield slow / ms

    def _times(
        self, records: Sequence[Record], meant: Mapping[str, Any], clock: str
    ) -> dict[tuple[str, str, str], float]:
        """Milliseconds of the cases that are meant, by what slow and fast share."""
        dropped = {"variant", "pass"}
        if self.slow_case:
            dropped |= {"tokens", "sparsity", *self.slow_case}
        found = {}
        for record in records:
            ms = _ms(record, clock)
            if ms is not None and _is(record.case, meant):
                shared = {k: value for k, value in record.case.items() if k not in dropped}
                run = record.environment.get("started_utc")
                key = json.dumps([shared, run], sort_keys=True)
                found[key, record.case["variant"], record.case.get("pass", "")] = ms
        return found


def _is(case: Mapping[str, Any], meant: Mapping[str, Any]) -> bool:
    return all(
        case.get(name) in (wanted if isinstance(wanted, tuple) else (wanted,))
        for name, wanted in meant.items()
    )


def _ms(record: Record, clock: str) -> float | None:
    device, host = (record.measures.get(f"{x}_ms_p50") for x in ("device", "host"))
    if clock == "call":
        return None if device is None or host is None else max(device, host)
    return None if record.measures.get("host_bound") else device


BOTH = ("forward", "backward")
OMNI = "https://github.com/vllm-project/vllm-omni/issues/4418"
SKILL = "https://github.com/NousResearch/hermes-agent"
TORCH_PULL = "https://github.com/pytorch/pytorch/pull/164502"
STUDY: dict[str, Any] = {"suite": "varlen-study", "clocks": ("device", "call")}

CLAIMS = (
    Claim(
        "SDPA varlen over FA2, one document of 256 tokens",
        *(1.97, "A100", OMNI),
        slow="raw:fa2",
        fast="raw:varlen",
        case={"name": "256"},
        **STUDY,
    ),
    Claim(
        "FA2 over SDPA varlen, 8 documents of 4,160 tokens",
        *(1.11, "A100", OMNI),
        slow="raw:varlen",
        fast="raw:fa2",
        case={"lengths": ([4160] * 8,)},
        **STUDY,
    ),
    *(
        Claim(
            f"varlen over padded SDPA, {part}, {said}",
            *(1.98, "H100", TORCH_PULL),
            suite="padding",
            slow=padded,
            fast=fast,
            case={"part": part, "causal": False, "max_length": 2048, "documents": "multiples"},
            slow_case=slow_case,
        )
        for part, fast in (("attention", "raw:varlen"), ("module", "varlen"))
        for said, padded, slow_case in (
            ("with a mask", "padded:masked", {}),
            # Without a mask it attends to pads: the same call is timed on full rows.
            ("without a mask", "padded:unmasked", {"documents": "full-length"}),
        )
    ),
)


def section(records: Sequence[Record]) -> str:
    """A table of the claims, a line for each GPU on which one was measured; empty if none was."""
    lines = [
        (claim, machine[0].environment["gpu"], found)
        for claim in CLAIMS
        for machine in by_machine(r for r in records if r.environment.get("gpu"))
        if (found := sorted(claim.measured(machine)))
    ]
    if not lines:
        return ""
    columns = [
        Column("claim", lambda line: line[0].what),
        Column("claimed", lambda line: _claimed(line[0])),
        Column("on", lambda line: line[0].gpu or NOTHING),
        Column("source", lambda line: _link(line[0].source)),
        Column("measured", lambda line: f"{_range(line[2])}, {line[1]}"),
        Column("the claim", lambda line: _verdict(line[0], line[2])),
    ]
    note = f"A speed-up holds if at least {1 - SLACK:.0%} of it was measured."
    return Table.of(lines, columns, notes=[note]).markdown()


def _claimed(claim: Claim) -> str:
    if claim.holds is speed_up:
        return f"{claim.ratio:.3g}×"
    return f"{'within ' * (claim.holds is within)}{claim.ratio - 1:.0%}"


def _link(source: str) -> str:
    """A link to GitHub by its repository and number.

    >>> _link("https://github.com/pytorch/pytorch/pull/1")
    '[pytorch/pytorch#1](https://github.com/pytorch/pytorch/pull/1)'
    """
    if not source.startswith("https://"):
        return source
    parts = source.removeprefix("https://github.com/").split("/")
    number = f"#{parts[3]}" if len(parts) > 3 else ""
    return f"[{'/'.join(parts[:2])}{number}]({source})"


def _range(ratios: Sequence[float]) -> str:
    low, high = f"{ratios[0]:.2f}×", f"{ratios[-1]:.2f}×"
    return low if low == high else f"{low} to {high}"


def _verdict(claim: Claim, ratios: Sequence[float]) -> str:
    good = sum(claim.holds(ratio, claim.ratio) for ratio in ratios)
    if good == len(ratios):
        return "holds"
    return f"holds in {good} of {len(ratios)}" if good else "does not hold"
