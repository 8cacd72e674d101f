"""The interval of keys that each query sees, `lo[q] <= kv < hi[q]`. All masks are built from it.

The transpose has the same form: the queries that see a key are one interval too. Both pairs of
bounds never decrease. Documents that are trees add `TreeBounds`.

Shapes: Tq, Tk = tokens of the query and the key row (equal in self-attention), N = document slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexvarlen.layout.boundaries import slots_of
from flexvarlen.layout.segments import token_bounds
from flexvarlen.mask.spec import UNLIMITED, MaskSpec


class MaskInputs(NamedTuple):
    """A mask as tensors and integers, the argument types that custom operators accept.

    Attributes:
        cu_seqlens_q, cu_seqlens_k: int32 `[N + 1]`; the same tensor in self-attention.
        padding_q, padding_k: bool `[Tq]` and `[Tk]`, True in slots that are padding runs, or None.
        prefix: int32 `[N]`, tokens of each document's prefix, or None.
        tree: the table of `Segments`, int32 `[4, S + 1]`, or None.
        runs: int32 `[2, T]`, start and end in the row of each token's run, or None: `runs_of`.
        total_tokens: `[Tq, Tk]`.
        spec: `MaskSpec.as_ints()`.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    padding_q: Tensor | None
    padding_k: Tensor | None
    prefix: Tensor | None
    tree: Tensor | None
    runs: Tensor | None
    total_tokens: list[int]
    spec: list[int]


SCHEMA = (
    "Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? padding_q, Tensor? padding_k, "
    "Tensor? prefix, Tensor? tree, Tensor? runs, SymInt[] total_tokens, SymInt[] spec"
)
"""`MaskInputs` as arguments of an operator."""


def query_bounds(given: MaskInputs) -> tuple[Tensor, Tensor]:
    """The keys that each query sees: `lo`, `hi`, int32 `[Tq]`.

    A query of a padding run sees nothing: `lo` is the end of the run and `hi` its start. In a tree
    these are the keys from its first token to the query. No sync.
    """
    cu_seqlens_q, cu_seqlens_k, padding_q, padding_k, prefix, _, runs, total_tokens, spec = given
    mask = MaskSpec.from_ints(spec)
    if mask.tree:  # the queries are all keys, or the last ones
        tokens_q, tokens_k = total_tokens
        of_keys = given._replace(
            cu_seqlens_q=cu_seqlens_k,
            padding_q=padding_k,
            total_tokens=[tokens_k, tokens_k],
            spec=MaskSpec().as_ints(),
        )
        lo, hi = query_bounds(of_keys)
        return lo[tokens_k - tokens_q :], hi[tokens_k - tokens_q :]
    at = _locate(cu_seqlens_q, cu_seqlens_k, padding_q, padding_k, *total_tokens)
    position = at.position + _shift(mask, at.own_length, at.other_length)
    low, high = torch.zeros_like(position), at.other_length
    if mask.left != UNLIMITED:
        low = torch.maximum(low, position - mask.left)
    if mask.chunk:
        begin = position - position % mask.chunk
        low, high = torch.maximum(low, begin), torch.minimum(high, begin + mask.chunk)
    if mask.causal:
        last = position + 1
        if prefix is not None:
            last = torch.maximum(last, prefix[at.slot.clamp(max=prefix.shape[0] - 1)])
        if runs is not None:
            last = runs[1] - at.other_start
        high = torch.minimum(high, last)
    if mask.right != UNLIMITED:
        high = torch.minimum(high, position + (mask.right + 1))
    return at.in_other_row(low, high)


def key_bounds(given: MaskInputs) -> tuple[Tensor, Tensor]:
    """The queries that see each key: first and one past the last, int32 `[Tk]`; the transpose."""
    cu_seqlens_q, cu_seqlens_k, padding_q, padding_k, prefix, _, runs, total_tokens, spec = given
    mask = MaskSpec.from_ints(spec)
    tokens_q, tokens_k = total_tokens
    at = _locate(cu_seqlens_k, cu_seqlens_q, padding_k, padding_q, tokens_k, tokens_q)
    position = at.position
    shift = _shift(mask, at.other_length, at.own_length)
    low, high = shift, shift + at.other_length
    if mask.left != UNLIMITED:
        high = torch.minimum(high, position + (mask.left + 1))
    if mask.right != UNLIMITED:
        low = torch.maximum(low, position - mask.right)
    if mask.causal:
        first = position
        if prefix is not None:
            in_prefix = position < prefix[at.slot.clamp(max=prefix.shape[0] - 1)]
            first = torch.where(in_prefix, low, first)
        if runs is not None:
            first = runs[0] - at.other_start
        low = torch.maximum(low, first)
    if mask.chunk:
        begin = position - position % mask.chunk
        low, high = torch.maximum(low, begin), torch.minimum(high, begin + mask.chunk)
    return at.in_other_row(low - shift, high - shift)


def runs_of(marked_T: Tensor) -> Tensor:
    """int32 `[2, T]`: start and end of the run that each token is in.

    A run may go on into the next document: a mask cuts it there.

    Args:
        marked_T: bool; adjacent tokens that are marked are one run, any other is one by itself.

    No sync; traces under `fullgraph=True`.
    """
    tokens = torch.arange(marked_T.shape[0], device=marked_T.device, dtype=torch.int32)
    goes_on_T = marked_T & marked_T.roll(1) & (tokens > 0)
    start = tokens.masked_fill(goes_on_T, 0).cummax(0).values
    ends_T = ~torch.nn.functional.pad(goes_on_T[1:], (0, 1))
    end = (tokens + 1).masked_fill(~ends_T, torch.iinfo(torch.int32).max)
    return torch.stack([start, end.flip(0).cummin(0).values.flip(0)])


@dataclass(frozen=True)
class _TokenLocations:
    """Each token's slot and position, and its document in the other row; int32 `[T]` each."""

    slot: Tensor
    position: Tensor
    own_length: Tensor
    other_start: Tensor
    other_length: Tensor
    is_padding: Tensor

    def in_other_row(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Convert bounds inside the other document to row offsets; empty where `is_padding`."""
        low = torch.minimum(low.clamp(min=0), self.other_length)
        high = torch.minimum(high.clamp(min=0), self.other_length)
        low = torch.where(self.is_padding, self.other_length, low)
        high = torch.where(self.is_padding, 0, high)
        return self.other_start + low, self.other_start + high


def _locate(
    own: Tensor,
    other: Tensor,
    own_padding: Tensor | None,
    other_padding: Tensor | None,
    own_total: int,
    other_total: int,
) -> _TokenLocations:
    tokens = torch.arange(own_total, device=own.device, dtype=torch.int32)
    slot = slots_of(own, tokens)
    # One slot more: the padding after the last document.
    own_ends = torch.cat([own, own.new_full((1,), own_total)])
    other_ends = torch.cat([other, other.new_full((1,), other_total)])
    start, other_start = own_ends[slot], other_ends[slot]
    is_padding = slot == own.shape[0] - 1
    if own_padding is not None:
        is_padding = is_padding | own_padding
    if other_padding is not None and other_total > 0:
        is_padding = is_padding | other_padding[other_start.clamp(max=other_total - 1)]
    return _TokenLocations(
        slot=slot,
        position=tokens - start,
        own_length=own_ends[slot + 1] - start,
        other_start=other_start,
        other_length=other_ends[slot + 1] - other_start,
        is_padding=is_padding,
    )


def _shift(mask: MaskSpec, length_q: Tensor, length_k: Tensor) -> Tensor:
    """Offset from a query's position to the position of the key on its diagonal."""
    if mask.cross and not mask.top_left:
        return length_k - length_q
    return torch.zeros_like(length_q)


# A custom operator in compiled graphs: Inductor of torch 2.11 on CUDA fused the search into its
# consumers, and the gradients of the reference attention were wrong.
@torch.library.custom_op(
    "flexvarlen::query_bounds", mutates_args=(), schema=f"({SCHEMA}) -> (Tensor, Tensor)"
)
def query_bounds_operator(*given: Any) -> tuple[Tensor, Tensor]:
    """`query_bounds` of the fields of `MaskInputs`, for compiled graphs."""
    return query_bounds(MaskInputs(*given))


@query_bounds_operator.register_fake
def _(*given: Any) -> tuple[Tensor, Tensor]:
    cu_seqlens, tokens_q = given[0], MaskInputs(*given).total_tokens[:1]
    return cu_seqlens.new_empty(tokens_q), cu_seqlens.new_empty(tokens_q)


class TreeBounds(NamedTuple):
    """The bounds of a tree: a query q sees key k of `lo[q] <= k <= q` if the following hold.

    Attributes:
        end: for each key; `q < end[k]` if the query is in the subtree of the key's segment.
        position: position of each key along its path.
        first: for each query, the position where its window or chunk begins: `position[k] >=
            first[q]`. None without windows and chunks.
        keys_before: keys before that of the first query; 0 in self-attention.

    All int32, `[Tk]` or `[Tq]`.
    """

    end: Tensor
    position: Tensor
    first: Tensor | None
    keys_before: int

    def sees(self, q: Tensor, k: Tensor) -> Tensor:
        """Whether the query is below the key, and the key in the query's window or chunk."""
        seen = q + self.keys_before < self.end[k]
        return seen if self.first is None else seen & (self.position[k] >= self.first[q])


def tree_bounds(given: MaskInputs) -> TreeBounds:
    """The bounds of each token of trees. No sync; traces under `fullgraph=True`."""
    assert given.tree is not None
    mask = MaskSpec.from_ints(given.spec)
    tokens_q, tokens_k = given.total_tokens
    end, position = token_bounds(given.tree, tokens_k)
    keys_before, first = tokens_k - tokens_q, None
    own = position[keys_before:]
    if mask.left != UNLIMITED:
        first = (own - mask.left).clamp(min=0)
    if mask.chunk:
        begin = own - own % mask.chunk
        first = begin if first is None else torch.maximum(first, begin)
    return TreeBounds(end, position, first, keys_before)


def dense_mask(lo: Tensor, hi: Tensor, num_keys: int) -> Tensor:
    """bool `[Tq, Tk]`: True where query q sees key kv. For small rows: takes Tq·Tk bytes."""
    keys = torch.arange(num_keys, device=lo.device, dtype=torch.int32)
    return (keys >= lo[:, None]) & (keys < hi[:, None])
