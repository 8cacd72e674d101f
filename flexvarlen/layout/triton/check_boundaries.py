"""Check boundaries on the device and copy them into a layout's slots: one launch, no host sync."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from flexvarlen.layout.triton.launcher import Launcher

SLOTS = 1024


@triton.jit(do_not_specialize=["given", "slots", "total_tokens", "max_seqlen_bound"])
def _check_boundaries(
    cu_seqlens, out, given, slots, total_tokens, max_seqlen_bound, SLOTS: tl.constexpr
):
    last = tl.load(cu_seqlens + given)
    for begin in range(0, slots + 1, SLOTS):
        slot = begin + tl.arange(0, SLOTS)
        boundary = tl.load(cu_seqlens + slot, mask=slot <= given, other=0)
        boundary = tl.where(slot <= given, boundary, last)
        before = tl.load(cu_seqlens + slot - 1, mask=(slot > 0) & (slot <= given), other=0)
        before = tl.where(slot <= given, before, last)
        in_order = (boundary >= before) & ((slot > 0) | (boundary == 0))
        tl.device_assert(
            in_order & (boundary <= total_tokens),
            "flexvarlen: cu_seqlens must start at 0, never decrease, and end in the row",
        )
        tl.device_assert(
            boundary - before <= max_seqlen_bound,
            "flexvarlen: a document is longer than max_seqlen_bound",
        )
        tl.store(out + slot, boundary, mask=slot <= slots)


_launch = Launcher(_check_boundaries, {"SLOTS": SLOTS})


def check_boundaries(
    cu_seqlens: Tensor, capacity: int, total_tokens: int, max_seqlen_bound: int
) -> Tensor:
    """A copy of `cu_seqlens` with its last value in the spare slots.

    Args:
        cu_seqlens: int32 `[N + 1]` on a CUDA device.
        capacity: slots of the copy, at least N.
        total_tokens: tokens of the row.
        max_seqlen_bound: the longest document allowed, in tokens.

    Returns:
        int32 `[capacity + 1]`. An invalid boundary fails a device-side assertion, after which the
        process cannot use the GPU; no kernel reads the boundary.
    """
    out = cu_seqlens.new_empty(capacity + 1)
    sizes = (cu_seqlens.shape[0] - 1, capacity, total_tokens, max_seqlen_bound)
    _launch(1, (cu_seqlens.contiguous(),), (out,), sizes)
    return out
