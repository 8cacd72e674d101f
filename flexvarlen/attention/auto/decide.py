"""`backend="auto"`: choose the kernel that was fastest for such calls, from a table.

The first available source of these gives the order in which kernels are tried:

1. the user's measurements, made by `flexvarlen.explain(..., measure=True)` or
   `flexvarlen tune`, for calls of the same kind and about the same sizes;
2. the nearest case of the table that ships with the package (`table.py`);
3. a fixed order.

The first kernel that can serve the call is chosen; packages of later kernels are not imported. Its
results are first compared with the reference, once for each kind of call and machine; a wrong
kernel is skipped with a warning. Not compared are `sdpa`; `flex` and `flex_fa4` inside a compiled
graph, as they cannot be compiled while a graph is traced; and kernels first called in a backward or
during CUDA graph capture. A kernel of the Hub must have been compared even if the user names its
backend; so must, if possible, a backend on a kind of machine that it was never tried on
(`must_be_checked`).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from pathlib import Path

from torch import Tensor

from flexvarlen.attention.auto import cache_keys, table
from flexvarlen.attention.auto.cache_file import Entry, cache_path, read_entries, write_entries
from flexvarlen.attention.auto.candidate_call import why_nothing_runs
from flexvarlen.attention.auto.check_results import (
    CannotCheckError,
    compare_with_reference,
    failure,
)
from flexvarlen.attention.auto.measure import time_kernels
from flexvarlen.attention.auto.table import Times
from flexvarlen.attention.backends.cu_seqlens import hub
from flexvarlen.attention.backends.registry import (
    BACKENDS,
    fixed_order,
    must_be_checked,
    refusal,
)
from flexvarlen.attention.call import AttentionCall
from flexvarlen.mask.document_mask import DocumentMask
from flexvarlen.measure import HostAndDevice, Timing

CANDIDATES: dict[str, tuple[str, ...]] = {
    "cuda": ("fa3", "fa4", "flex_fa4", "fa2", "flex", "varlen", "cudnn")
}
"""Backends to time, by device type, except those slow by design. On other devices none is timed,
and "auto" takes the fixed order."""


@dataclass(frozen=True)
class Order:
    """The order in which backends are tried for a kind of call.

    Attributes:
        names: names of backends, in order; some may not be able to serve the call.
        why: where the order comes from.
        times: times of the kernels, as far as they are known.
        timings: timings of the kernels, if they were measured on this machine.
    """

    names: tuple[str, ...]
    why: str
    times: Mapping[str, Times] = field(default_factory=dict)
    timings: Mapping[str, HostAndDevice] = field(default_factory=dict)


@dataclass(frozen=True)
class Decision:
    """What "auto" chooses for a kind of call.

    Attributes:
        backend: name of the backend.
        why: where the order comes from, and which earlier backends failed.
        checked: whether its results are known to be right, or need no check.
    """

    backend: str
    why: str
    checked: bool


_measured: dict[str, Entry] = {}
"""Measurements of this process; also in the cache file, if it can be written."""

_failed: dict[str, str] = {}
_right: set[str] = set()
"""By `cache_keys.check_key`: why a kernel failed or is wrong, and the kernels that are right."""


def reset() -> None:
    """Clear what this process has measured and checked, but not the cache file."""
    for found in (_measured, _failed, _right):
        found.clear()


def candidates(call: AttentionCall) -> tuple[str, ...]:
    """Return the backends to time for such calls: those in `CANDIDATES` that support them."""
    names = CANDIDATES.get(call.device.type, ())
    return tuple(n for n in names if n in BACKENDS and refusal(n, call) is None)


def order(call: AttentionCall, bucket: cache_keys.Bucket | None) -> Order:
    """The order in which backends are tried.

    Args:
        call: the kind of call. Inside a compiled graph, kernels are ordered by device time alone.
        bucket: bucket of its sizes; None if they are not known.
    """
    wasteful = call.needs_grad and bucket is not None and cache_keys.is_wasteful(bucket)
    fixed = fixed_order(call, wasteful=wasteful)
    if call.device.type not in CANDIDATES:
        return Order(fixed, f"by the built-in order, as nothing was measured on {call.device.type}")
    if bucket is None:
        return Order(
            fixed, "by the built-in order, as a size is 0, or not known inside the compiled graph"
        )
    by_host = call.graph is None and table.is_host_bound(call, 2 ** bucket[0])
    timings = _own_timings(call, bucket)
    if timings:
        why, times = f"measured on this machine ({cache_path()})", _times(timings)
    elif wasteful:  # no measured case is similar: only FlashAttention's backward is slowed down
        return Order(
            fixed, "by the built-in order, as kernels are launched for far longer documents"
        )
    else:
        capability = table.capability_of(call.device)
        case = table.nearest(call, bucket, capability, table.shipped_cases())
        why, times = f"fastest in the nearest record, {case}", case.times(call.needs_grad)
    names = table.fastest_first(times, by_host=by_host)
    return Order((*names, *(n for n in fixed if n not in names)), why, times, timings)


def decide(
    call: AttentionCall,
    bucket: cache_keys.Bucket | None,
    mask: DocumentMask | None,
    *,
    check: bool = True,
) -> Decision:
    """Choose a backend for a kind of call, and say why; the caller caches the decision.

    Args:
        call: the kind of call.
        bucket: bucket of its sizes; None if they are not known.
        mask: the documents of the call; None inside a compiled graph.
        check: whether to compare results that have not been compared yet.

    Raises:
        NotImplementedError: no backend can serve the call.
    """
    tried = order(call, bucket)
    reasons, why, final = [], tried.why, True
    for name in tried.names:
        reason = refusal(name, call)
        if reason is not None:
            reasons.append(f"{name}: {reason}")
            continue
        known = known_failure(name, call)
        # Kernels are checked when they are timed.
        checked = _check_once(name, call, mask) if check else name in tried.timings
        reason = known_failure(name, call)
        if reason is None and (checked or not check or hub.origin(name) is None):
            return Decision(name, why, checked and final)
        if reason is None:
            reason, final = "not checked yet", False
            why += f"; {name} is not checked yet"
        else:
            why += f"; {name} failed"
            if known is None:
                _warn_of_failure(name, call, reason)
        reasons.append(f"{name}: {reason}")
    raise NotImplementedError("no backend can serve this call. " + " ".join(reasons))


# ---- measurements of the user ----


def measure_kernels(call: AttentionCall, bucket: cache_keys.Bucket, mask: DocumentMask) -> None:
    """Time all kernels that can serve the call on these documents, and store the times in the file.

    Raises:
        RuntimeError: inside a backward or while a CUDA graph is captured.
        torch.OutOfMemoryError: there is no memory for the tensors.
    """
    obstacle = why_nothing_runs(call.device)
    if obstacle is not None:
        raise RuntimeError(
            f"kernels must be timed where they can run by themselves, but {obstacle}; call "
            "explain(measure=True) before."
        )
    names = candidates(call)
    if not names:
        return
    timings, failed = time_kernels(call, mask, names)
    for name, reason in failed.items():
        _failed[cache_keys.check_key(name, call)] = reason
        _warn_of_failure(name, call, reason)
    if not timings:
        return
    entry: Entry = {
        name: {part: astuple(timing) for part, timing in vars(both).items()}
        for name, both in timings.items()
    }
    key = cache_keys.answer_key(call, bucket)
    right = [cache_keys.check_key(name, call) for name in timings]
    _measured[key] = entry
    _right.update(right)
    write_entries(cache_path(), {key: entry} | {name: {} for name in right})


def _own_timings(call: AttentionCall, bucket: cache_keys.Bucket) -> dict[str, HostAndDevice]:
    key, path = cache_keys.answer_key(call, bucket), cache_path()
    entry = _measured.get(key) or read_entries(path).get(key)
    return {} if entry is None else _from_entry(entry, path)


def _from_entry(entry: Entry, path: Path) -> dict[str, HostAndDevice]:
    """Return the timings of an entry; none, with a warning, if the entry is not valid."""
    try:
        found = {
            name: HostAndDevice(**{part: Timing(*ms) for part, ms in both.items()})
            for name, both in entry.items()
        }
        sane = all(math.isfinite(t.host_ms + t.device_ms) for t in _times(found).values())
        problem = None if found and sane and set(found) <= set(BACKENDS) else f"it is {entry!r:.80}"
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        problem = f"{type(error).__name__}: {error}"
    if problem is None:
        return found
    warnings.warn(
        f"flexvarlen: a measurement in {path} is not valid ({problem}), so it is not used; measure "
        "again, or delete the file.",
        stacklevel=2,
    )
    return {}


def _times(timings: Mapping[str, HostAndDevice]) -> dict[str, Times]:
    return {name: Times(t.device.ms_p50, t.host.ms_p50) for name, t in timings.items()}


# ---- checks ----

_UNCHECKED = ("sdpa", "reference")
"""torch's attention, called once per document, and the reference that kernels are compared with."""

_COMPILED = ("flex", "flex_fa4")
"""Backends that Dynamo compiles for each size; they are checked on the call's documents."""


def known_failure(name: str, call: AttentionCall) -> str | None:
    """Why this process has found a kernel to fail or to be wrong, or None."""
    return _failed.get(cache_keys.check_key(name, call))


def check_named(name: str, call: AttentionCall, mask: DocumentMask | None) -> bool:
    """Check a backend that the user named, if it must be; return whether the answer is final.

    Raises:
        NotImplementedError: its results are wrong, or a kernel of the Hub cannot be checked now.
    """
    if not must_be_checked(name, call.device):
        return True
    kind, origin = call.kind(), hub.origin(name)
    checked, what = _check_once(name, kind, mask), f"{name} of {origin}" if origin else name
    if (reason := known_failure(name, kind)) is not None:
        raise NotImplementedError(
            f"{what} fails the check against the reference on this machine, for "
            f"{cache_keys.describe(call)}: {reason}; use another backend, such as 'flex'."
        )
    if checked or origin is None:
        return checked
    now = why_nothing_runs(call.device) or "there is not enough memory"
    raise NotImplementedError(
        f"{what} must be checked against the reference before its first use, but {now}; run one "
        "forward with gradients first, outside of backwards and CUDA graphs."
    )


def _check_once(name: str, call: AttentionCall, mask: DocumentMask | None) -> bool:
    """Whether a kernel is known to be right; compares it with the reference if it can be run."""
    unchecked = call.device.type not in CANDIDATES or name in _UNCHECKED
    if unchecked and not must_be_checked(name, call.device):
        return True
    key = cache_keys.check_key(name, call)
    if key in _right:
        return True
    if key in _failed:
        return False
    if key in read_entries(cache_path()):
        _right.add(key)
        return True
    if why_nothing_runs(call.device) is not None:
        return False
    own = None
    if name in _COMPILED:
        if mask is None or type(mask.layout.cu_seqlens) is not Tensor:
            return False
        if not (mask.layout.total_tokens and mask.layout_k.total_tokens):
            return False
        own = mask
    try:
        reason = failure(lambda: compare_with_reference(name, call, own))
    except CannotCheckError:
        return False
    if reason is not None:
        _failed[key] = reason
        return False
    _right.add(key)
    write_entries(cache_path(), {key: {}})
    return True


def _warn_of_failure(name: str, call: AttentionCall, reason: str) -> None:
    warnings.warn(
        f"flexvarlen: {name} failed when auto tried it ({reason}), so auto skips it for "
        f"{cache_keys.describe(call)}; select it by name to see the error.",
        stacklevel=2,
    )
