"""The fields of a `PackedLayout`, made of lengths, trees, rows, boundaries or flags.

Each function has the arguments of the classmethod of its name, which documents them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NotRequired, TypedDict

import torch
from torch import Tensor
from torch.nn.functional import pad

from flexvarlen.layout.arguments import (
    INT32_MAX,
    checked_sizes,
    integers,
    is_integer_tensor,
    require_device,
    require_int_at_least,
    require_tensor,
)
from flexvarlen.layout.boundaries import (
    Condition,
    check_boundaries,
    check_fit,
    default_capacity,
    document_starts,
    host_int32,
    round_up_to_power_of_two,
    safe_boundaries,
    traced_boundaries,
)
from flexvarlen.layout.segments import Segments


class LayoutFields(TypedDict):
    """Arguments of the constructor of `PackedLayout`."""

    cu_seqlens: Tensor
    cu_seqlens_host: Tensor | None
    total_tokens: int
    max_seqlen_bound: int
    num_docs: int | None
    max_seqlen: int | None
    padding: NotRequired[Tensor | None]
    has_padding: NotRequired[bool | None]
    segments: NotRequired[Segments | None]


def from_lengths(
    lengths: Sequence[int] | Tensor,
    *,
    total_tokens: int | None = None,
    device: torch.device | str = "cpu",
    capacity: int | None = None,
    max_seqlen_bound: int | None = None,
) -> LayoutFields:
    """Fields of consecutive documents."""
    values = integers("lengths", lengths)
    for i, length in enumerate(values):
        if length < 0:
            raise ValueError(
                f"lengths must be at least 0, got {length} at index {i}; drop or fix that document."
            )
    boundaries = [0, *accumulate(values)]
    total_tokens, *_ = checked_sizes(total_tokens, capacity, max_seqlen_bound)
    if total_tokens is not None and total_tokens < boundaries[-1]:
        raise ValueError(
            f"total_tokens must be at least the tokens of all documents, {boundaries[-1]}, got "
            f"{total_tokens}; shorten the documents, or raise total_tokens."
        )
    return _from_host(boundaries, total_tokens, require_device(device), capacity, max_seqlen_bound)


def from_tree(
    lengths: Sequence[int] | Tensor,
    parents: Sequence[int] | Tensor,
    *,
    total_tokens: int | None = None,
    device: torch.device | str = "cpu",
    capacity: int | None = None,
    max_seqlen_bound: int | None = None,
    max_depth: int | None = None,
) -> LayoutFields:
    """Fields of a tree: each segment continues the segments above it."""
    on = require_device(device)
    sizes = integers("lengths", lengths)
    total_tokens, capacity, max_seqlen_bound = checked_sizes(
        total_tokens, capacity, max_seqlen_bound
    )
    slots = round_up_to_power_of_two(len(sizes)) if capacity is None else capacity
    if slots < max(len(sizes), 1):
        raise ValueError(
            f"capacity must be at least the {len(sizes)} segments given, got {slots}; raise "
            "capacity."
        )
    segments = Segments.of(sizes, parents, slots, max_depth, on)
    trees = segments.tree_lengths()
    for name, given, least, what in (
        ("total_tokens", total_tokens, sum(trees), "the tokens of all segments"),
        ("max_seqlen_bound", max_seqlen_bound, max(trees, default=0), "those of any tree"),
    ):
        if given is not None and given < least:
            raise ValueError(f"{name} must be at least {what}, {least}, got {given}; raise {name}.")
    fields = from_lengths(
        trees,
        total_tokens=total_tokens,
        device=on,
        capacity=slots,
        max_seqlen_bound=max_seqlen_bound,
    )
    if segments.max_depth > 1:
        fields["segments"] = segments
    return fields


def from_rows(
    batch: int,
    row_tokens: int,
    *,
    device: torch.device,
    capacity: int | None = None,
    max_seqlen_bound: int | None = None,
) -> LayoutFields:
    """Fields of rows of equal length, a document each."""
    if not torch.compiler.is_compiling():
        rows = require_int_at_least("batch", batch, 0)
        lengths = [require_int_at_least("row_tokens", row_tokens, 0)] * rows
        return from_lengths(
            lengths, device=device, capacity=capacity, max_seqlen_bound=max_seqlen_bound
        )
    total = batch * row_tokens
    slots = max(batch, 1) if capacity is None else capacity
    bound = max(row_tokens, 1) if max_seqlen_bound is None else max_seqlen_bound
    checked = check_fit(batch, row_tokens, total, slots, bound)

    def boundaries(device: torch.device) -> Tensor:
        ends = torch.arange(slots + 1, dtype=torch.int32, device=device)
        return ends.clamp(max=batch) * row_tokens

    host = boundaries(torch.device("cpu"))
    return {
        "cu_seqlens": host if device.type == "cpu" else boundaries(device),
        "cu_seqlens_host": host,
        "total_tokens": checked.total_tokens,
        "max_seqlen_bound": checked.max_seqlen_bound,
        "num_docs": checked.num_docs,
        "max_seqlen": checked.max_seqlen,
        "has_padding": False,
    }


def from_cu_seqlens(
    cu_seqlens: Tensor | Sequence[int],
    *,
    total_tokens: int | None = None,
    capacity: int | None = None,
    max_seqlen_bound: int | None = None,
) -> LayoutFields:
    """Fields of cumulative lengths."""
    if not isinstance(cu_seqlens, Tensor):
        cu_seqlens = torch.tensor(integers("cu_seqlens", cu_seqlens), device="cpu")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"cu_seqlens must be int32 or int64, got {cu_seqlens.dtype}; call .to(torch.int32) "
            "on it."
        )
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(
            f"cu_seqlens must have shape [num_docs + 1] with at least one document, got "
            f"{tuple(cu_seqlens.shape)}; "
            "flatten it, and start it with 0."
        )
    if torch.compiler.is_compiling():
        if total_tokens is None:
            raise ValueError(
                "total_tokens must be given inside a compiled graph, got None; pass the number "
                "of tokens in the row."
            )
        if cu_seqlens.dtype == torch.int64:  # not wrapped around, to a boundary in the row
            cu_seqlens = cu_seqlens.clamp(-1, INT32_MAX).to(torch.int32)
        return _from_device(cu_seqlens, total_tokens, capacity, max_seqlen_bound)
    return _from_host(
        cu_seqlens.tolist(), total_tokens, cu_seqlens.device, capacity, max_seqlen_bound
    )


def from_position_ids(
    position_ids_BT: Tensor,
    *,
    capacity: int | None = None,
    max_seqlen_bound: int | None = None,
) -> LayoutFields:
    """Fields of positions that restart at each document."""
    require_tensor("position_ids", position_ids_BT)
    positions = position_ids_BT[None] if position_ids_BT.ndim == 1 else position_ids_BT
    if positions.ndim != 2 or not is_integer_tensor(positions):
        raise ValueError(
            f"position_ids must be an integer tensor [B, S], got {positions.dtype} "
            f"{tuple(position_ids_BT.shape)}; "
            "for 3-row multimodal positions pass the text row."
        )
    starts = document_starts(
        positions.shape[0],
        positions.shape[1],
        positions.device,
        position_ids_BT=positions.to(torch.int64),
    )
    return from_starts(starts, capacity=capacity, max_seqlen_bound=max_seqlen_bound)


def from_starts(
    starts_T: Tensor,
    *,
    padding_T: Tensor | None = None,
    capacity: int | None = None,
    max_seqlen_bound: int | None = None,
    conditions: Sequence[Condition] = (),
) -> LayoutFields:
    """Fields of flags, True where a document or a padding run begins."""
    require_tensor("starts_T", starts_T)
    if padding_T is not None:
        require_tensor("padding_T", padding_T)
    total = starts_T.shape[0]
    for each in (starts_T, padding_T):
        if each is not None and (each.dtype != torch.bool or each.shape != (total,)):
            raise ValueError(
                "starts_T and padding_T must be bool [T], got "
                f"{each.dtype} {tuple(each.shape)}; pass True where a document begins, or at "
                "padding."
            )
    if padding_T is not None:
        starts_T = starts_T | pad(padding_T[1:] != padding_T[:-1], (1, 0))
    if torch.compiler.is_compiling():
        for holds, sentence in conditions:
            torch._assert_async(holds, f"flexvarlen: {sentence}")
        slots = min(capacity or default_capacity(total), total)
        cu_seqlens = traced_boundaries(starts_T, slots)
        return _from_device(cu_seqlens, total, slots, max_seqlen_bound, padding_T)
    flags = [starts_T] if padding_T is None else [starts_T, padding_T]
    read = torch.cat([*flags, *(holds[None] for holds, _ in conditions)]).cpu()
    held = read[total * len(flags) :].tolist()
    for (_, sentence), holds in zip(conditions, held, strict=True):
        if not holds:
            raise ValueError(sentence)
    starts = read[:total].nonzero()[:, 0].tolist()
    if padding_T is not None and not read[total : 2 * total].any():
        padding_T = None
    boundaries = [*starts, total] if starts and starts[0] == 0 else [0, *starts, total]
    return _from_host(boundaries, total, starts_T.device, capacity, max_seqlen_bound, padding_T)


def _from_host(
    boundaries: list[int],
    total_tokens: int | None,
    device: torch.device,
    capacity: int | None,
    max_seqlen_bound: int | None,
    padding: Tensor | None = None,
) -> LayoutFields:
    """Check boundaries that the host knows, and make the fields of them."""
    checked = check_boundaries(boundaries, total_tokens, capacity, max_seqlen_bound)
    spare = checked.capacity - checked.num_docs
    host = host_int32(boundaries + [boundaries[-1]] * spare, device)
    return {
        "cu_seqlens": host.to(device, non_blocking=True),
        "cu_seqlens_host": host,
        "total_tokens": checked.total_tokens,
        "max_seqlen_bound": checked.max_seqlen_bound,
        "num_docs": checked.num_docs,
        "max_seqlen": checked.max_seqlen,
        "padding": padding,
        "has_padding": padding is not None or boundaries[-1] < checked.total_tokens,
    }


def _from_device(
    cu_seqlens: Tensor,
    total: int,
    capacity: int | None,
    max_seqlen_bound: int | None,
    padding: Tensor | None = None,
) -> LayoutFields:
    """Fields of boundaries inside a compiled graph: see `safe_boundaries`."""
    _, capacity, max_seqlen_bound = checked_sizes(total, capacity, max_seqlen_bound)
    bound = total if max_seqlen_bound is None else min(max_seqlen_bound, total)
    return {
        "cu_seqlens": safe_boundaries(cu_seqlens, total, capacity, bound),
        "cu_seqlens_host": None,
        "total_tokens": total,
        "max_seqlen_bound": bound,
        "num_docs": None,
        "max_seqlen": None,
        "padding": padding,
    }
