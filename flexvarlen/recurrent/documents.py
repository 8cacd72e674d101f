"""`RecurrentDocuments`: the documents of a packed row, as convolutions and scans need them.

Shapes: T = total_tokens; N = number of slots for documents, or for segments of trees.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from flexvarlen.layout.boundaries import slots_of
from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.layout.segments import Segments
from flexvarlen.layout.token_map import Permutation, SameOrder, TokenMap
from flexvarlen.recurrent.tree_parts import REACH, Carry, PartOfTree

CHUNK = 64
"""Tokens of a chunk of fla's kernels."""
WIDEST_CONVOLUTION = REACH + 1
"""Maximum width for which next tokens of trees are listed; no verified family exceeds it."""


class Branches(NamedTuple):
    """Additional tables for trees, in the order of their levels (see `LevelOrder`).

    Attributes:
        parents: int32 `[N + 1]`, the slot whose final state each slot starts from, -1 at a root.
        levels: levels of the `LevelOrder`, on the host.
    """

    parents: Tensor
    levels: Tensor


def by_level(segments: Segments, total_tokens: int) -> Permutation:
    """The tokens of a row's segments in the order of their levels. No sync; traces."""
    order, starts = segments.by_level, segments.table[0]
    tokens = torch.arange(total_tokens, device=starts.device, dtype=torch.int32)
    slots = slots_of(starts, tokens)
    in_row = tokens - starts[slots] + order.table[0][order.table[3][slots]]
    in_levels = torch.empty_like(in_row).scatter_(0, in_row.long(), tokens)
    return Permutation(in_levels.long(), in_row.long())


class RecurrentDocuments:
    """The tables that all recurrent layers of one forward share.

    Trees run in the order of their levels, into which `tokens` permutes before a layer and back
    after it. All other attributes are in that order, with segments in place of documents. Padding
    after the last document counts as a document here, as kernels leave tokens outside of all
    documents unwritten.

    Attributes:
        layout: the documents.
        tokens: permutation from the order of the row to that of recurrent layers, and back.
        branches: tables of trees; None for plain documents.
        over_ranks: whether a document of such a row may be split over several ranks.
        links: the `BoundaryLinks` if a document of this row is split; else None.
        group: the name of the ranks' group, for a shard.
        previous: int32 `[T]`, the previous token in each token's document, or on its path; -1 if
            there is none. With links or a part `[REACH + T]`, including the last tokens of the
            previous rank or of the path above.
        last_tokens: of a part, the last tokens on the path of each slot, int32 `[N, REACH]`,
            counted as in `previous`, -1 where there are fewer. Else `[0]`.
        next_tokens: for trees, the tokens whose convolution reads each token (see `_next_tokens`).
        padding: bool `[T]`, True at padding; None if the host knows that there is no padding.
        cu_seqlens: int32 `[N + 3]`: the boundaries, then T twice. Slot i holds the tokens from
            `cu_seqlens[i]` to `cu_seqlens[i + 1]`: the documents, unused slots, the padding after
            the last document, and finally a slot that is always empty.
        chunk_indices: int32 `[T // 64 + N + 1, 2]`: the slot of each chunk of 64 tokens, and its
            number in the document. Chunks past the last one belong to the empty slot.
        part: the part of a tree that the row is, or None.
        carry: of a part, whose states the layer that runs now loads and stores: see `enter`.
        meanwhile: other work that the first layer may compile while it checks its scan; or None.

    No sync; traces.
    """

    def __init__(self, layout: PackedLayout, *, group: str = "", for_any_row: bool = False) -> None:
        """Compute the tables.

        Args:
            layout: the documents; or a rank's contiguous shard of them.
            group: the name of the ranks' group, for a shard.
            for_any_row: whether a compiled graph that also runs for other documents reads the
                tables, although they are made outside of it (layers compiled one by one).

        Raises:
            ValueError: a convolution may need tokens of more than one previous rank.
        """
        self.layout, self.for_any_row = layout, for_any_row
        self.meanwhile: Callable[[], None] | None = None
        for_any_row = for_any_row or torch.compiler.is_compiling()
        known_full = not for_any_row and layout.has_padding is False
        self.padding = None if known_full else ~layout.real_tokens()
        total_tokens, segments = layout.total_tokens, layout.segments
        starts = layout.cu_seqlens if segments is None else segments.by_level.table[0]
        tokens = torch.arange(total_tokens, device=layout.device, dtype=torch.int32)
        slots = slots_of(starts, tokens)
        first = -1 if segments is None else segments.by_level.table[2][slots]
        self.previous = torch.where(tokens == starts[slots], first, tokens - 1)
        self.over_ranks, self.group = layout.shard.links is not None, group
        if self.over_ranks and total_tokens < REACH:
            raise ValueError(
                f"each rank must have at least the {REACH} tokens that a convolution reaches back, "
                f"got {total_tokens}; pack longer rows, or use fewer ranks."
            )
        self.links = layout.shard.links if layout.shard.exchanges_keys else None
        self.part: PartOfTree | None = layout.shard if layout.shard.is_part_of_tree else None  # type: ignore[assignment]
        self.carry: Carry | None = None
        if self.links is not None:
            self.previous = _with_tokens_before(self.previous, layout.position_ids()[0])
        self.tokens: TokenMap = SameOrder()
        self.branches = None
        if segments is not None:
            self.tokens = by_level(segments, total_tokens)
            self.branches = Branches(segments.by_level.table[1], segments.by_level.levels)
        tokens_before, self.last_tokens = 0, starts.new_empty(0)
        if self.part is not None:
            tokens_before = REACH
            self.previous = _with_path_before(self.previous)
            self.last_tokens = _last_tokens(starts[1:] + REACH, self.previous)
            if segments is None:
                roots = torch.full_like(starts, -1)
                levels = torch.tensor([0, len(starts) - 1], device="cpu")
                self.branches = Branches(roots, levels)
        has_branches = self.branches is not None and total_tokens > 0
        self.next_tokens = (
            _next_tokens(starts + tokens_before, self.previous) if has_branches else None
        )
        self.cu_seqlens = pad(starts, (0, 2), value=total_tokens)
        self.chunk_indices = _chunk_indices(self.cu_seqlens, total_tokens)

    def to(
        self, device: torch.device | str | int | None, *, non_blocking: bool = False
    ) -> RecurrentDocuments:
        """A copy on another device, for accelerate, which calls this before layers."""
        if device is None or torch.device(device) == self.layout.device:
            return self
        moved = self.layout.to(torch.device(device), non_blocking=non_blocking)
        if moved is self.layout:
            return self
        return self.of_layout(moved)

    def of_layout(self, moved: PackedLayout) -> RecurrentDocuments:
        """The tables for a copy of the layout on another device."""
        found = RecurrentDocuments(moved, group=self.group, for_any_row=self.for_any_row)
        found.carry = self.carry
        return found

    def enter(self, layer: Any) -> None:
        """Before a call of a layer: its functions load and store the states of this layer.

        Raises:
            NotImplementedError: a layer without an index, on a part of a tree.
        """
        if self.part is None:
            return
        index = getattr(layer, "layer_idx", None)
        if index is None:
            raise NotImplementedError(
                "a recurrent layer must have a layer_idx to run on a part of a tree, got "
                f"{type(layer).__name__} without; run the whole tree: shared.batch()."
            )
        self.carry = Carry(self.part, index)

    def zero_padding(self, x: Tensor) -> Tensor:
        """x `[1, T, ...]` with zeros at padding, in the output and in the gradient."""
        if self.padding is None:
            return x
        return x.masked_fill(self.padding.view(1, -1, *[1] * (x.ndim - 2)), 0)


def _with_tokens_before(previous: Tensor, position: Tensor) -> Tensor:
    """`previous` for the previous rank's last tokens and a rank's T tokens, `[REACH + T]`.

    Args:
        position: position of the rank's first token in its document.
    """
    tokens = torch.arange(REACH + 1, device=previous.device, dtype=torch.int32)
    firsts = torch.where(REACH + 1 - tokens <= position, tokens - 1, -1)
    others = torch.where(previous[1:] < 0, -1, previous[1:] + REACH)
    return torch.cat([firsts, others])


def _with_path_before(previous: Tensor) -> Tensor:
    """`previous` for the last tokens of the path above and a part's T tokens, `[REACH + T]`.

    Those of a root are zeros, which a convolution may read.
    """
    before = torch.arange(-1, REACH - 1, device=previous.device, dtype=torch.int32)
    own = torch.where(previous < 0, REACH - 1, previous + REACH)
    return torch.cat([before, own.to(torch.int32)])


def _last_tokens(ends: Tensor, previous: Tensor) -> Tensor:
    """The last tokens on the path of each slot, int32 `[N, REACH]`; see `RecurrentDocuments`."""
    found = [ends - 1]
    for _ in range(REACH - 1):
        found.insert(0, torch.where(found[0] < 0, -1, previous[found[0].clamp(min=0)]))
    return torch.stack(found, dim=1)


def _chunk_indices(cu_seqlens: Tensor, total_tokens: int) -> Tensor:
    chunks = (cu_seqlens.diff() + CHUNK - 1) // CHUNK
    ends, slots = chunks.cumsum(0), chunks.shape[0]
    index = torch.arange(total_tokens // CHUNK + slots - 1, device=ends.device)
    slot = torch.searchsorted(ends, index, right=True).clamp(max=slots - 1)
    return torch.stack([slot, index - (ends - chunks)[slot]], dim=1).int()


def _next_tokens(starts: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens whose convolution reads a token, other than those that follow it in the row.

    Args:
        starts: int32 `[N + 1]`.
        previous: int32 `[T]`.

    Returns:
        Where each token's part of the list starts, int32 `[T + 1]`, and the list, int32 `[9 N]`:
        4 times the token that reads it, plus their distance on the path. Its end is unused.
    """
    total_tokens = previous.shape[0]
    ahead = torch.arange(REACH, device=starts.device, dtype=torch.int32)
    tokens = starts[:-1, None] + ahead
    real = tokens < starts[1:, None]
    keys, index = [], torch.where(real, tokens, -1)
    for distance in range(1, REACH + 1):
        index = previous[index.clamp(min=0)]  # -1 if there is no earlier token
        listed = (index >= 0) & (tokens - index != distance)
        keys.append(torch.where(listed, index, total_tokens))
    codes = 4 * tokens[..., None] + ahead + 1
    by_token, order = torch.stack(keys, dim=-1).flatten().sort(stable=True)
    every = torch.arange(total_tokens + 1, device=starts.device, dtype=torch.int32)
    return torch.searchsorted(by_token, every, out_int32=True), codes.flatten()[order]
