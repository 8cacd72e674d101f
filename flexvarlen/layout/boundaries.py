"""Validation of boundaries: ValueError on the host, a device assertion in a compiled graph.

Shapes: T = total_tokens; B rows of S tokens, one after another, are T = B·S.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from flexvarlen.layout.arguments import INT32_MAX, checked_sizes

HAS_TRITON = find_spec("triton") is not None
"""Whether the Triton kernels can run: torch for CUDA brings it, torch for the CPU does not."""


def is_traced() -> bool:
    """Whether this call is traced by torch.compile, or runs under a dispatch mode."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def is_compiled(module: nn.Module) -> bool:
    """Whether a call of this module, or its forward, runs a compiled graph of its own."""
    return (
        "_orig_mod" in module._modules
        or module._compiled_call_impl is not None
        or hasattr(module.forward, "_torchdynamo_orig_callable")
    )


def round_up_to_power_of_two(n: int) -> int:
    """The smallest power of two that is at least `n` (and at least 1).

    For a dynamic size in a compiled graph it is a constant, with one graph per power of two.
    """
    if not torch.compiler.is_compiling():
        return 1 << max(n - 1, 0).bit_length()
    power = 1
    while power < n:  # bit_length() would specialize n
        power *= 2
    return power


class Condition(NamedTuple):
    """What must hold of values on a device, read together with other values.

    Attributes:
        holds: bool 0-dim.
        sentence: what to raise where it does not.
    """

    holds: Tensor
    sentence: str


def raise_or_assert(holds: Tensor, message: str) -> None:
    """Raise ValueError in eager mode; assert on the device inside a compiled graph."""
    if torch.compiler.is_compiling():
        torch._assert_async(holds, f"flexvarlen: {message}")
    elif not bool(holds):
        raise ValueError(message)


def host_int32(values: list[int], device: torch.device) -> Tensor:
    """Make an int32 host tensor, pinned if `device` is a GPU so that the copy need not sync."""
    pin = device.type == "cuda" and not torch.compiler.is_compiling()
    return torch.tensor(values, dtype=torch.int32, device="cpu", pin_memory=pin)


@dataclass(frozen=True)
class BoundarySizes:
    """The sizes of validated boundaries, named as in `PackedLayout`."""

    total_tokens: int
    num_docs: int
    capacity: int
    max_seqlen: int
    max_seqlen_bound: int


def check_boundaries(
    boundaries: list[int],
    total_tokens: int | None,
    capacity: int | None,
    max_seqlen_bound: int | None,
) -> BoundarySizes:
    """Check boundaries known on the host; arguments as in `PackedLayout.from_lengths`.

    Raises:
        ValueError: they do not start at 0, decrease, end past the row, or do not fit the sizes.
    """
    total_tokens, capacity, max_seqlen_bound = checked_sizes(
        total_tokens, capacity, max_seqlen_bound
    )
    total = boundaries[-1] if total_tokens is None else total_tokens
    if boundaries[0] != 0:
        raise ValueError(
            f"cu_seqlens must start at 0, got {boundaries[0]}; put a 0 before the first boundary."
        )
    lengths = [end - start for start, end in pairwise(boundaries)]
    for i, length in enumerate(lengths):
        if length < 0:
            raise ValueError(
                f"cu_seqlens must never decrease, got {boundaries[i]} then {boundaries[i + 1]} "
                f"at index {i + 1}; pass cumulative lengths in order."
            )
    if boundaries[-1] > total:
        raise ValueError(
            f"cu_seqlens must end at or before total_tokens={total}, got {boundaries[-1]}; "
            "shorten the documents or pass the row's real number of tokens."
        )
    longest = max(lengths) if lengths else 0  # max(..., default=0) does not trace
    return check_fit(len(lengths), longest, total, capacity, max_seqlen_bound)


def check_fit(
    num_docs: int,
    longest: int,
    total: int,
    capacity: int | None,
    max_seqlen_bound: int | None,
) -> BoundarySizes:
    """Check that documents fit the sizes, and return the sizes with the defaults filled in.

    Raises:
        ValueError: they do not fit the sizes.
    """
    _, capacity, max_seqlen_bound = checked_sizes(total, capacity, max_seqlen_bound)
    slots = round_up_to_power_of_two(num_docs) if capacity is None else capacity
    if slots < max(num_docs, 1):
        raise ValueError(
            f"capacity must be at least the {num_docs} documents given, got {slots}; raise "
            "capacity."
        )
    bound = (
        min(round_up_to_power_of_two(longest), max(total, 1))
        if max_seqlen_bound is None
        else max_seqlen_bound
    )
    if bound < max(longest, 1):
        raise ValueError(
            f"max_seqlen_bound must be at least the longest document, {longest} tokens, got "
            f"{bound}; raise the bound (kernels would skip the tokens past it)."
        )
    return BoundarySizes(total, num_docs, slots, longest, bound)


def safe_boundaries(
    cu_seqlens: Tensor, total_tokens: int, capacity: int | None, max_seqlen_bound: int
) -> Tensor:
    """Boundaries inside a compiled graph, made memory-safe.

    The device asserts that they start at 0, never decrease, end in the row, and that no document is
    longer than `max_seqlen_bound`. They are clamped too, as kernels may run before the assertion.
    No sync; traces under `fullgraph=True`.

    Returns:
        int32 `[capacity + 1]`.

    Raises:
        ValueError: fewer slots than `cu_seqlens` has.
    """
    given = cu_seqlens.shape[0] - 1
    slots = given if capacity is None else capacity
    if given > slots:
        raise ValueError(
            f"capacity must be at least the {given} slots of cu_seqlens, got {slots}; raise "
            "capacity."
        )
    safe = cu_seqlens.clamp(0, total_tokens)
    safe = torch.cat([torch.zeros_like(safe[:1]), safe[1:]]).cummax(0).values.to(torch.int32)
    torch._assert_async(
        (safe == cu_seqlens).all(),
        "flexvarlen: cu_seqlens must start at 0, never decrease, and end at or before the "
        "row's last token.",
    )
    torch._assert_async(
        safe.diff().max() <= max_seqlen_bound,
        "flexvarlen: a document is longer than max_seqlen_bound; pass a larger max_seqlen_bound=.",
    )
    if slots > given:
        safe = torch.cat([safe, safe[-1:].expand(slots - given)])
    return safe


def traced_boundaries(starts_T: Tensor, slots: int) -> Tensor:
    """Boundaries int32 `[slots + 1]` from flags bool `[T]`, inside a compiled graph. No sync."""
    total = starts_T.shape[0]
    torch._assert_async(
        starts_T.sum() <= slots,
        "flexvarlen: more documents in the row than capacity; pass a larger capacity=.",
    )
    # fill_value=T would specialize a dynamic T.
    first = torch.nonzero_static(starts_T, size=slots, fill_value=INT32_MAX)[:, 0]
    first = first.clamp(max=total)
    return torch.cat([first, first.new_full((1,), total)]).to(torch.int32)


def slots_of(boundaries: Tensor, indices: Tensor) -> Tensor:
    """int32: for each index the slot whose boundaries hold it, N behind the last. No sync; traces.

    Args:
        boundaries: int32 `[N + 1]`, from 0.
        indices: int32, at least 0.
    """
    # Not among boundaries[1:]: torch 2.11's Inductor on CUDA reads such a view from its base.
    return torch.searchsorted(boundaries, indices, right=True, out_int32=True) - 1


def default_capacity(total_tokens: int) -> int:
    """Default number of document slots where boundaries are known only inside a compiled graph.

    One per 128 tokens, at least 64, at most T. Not T itself: slots are not free (FA2's backward
    allocates 128 fp32 rows per slot and head).
    """
    if total_tokens <= 64 * 128:  # one graph for all these sizes, not one per power of two
        return min(total_tokens, 64)
    return round_up_to_power_of_two(total_tokens // 128)


def document_starts(
    batch: int,
    row_tokens: int,
    device: torch.device,
    *,
    position_ids_BT: Tensor | None = None,
    attention_mask_BT: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """bool `[B·S]`: True where a document, or a run of padding, begins. No sync; traces.

    Positions are int64; a mask is int64 or bool.

    A document begins at each row's start, where `position_ids` do not increase by 1 (unless
    `cu_seqlens` is given, which wins over positions), and where a 2D mask (padding, or document
    ids) changes its value. The positions of padding tokens (mask 0) are ignored, so that a
    run of padding stays one run.
    """
    starts = torch.zeros(batch, row_tokens, dtype=torch.bool, device=device)
    starts[:, 0] = True
    if cu_seqlens is not None:
        at = torch.zeros(batch * row_tokens + 1, dtype=torch.bool, device=device)
        at = at.index_fill(0, cu_seqlens.clamp(0, batch * row_tokens).long(), True)
        starts = starts | at[:-1].view(batch, row_tokens)
    elif position_ids_BT is not None:
        jumps = position_ids_BT.diff(dim=-1) != 1
        starts = starts | pad(jumps, (1, 0)).expand(batch, row_tokens)
    if attention_mask_BT is not None:
        ids = attention_mask_BT
        changes = pad(ids[:, 1:] != ids[:, :-1], (1, 0))
        inside_padding = (ids == 0) & pad(ids[:, :-1] == 0, (1, 0), value=False)
        starts = (starts & ~inside_padding) | changes
    return starts.reshape(-1)
