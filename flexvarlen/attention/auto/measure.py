"""Time the kernels that can serve a kind of call, on random tensors with the user's documents."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from flexvarlen.attention.auto.candidate_call import CandidateCall, RandomTensors, in_own_thread
from flexvarlen.attention.auto.check_results import CannotCheckError, Expected, failure
from flexvarlen.attention.call import AttentionCall
from flexvarlen.mask.document_mask import DocumentMask
from flexvarlen.measure import HostAndDevice, time_host_and_device
from flexvarlen.measure.timing import BUSY_MS, wall_seconds

BUDGET_S = 3.0
"""Approximate time of the timed calls; loading and compiling kernels is extra."""

_ROUNDS = (5, 50)


def time_kernels(
    call: AttentionCall, mask: DocumentMask, names: Sequence[str]
) -> tuple[dict[str, HostAndDevice], dict[str, str]]:
    """Time each kernel in turns: forward, and backward if the call needs it.

    Args:
        call: the kind of call.
        mask: the documents; q, k and v are random.
        names: names of kernels that can serve the call.

    Returns:
        The times of the kernels that ran correctly, and why each other kernel failed.

    Raises:
        torch.OutOfMemoryError: there is no memory for the tensors.

    A kernel fails if it raises, or if its results differ from the reference. Runs in a separate
    thread (see `in_own_thread`). Syncs.
    """
    return in_own_thread(call.device, lambda: _time(call, mask, names), needs_grad=call.needs_grad)


def _time(
    call: AttentionCall, mask: DocumentMask, names: Sequence[str]
) -> tuple[dict[str, HostAndDevice], dict[str, str]]:
    tensors = RandomTensors.of(call, mask)
    expected = Expected.of(call, mask, tensors)
    calls, failed = {}, {}
    round_s = 0.0
    for name in names:
        candidate = CandidateCall(name, call, mask, tensors)
        try:
            reason = failure(partial(expected.check, candidate))  # loads, compiles, tunes
        except CannotCheckError:  # not enough memory: not timed, but not rejected either
            continue
        if reason is not None:
            failed[name] = reason
            continue
        calls[name] = candidate
        candidate()
        round_s += wall_seconds(candidate, call.device)
    del expected
    if not calls:
        return {}, failed
    round_s += len(calls) * BUSY_MS / 1e3 if call.device.type == "cuda" else 1e-6
    fewest, most = _ROUNDS
    rounds = max(fewest, min(most, int(BUDGET_S / round_s)))
    timings = time_host_and_device(calls, device=call.device, repeats=rounds)
    return timings, failed
