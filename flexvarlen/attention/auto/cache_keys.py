"""Cache keys of "auto": the kind of call, the machine, and a bucket of sizes.

A bucket depends only on what is also known in a compiled graph (total_tokens, capacity,
max_seqlen_bound, max_depth and the launch sizes). Eager and compiled calls on one layout therefore
share a measurement, and so do other documents of about the same sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import metadata
from operator import index

import torch
from packaging.version import Version

from flexvarlen._version import __version__
from flexvarlen.attention.backends.cu_seqlens import hub
from flexvarlen.attention.call import AttentionCall
from flexvarlen.env import torch_state
from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.mask.document_mask import DocumentMask

_KERNEL_PACKAGES = (
    "triton",
    "fla-core",
    "flash-attn",
    "flash-attn-3",
    "flash-attn-4",
    "nvidia-cutlass-dsl",
    "tilelang",
    "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13",
)

_HINTS = Version(torch.__version__) >= Version("2.13")  # where Dynamo traces optimization_hint

Sizes = tuple[int, ...]
"""total_tokens, capacity, max_seqlen_bound, max_depth (1 without trees), and whether kernels are
launched for the sizes of the actual documents (`_OWN`) or for upper bounds (`_BOUNDS`). In
cross-attention, also of the keys."""

_OWN, _BOUNDS = 1, 2
_FIELDS = 5
_WASTEFUL = 7  # at 32,768 tokens, a 256 times larger launch slowed fa3 from 3.8 to 11 ms per layer

Bucket = tuple[int, ...]
"""log2 (rounded up) of total_tokens, of tokens per slot, of max_seqlen_bound and of max_depth;
`_OWN` or `_BOUNDS`."""


def sizes(mask: DocumentMask) -> Sizes:
    """Return the sizes of the mask's layouts, which do not depend on the documents. Traces."""
    q, k = mask.layout, mask.layout_k
    return (*_of_layout(q), *_of_layout(k)) if mask.spec.cross else _of_layout(q)


def _of_layout(layout: PackedLayout) -> Sizes:
    launch = _OWN if layout.launch.of_the_row else _BOUNDS
    depth = 1 if layout.segments is None else layout.segments.max_depth
    return layout.total_tokens, layout.capacity, layout.max_seqlen_bound, depth, launch


def sizes_in_graph(mask: DocumentMask) -> Sizes:
    """Return the sizes inside a compiled graph, as plain ints, without guarding on them.

    A symbolic size gives the value that the graph is compiled with, or 0 if torch cannot tell.
    """
    from torch.fx.experimental import symbolic_shapes  # imports sympy, which only compilation needs

    found = sizes(mask)
    if _HINTS:
        return tuple([symbolic_shapes.optimization_hint(size) for size in found])
    return tuple([index(size) if symbolic_shapes.has_static_value(size) else 0 for size in found])


def bucket(sizes: Sizes) -> Bucket:
    """Round each size, and T / capacity, up to a power of two; return exponents and the launch.

    >>> bucket((4096, 8, 1000, 3, 1))
    (12, 9, 10, 2, 1)
    """
    found: list[int] = []
    for i in range(0, len(sizes), _FIELDS):
        tokens, capacity, bound, depth, launch = sizes[i : i + _FIELDS]
        found += ((tokens - 1).bit_length(), ((tokens - 1) // capacity).bit_length())
        found += ((bound - 1).bit_length(), (depth - 1).bit_length(), launch)
    return tuple(found)


def is_wasteful(bucket: Bucket) -> bool:
    """Return whether cu_seqlens kernels would be launched for far more tokens than the row has.

    This happens if the documents of a long row are known only inside a compiled graph.
    """
    return any(
        bucket[i + 4] == _BOUNDS and bucket[i + 2] - bucket[i + 1] >= _WASTEFUL
        for i in range(0, len(bucket), _FIELDS)
    )


def describe(call: AttentionCall) -> str:
    """Describe the kind of call, including whether there is a softcap, but not its value."""
    words = [
        str(call.dtype).removeprefix("torch."),
        f"{call.num_heads}/{call.num_kv_heads} heads of {call.head_dim}",
        repr(call.spec)[len("MaskSpec(") : -1],
        "forward+backward" if call.needs_grad else "forward",
    ]
    words += ["softcap"] * (call.softcap is not None)
    for flag in ("sinks", "deterministic", "batch_invariant", "return_lse", "past_int32"):
        words += [flag] * getattr(call, flag)
    return ", ".join(words)


def answer_key(call: AttentionCall, bucket: Sequence[int]) -> str:
    """Return the key of a measurement in the cache file."""
    return f"{_machine_and_kind(call)}; sizes 2^" + " 2^".join(map(str, bucket))


def check_key(name: str, call: AttentionCall) -> str:
    """Return the key under which the cache file notes that a kernel's results are right."""
    origin = hub.origin(name)
    kernel = name if origin is None else f"{name} of {origin}"
    return f"{_machine_and_kind(call)}; {kernel} is right"


def _machine_and_kind(call: AttentionCall) -> str:
    return f"{machine(call.device)}; {describe(call)}"


def machine(device: torch.device) -> str:
    """Return what results may depend on besides the call: hardware, versions, settings."""
    packages = ", ".join(f"{name} {version}" for name, version in versions())
    state = "torch state " + ", ".join(map(str, torch_state()))
    return "; ".join([_hardware(device), packages, state])


def _hardware(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


@cache
def versions() -> tuple[tuple[str, str], ...]:
    """Return the versions of torch, flexvarlen and each installed kernel package."""
    found = [("torch", torch.__version__), ("flexvarlen", __version__)]
    for name in _KERNEL_PACKAGES:
        try:
            found.append((name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            continue
    return tuple(found)
