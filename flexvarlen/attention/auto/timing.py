"""Time candidate kernels against each other, on random tensors with the user's documents."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch

from flexvarlen.attention.auto.candidate_call import CandidateCall, RandomTensors, in_own_thread
from flexvarlen.attention.auto.check_results import Expected, WrongResultError
from flexvarlen.attention.auto.decoder_layer import NO_LAYER, Layer, time_layer
from flexvarlen.attention.call import AttentionCall
from flexvarlen.mask.document_mask import DocumentMask
from flexvarlen.measure import HostAndDevice, time_host_and_device
from flexvarlen.measure.timing import BUSY_MS, wall_seconds

BUDGET_S = 1.5
"""Approximate total time of the timed calls; loading and compiling candidates is extra."""

_HEATS = ((1, math.inf), (3, 1.5), (5, 1.06))
"""For each heat, the minimum number of rounds, and how many times slower than the fastest of the
previous heat a candidate may be and still take part. Each heat gets a third of the budget."""

_MOST_ROUNDS = 100

Failure = str

OUT_OF_MEMORY: Failure = "out of memory"


class Race(NamedTuple):
    """The result of timing the candidates.

    Attributes:
        timings: times of each candidate that ran, from its last heat.
        finalists: the candidates of the last heat, which were timed together.
        failed: why each of the other candidates failed.
        layer: time of the rest of a decoder layer, or None if it could not be measured.
    """

    timings: dict[str, HostAndDevice]
    finalists: tuple[str, ...]
    failed: dict[str, Failure]
    layer: Layer | None


def time_candidates(call: AttentionCall, mask: DocumentMask, names: Sequence[str]) -> Race:
    """Time each candidate after compilation: forward, and backward if the call needs it.

    Args:
        call: the kind of call.
        mask: the documents; q, k and v are random.
        names: the candidates, which must support the call.

    Returns:
        The times of the candidates that ran, interleaved, and why each of the others failed.

    A candidate fails if its results differ from the reference (see `check_results.py`). Runs in a
    separate thread (see `in_own_thread`). Syncs.
    """
    try:
        return in_own_thread(call, lambda: _time(call, mask, names))
    except torch.OutOfMemoryError as error:  # raised by the random tensors or by the reference
        return Race({}, (), dict.fromkeys(names, _reason(error)), None)


def _time(call: AttentionCall, mask: DocumentMask, names: Sequence[str]) -> Race:
    failed: dict[str, Failure] = {}

    def guarded(name: str, call: Callable[[], object]) -> Callable[[], object]:
        def run() -> None:
            if name in failed:
                return
            try:
                call()
            # A third-party kernel may raise anything: report it, and still time the others.
            except Exception as error:
                failed[name] = _reason(error)

        return run

    layer: Layer | None = None
    try:
        layer = time_layer(call, mask.layout.total_tokens)
    except RuntimeError as error:  # out of memory, or from cuBLAS: not caused by the candidates
        warnings.warn(
            f"flexvarlen: auto could not time a decoder layer beside the kernels "
            f"({_reason(error)}), so it takes the kernel that is fastest by itself; free some of "
            "the GPU's memory before the first such call.",
            stacklevel=2,
        )
    tensors = RandomTensors.of(call, mask)
    candidates = {name: CandidateCall(name, call, mask, tensors) for name in names}
    expected = Expected.of(call, mask, tensors)
    for name, candidate in candidates.items():  # loads, compiles, tunes
        guarded(name, partial(expected.check, candidate))()
    del expected
    calls = {name: guarded(name, candidate) for name, candidate in candidates.items()}
    for run in calls.values():
        run()
    timings: dict[str, HostAndDevice] = {}
    around = layer or NO_LAYER
    alive = list(calls)
    for least, slack in _HEATS:
        ran = {name: timings[name] for name in alive if name in timings and name not in failed}
        alive = [
            name for name in alive if name not in failed and _is_near(name, ran, slack, around)
        ]
        if not alive or (len(alive) < 2 and ran):
            break
        round_s = sum(
            ran[name].eager_ms / 1e3 if name in ran else wall_seconds(calls[name], call.device)
            for name in alive
        )
        round_s += len(alive) * BUSY_MS / 1e3 if call.device.type == "cuda" else 1e-6
        rounds = max(least, min(_MOST_ROUNDS, int(BUDGET_S / len(_HEATS) / round_s)))
        timings |= time_host_and_device(
            {name: calls[name] for name in alive}, device=call.device, warmup=0, repeats=rounds
        )
    return Race(
        {name: timings[name] for name in timings if name not in failed},
        tuple(name for name in alive if name not in failed),
        failed,
        layer,
    )


def _is_near(name: str, timings: Mapping[str, HostAndDevice], slack: float, layer: Layer) -> bool:
    """Return whether a candidate may still be the fastest, eagerly or in a compiled graph."""
    if not timings:
        return True
    mine = timings[name]
    return layer.added_by(mine) <= slack * min(
        layer.added_by(t) for t in timings.values()
    ) or mine.compiled_ms <= slack * min(t.compiled_ms for t in timings.values())


def _reason(error: Exception) -> Failure:
    """Return the first line of an error message, as compiler errors can be very long."""
    if isinstance(error, torch.OutOfMemoryError):
        return OUT_OF_MEMORY
    if isinstance(error, WrongResultError):
        return str(error)
    line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {line[:300]}" if line else type(error).__name__
