"""Checks of the arguments of `DocumentMask.of`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flexvarlen.layout.arguments import integers, to_int_or_none
from flexvarlen.layout.boundaries import host_int32
from flexvarlen.layout.packed_layout import PackedLayout

Prefix = int | Sequence[int] | Tensor


def check_runs(runs: Tensor, layout: PackedLayout, *, causal: bool) -> None:
    """Raise unless runs mark tokens of a causal mask."""
    if not causal:
        raise ValueError(
            "runs must be given with causal=True, got causal=False; remove one of the two."
        )
    if runs.dtype != torch.bool or runs.shape != (layout.total_tokens,):
        raise ValueError(
            f"runs must be a bool tensor [{layout.total_tokens}], got {runs.dtype} "
            f"{list(runs.shape)}; mark each token."
        )


def check_pair(layout: PackedLayout, layout_k: PackedLayout) -> None:
    """Raise unless document i of one can attend to document i of the other."""
    if layout_k.device != layout.device:
        raise ValueError(
            f"layout_k must be on the layout's device {layout.device}, got {layout_k.device}; call "
            "layout_k.to()."
        )
    counts = (layout.num_docs, layout_k.num_docs)
    if None not in counts and counts[0] != counts[1]:
        raise ValueError(
            f"layout_k must have as many documents as the layout, {counts[0]}, got {counts[1]}; "
            "add an empty document (length 0) for each document without keys."
        )
    if layout_k.capacity != layout.capacity:
        raise ValueError(
            f"layout_k must have the layout's capacity {layout.capacity}, got {layout_k.capacity}; "
            "make both with the same capacity=."
        )


def read_prefix(prefix: Prefix, layout: PackedLayout) -> Tensor:
    """int32 `[capacity]` on the layout's device."""
    if isinstance(prefix, Tensor):
        if prefix.dtype != torch.int32 or prefix.shape != (layout.capacity,):
            raise ValueError(
                f"prefix must be an int32 tensor [{layout.capacity}] (one value per slot of the "
                f"layout), got {prefix.dtype} {tuple(prefix.shape)}; pad it with zeros."
            )
        if prefix.device != layout.device:
            raise ValueError(
                f"prefix must be on the layout's device {layout.device}, got {prefix.device}; "
                "move it."
            )
        return prefix.contiguous()
    one = to_int_or_none(prefix)
    values = integers("prefix", prefix) if one is None else [one]  # type: ignore[arg-type]
    if one is None and layout.num_docs is not None and len(values) != layout.num_docs:
        raise ValueError(
            f"prefix must have one value for each of the {layout.num_docs} documents, got "
            f"{len(values)}; pass 0 for a document without a prefix."
        )
    for value in values:
        if not 0 <= value < 2**31:
            raise ValueError(
                f"prefix must be integers from 0 to 2**31 - 1, got {value!r}; pass the number of "
                "tokens that all queries of the document see."
            )
    if one is not None:
        return torch.full((layout.capacity,), one, dtype=torch.int32, device=layout.device)
    spare = layout.capacity - len(values)
    if spare < 0:
        raise ValueError(
            f"prefix must have at most capacity={layout.capacity} values, got {len(values)}; make "
            "the layout with a larger capacity=."
        )
    host = host_int32(values + [0] * spare, layout.device)
    return host.to(layout.device, non_blocking=True)
