"""The kernel times that ship with the package, and the case nearest to a call.

`kernel_times.json` holds the cases of the benchmark suites "kernels" and "trees", with the times of
every kernel that ran. `python -m flexvarlen.bench.kernel_table` writes it from the records.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from math import log2
from pathlib import Path
from typing import Any, NamedTuple

import torch

from flexvarlen.attention.auto.cache_keys import Bucket, bucket
from flexvarlen.attention.call import AttentionCall
from flexvarlen.mask.spec import UNLIMITED, MaskSpec

PATH = Path(__file__).with_name("kernel_times.json")


class Times(NamedTuple):
    """Median milliseconds of a call on the device and on the host."""

    device_ms: float
    host_ms: float


class Case(NamedTuple):
    """One measured kind of call.

    Attributes:
        source: the GPU, its compute capability, the versions of the kernels and the commit.
        depth: max_depth of the trees; 1 for documents.
        causal: whether the mask is causal.
        num_heads, num_kv_heads, head_dim: heads of the tensors.
        tokens, capacity, longest: total_tokens, capacity and max_seqlen_bound of the row.
        ms: by kernel, forward and backward on the device, forward and backward on the host. A
            kernel without a backward has None there.
    """

    source: Mapping[str, Any]
    depth: int
    causal: bool
    num_heads: int
    num_kv_heads: int
    head_dim: int
    tokens: int
    capacity: int
    longest: int
    ms: Mapping[str, Sequence[float | None]]

    @property
    def bucket(self) -> Bucket:
        """The bucket of the row's sizes."""
        return bucket((self.tokens, self.capacity, self.longest, self.depth, 1))

    def times(self, needs_grad: bool) -> dict[str, Times]:
        """Times of each kernel that ran: the forward, with `needs_grad` also the backward."""
        found = {}
        for name, (forward, backward, host_forward, host_backward) in self.ms.items():
            if forward is None or (needs_grad and backward is None):
                continue
            if not needs_grad:
                backward = host_backward = 0.0
            host_ms = (host_forward or 0.0) + (host_backward or 0.0)
            found[name] = Times(forward + (backward or 0.0), host_ms)
        return found

    def __str__(self) -> str:
        mask = "causal" if self.causal else "not causal"
        if self.depth > 1:
            mask = f"trees of depth {self.depth}"
        packages = [
            f"{name} {found}"
            for name, found in self.source.items()
            if name not in ("gpu", "capability", "commit")
        ]
        where = ", ".join([self.source["gpu"], *packages, f"commit {self.source['commit']}"])
        return (
            f"{self.num_heads}/{self.num_kv_heads} heads of {self.head_dim}, {mask}, "
            f"{self.tokens:,} tokens, documents of up to {self.longest:,} ({where})"
        )


@cache
def shipped_cases() -> tuple[Case, ...]:
    """The cases of `kernel_times.json`."""
    return read_cases(json.loads(PATH.read_text(encoding="utf-8")))


def read_cases(found: Mapping[str, Any]) -> tuple[Case, ...]:
    """The cases of a table as JSON, in which they give the index of their source."""
    sources = found["sources"]
    return tuple(Case(**{**case, "source": sources[case["source"]]}) for case in found["cases"])


def nearest(
    call: AttentionCall, sizes: Bucket, capability: tuple[int, int], cases: Sequence[Case]
) -> Case:
    """The case that is nearest to a call, by `distance`; the first one in a tie."""
    return min(cases, key=lambda case: distance(call, sizes, capability, case))


def distance(
    call: AttentionCall, sizes: Bucket, capability: tuple[int, int], case: Case
) -> tuple[int, float, float]:
    """How far a case is from a call: first by depth, then by architecture, then by shape.

    Some kernels attend to trees level by level, so their time grows with the depth, and
    architectures differ in kernels. By shape, each factor of 2 counts 1 in head_dim, in queries per
    key, and in the length of the mean and the longest document, and 1/2 in tokens, as the time of
    every kernel is proportional to them on a busy GPU. A difference in causality counts 2. Kernels
    differ most by document lengths and their spread: the mean and the longest.

    `python -m flexvarlen.bench.kernel_table` reports the loss if a case is missing from the table.
    """
    spec = call.spec
    architecture = abs(_number(capability) - _number(case.source["capability"]))
    tokens, mean, longest = _reach(sizes, spec)
    its_tokens, its_mean, its_longest, its_depth, _ = case.bucket
    shape = (
        abs(log2(call.head_dim / case.head_dim))
        + abs(log2(_queries_per_key(call) / _queries_per_key(case)))
        + 2 * (spec.causal != case.causal)
        + abs(tokens - its_tokens) / 2
        + abs(mean - its_mean)
        + abs(longest - its_longest)
    )
    return abs(sizes[3] - its_depth), architecture, shape


def _queries_per_key(heads: AttentionCall | Case) -> float:
    return heads.num_heads / heads.num_kv_heads


def _number(capability: Sequence[int]) -> float:
    major, minor = capability
    return major + minor / 10


def _reach(sizes: Bucket, spec: MaskSpec) -> tuple[int, int, int]:
    """log2 of the query row's tokens and of the mean and longest length of its documents.

    A window or chunk hides keys as short documents do.
    """
    tokens, mean, longest = sizes[:3]
    limits = [spec.left + 1] * (spec.left != UNLIMITED) + [spec.chunk] * (spec.chunk > 0)
    for limit in limits:
        reach = (limit - 1).bit_length()
        mean, longest = min(mean, reach), min(longest, reach)
    return tokens, mean, longest


HOST_BOUND = 2**34
"""Up to tokens x (heads x head_dim)² of this, an eager decoder layer takes longer to launch than to
compute, so that a kernel's host time decides. Of the layers that were timed on an H200 with the
records of "kernels", all up to here waited for the host, and all from twice that for the GPU."""


def is_host_bound(call: AttentionCall, tokens: int) -> bool:
    """Whether the host decides how fast an eager layer around such a call runs."""
    return tokens * (call.num_heads * call.head_dim) ** 2 <= HOST_BOUND


def fastest_first(times: Mapping[str, Times], *, by_host: bool) -> list[str]:
    """The kernels in the order of their host or device times."""
    return sorted(times, key=lambda name: times[name].host_ms if by_host else times[name].device_ms)


def capability_of(device: torch.device) -> tuple[int, int]:
    """The compute capability of a GPU; (0, 0) for other devices."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
