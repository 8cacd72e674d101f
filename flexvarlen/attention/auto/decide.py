"""`backend="auto"`: choose the fastest kernel for the user's shapes; measured once, then cached.

The first eager call of each kind on a GPU times every backend that supports it, on random tensors
with the documents of the call. The choice is cached in the process and in a file. Inside a compiled
graph, or wherever nothing can be timed, a call uses a cached choice if there is one, and
otherwise the static `AUTO_ORDER` of the registry. `flexvarlen.explain` measures in advance.

Before a backend is chosen, its results are compared with the reference. A backend with wrong
results is skipped with a warning. Two cases are not checked: flex in the static order, because it
cannot be compiled while a graph is traced, and first calls in a backward or a CUDA graph capture.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flexvarlen.attention.auto import keys, ranks
from flexvarlen.attention.auto.cache_file import Entry, cache_path, read_entries, write_entry
from flexvarlen.attention.auto.check_results import why_wrong
from flexvarlen.attention.auto.decoder_layer import NO_LAYER, Layer
from flexvarlen.attention.auto.timing import OUT_OF_MEMORY, Race, time_candidates
from flexvarlen.attention.backends.registry import BACKENDS, first_usable, refusal
from flexvarlen.attention.call import AttentionCall
from flexvarlen.env import AUTO, auto_is_static, torch_state
from flexvarlen.mask.document_mask import DocumentMask
from flexvarlen.measure import HostAndDevice, Timing

CANDIDATES: dict[str, tuple[str, ...]] = {
    "cuda": ("fa3", "fa4", "flex_fa4", "fa2", "flex", "varlen", "cudnn")
}
"""Backends to time, by device type, except those slow by design. On other devices none is timed."""


@dataclass(frozen=True)
class Decision:
    """The choice of "auto" for a kind of call.

    Attributes:
        backend: the backend for eager calls.
        compiled: the backend inside compiled graphs, where host time does not matter.
        why: how it was chosen: "measured", "from the cache file ...", "static order, ...".
        timings: the times of the candidates that ran, if any were timed.
        failed: why each of the other candidates that were tried failed.
        layer: the time of the rest of a decoder layer, assumed for eager calls, if it was timed.
        lasting: whether later calls of this kind may reuse the decision.
    """

    backend: str
    compiled: str
    why: str
    timings: Mapping[str, HostAndDevice] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)
    layer: Layer | None = None
    lasting: bool = True


class _State:
    """Cached results, valid while the current process group exists."""

    def __init__(self, group: Any) -> None:
        self.run = ranks.RankGroup(group)
        self.wrong: dict[object, str | None] = {}


_state = _State(None)


def reset() -> None:
    """Clear the cached results of this process, but not the cache file."""
    global _state
    _state = _State(ranks.world())


def reset_if_new_run() -> bool:
    """Clear the cached results if the process group has changed, and return whether it has."""
    if _state.run.is_of(ranks.world()):
        return False
    reset()
    return True


def candidates(call: AttentionCall) -> tuple[str, ...]:
    """Return the backends to time for such calls: those in `CANDIDATES` that support them."""
    names = CANDIDATES.get(call.device.type, ())
    return tuple(n for n in names if n in BACKENDS and refusal(n, call) is None)


def decide(
    call: AttentionCall, bucket: keys.Bucket, mask: DocumentMask | str, read_only: bool = False
) -> Decision:
    """Choose a backend for a kind of call, and say why; the caller caches the decision.

    Args:
        call: the kind of call.
        bucket: of its sizes.
        mask: the documents to time candidates on, or the reason why nothing can be timed.
        read_only: whether to neither publish a decision for other ranks nor wait for one.

    Raises:
        NotImplementedError: no backend can serve the call.
    """
    names = candidates(call)
    obstacle = None
    if call.device.type not in CANDIDATES:
        obstacle = f"nothing is timed on {call.device.type}"
    elif not names:
        obstacle = "none of the timed kernels supports the call"
    elif auto_is_static():
        obstacle = f"{AUTO}=static"
    if obstacle is not None:
        return static_decision(call, bucket, obstacle, lasting=True)
    if not _state.run.several:
        return _decide_locally(call, names, bucket, mask)
    return _decide_with_ranks(call, names, bucket, mask, read_only)


def _decide_with_ranks(
    call: AttentionCall,
    names: tuple[str, ...],
    bucket: keys.Bucket,
    mask: DocumentMask | str,
    read_only: bool,
) -> Decision:
    """Decide on rank 0 for all ranks; on the others, use its decision."""
    run, kind = _state.run, keys.kind_key(call, bucket)
    if read_only:
        seen = run.given(kind)
        if seen is not None and _why_not_both(seen, call, names) is None:
            return _published(seen, "decided earlier in this run")
        return _decide_locally(call, names, bucket, mask)
    if not run.decides:
        return _given_by_rank_0(call, names, bucket, kind)
    own: list[Decision] = []

    def decide_here() -> str:
        own.append(_decide_locally(call, names, bucket, mask))
        return f"{own[0].backend} {own[0].compiled}"

    published = run.publish(kind, decide_here)
    if own:  # one decision for the whole run
        why = own[0].why if own[0].lasting else f"{own[0].why}; all ranks keep to it in this run"
        return replace(own[0], why=why, lasting=True)
    return _published(published, "decided earlier in this run")


def _given_by_rank_0(
    call: AttentionCall, names: tuple[str, ...], bucket: keys.Bucket, kind: str
) -> Decision:
    """Return rank 0's decision, or the static order if there is none or it cannot be used here."""
    given = _state.run.ask(kind)
    problem = None if given is None else _why_not_both(given, call, names)
    if given is not None and problem is None:
        return _published(given, "decided by rank 0")
    if problem is not None:
        warnings.warn(
            f"flexvarlen: rank 0's choice does not support the call on this rank ({problem}); "
            "install the same kernels on all ranks.",
            stacklevel=2,
        )
    because = "rank 0's choice is not known or not usable"
    return static_decision(call, bucket, because, lasting=True)


def _published(names: str, why: str) -> Decision:
    """Parse the decision that rank 0 published, for eager and for compiled calls."""
    eager, compiled = names.split()
    return Decision(eager, compiled, why)


def _why_not_both(published: str, call: AttentionCall, candidates: tuple[str, ...]) -> str | None:
    """Return why this rank cannot use the decision that rank 0 published, or None."""
    for name in dict.fromkeys(published.split()):
        if name not in candidates and (reason := refusal(name, call)) is not None:
            return f"{name}: {reason}"
    return None


def _decide_locally(
    call: AttentionCall,
    names: tuple[str, ...],
    bucket: keys.Bucket,
    mask: DocumentMask | str,
) -> Decision:
    """Decide in this process, without asking other ranks."""
    path = cache_path()
    key = keys.answer_key(call, names, bucket)
    entries = read_entries(path)
    kept = _from_entry(entries[key], names, path) if key in entries else None
    if kept is not None:
        return kept
    if isinstance(mask, str):
        return static_decision(call, bucket, mask)
    race = time_candidates(call, mask, names)
    for name, reason in race.failed.items():
        _warn_of_failure(name, reason, call)
    if not race.finalists:
        still = static_decision(call, bucket, "every candidate failed when timed", race.failed)
        return replace(still, lasting=True)
    # Not saved after an OOM: the next process may have enough memory.
    if OUT_OF_MEMORY not in race.failed.values() and race.layer is not None:
        write_entry(path, key, _as_entry(race, race.layer))
    return Decision(*_fastest(race), "measured", race.timings, race.failed, race.layer)


_TIE = 1.02  # within this factor of the fastest eager time, which is noisy, device time decides


def _fastest(race: Race) -> tuple[str, str]:
    """Return the fastest backend in eager mode and the fastest in a compiled graph."""
    compiled = {name: race.timings[name].compiled_ms for name in race.finalists}
    around = race.layer or NO_LAYER
    eager = {name: around.added_by(race.timings[name]) for name in race.finalists}
    least = min(eager.values())
    near = [name for name in eager if eager[name] <= _TIE * least]
    return min(near, key=compiled.__getitem__), min(compiled, key=compiled.__getitem__)


def _warn_of_failure(name: str, reason: str, call: AttentionCall) -> None:
    warnings.warn(
        f"flexvarlen: {name} failed when auto tried it ({reason}), so auto skips it for "
        f"{keys.describe(call)}; select it by name to see the error.",
        stacklevel=2,
    )


def static_decision(
    call: AttentionCall,
    bucket: keys.Bucket | None,
    because: str,
    failed: Mapping[str, str] | None = None,
    *,
    lasting: bool = False,
) -> Decision:
    """Return the first backend of the static order whose results are correct.

    Args:
        call: the kind of call.
        bucket: of its sizes.
        because: why nothing was timed.
        failed: backends that are known to fail, with the reason.
        lasting: as in `Decision`.
    """
    why = f"static order, because {because}"
    # Only FlashAttention's backward is affected: its forward is scheduled on the device.
    wasteful = call.needs_grad and bucket is not None and keys.is_wasteful(bucket)
    found = dict(failed or {})
    while True:
        wrong = {name: reason for name, reason in found.items() if reason != OUT_OF_MEMORY}
        chosen = first_usable(call, wasteful=wasteful, failed=wrong)
        reason = _why_wrong(chosen, call)
        if reason is None:
            return Decision(chosen, chosen, why, failed=found, lasting=lasting)
        found[chosen] = reason


_UNCOMPARED = ("flex", "flex_fa4", "sdpa")
"""Backends not checked in the static order: those that Dynamo compiles, which is impossible
while it traces, and torch's SDPA, called once per document."""


def _why_wrong(name: str, call: AttentionCall) -> str | None:
    """Return why a backend of the static order gives wrong results, or None; checked only once."""
    if call.device.type not in CANDIDATES or name in _UNCOMPARED:
        return None
    key = (name, call, torch_state())
    if key not in _state.wrong:
        if _why_nothing_runs(call.device) is not None:
            return None
        try:
            reason = _state.wrong[key] = why_wrong(name, call)
        except torch.OutOfMemoryError:  # the call itself will raise it
            return None
        if reason is not None:
            _warn_of_failure(name, reason, call)
    return _state.wrong[key]


def why_not_now(mask: DocumentMask) -> str | None:
    """Return why nothing can be timed at this point, or None."""
    if type(mask.layout.cu_seqlens) is not Tensor:
        return "the layout's tensors hold no data"
    return _why_nothing_runs(mask.layout.device)


def _why_nothing_runs(device: torch.device) -> str | None:
    """Return why no kernel can be run at this point of the caller's program, or None."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return "a CUDA graph is being captured"
    if torch._C._current_graph_task_id() != -1:  # torch.utils.checkpoint tests it in the same way
        return "the call is inside a backward"
    return None


# ---- entries of the cache file ----


def _as_entry(race: Race, layer: Layer) -> Entry:
    ms = {
        name: {part: astuple(timing) for part, timing in vars(both).items()}
        for name, both in race.timings.items()
    }
    failed = dict(race.failed)
    return {
        "ms_p20_p50_p80_repeats": ms,
        "finalists": list(race.finalists),
        "failed": failed,
        "layer_ms": list(layer),
    }


def _from_entry(entry: Entry, names: tuple[str, ...], path: Path) -> Decision | None:
    """Return the decision stored in an entry; None, with a warning, if the entry is not valid."""
    try:
        timings = {
            name: HostAndDevice(**{part: Timing(*ms) for part, ms in both.items()})
            for name, both in entry["ms_p20_p50_p80_repeats"].items()
        }
        layer = Layer(*entry["layer_ms"])
        if not all(map(math.isfinite, layer)):
            raise ValueError(f"layer_ms is {layer}")
        race = Race(timings, tuple(entry["finalists"]), dict(entry["failed"]), layer)
        fastest = _fastest(race)
        problem = None if set(timings) <= set(names) else f"it names {', '.join(timings)}"
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        problem = f"{type(error).__name__}: {error}"
    if problem is not None:
        warnings.warn(
            f"flexvarlen: an entry of {path} is not valid ({problem}); kernels are measured again. "
            "Delete the file if this happens again.",
            stacklevel=2,
        )
        return None
    return Decision(*fastest, f"from the cache file {path}", race.timings, race.failed, race.layer)
