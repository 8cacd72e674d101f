"""`sharded_layout`: the layout of the pieces of documents that one rank of a row holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from flexvarlen.layout.boundaries import round_up_to_power_of_two
from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.layout.row_split import OWN_KEYS, Attend, BoundaryLinks, RowKeys
from flexvarlen.parallel.gather_keys import gather_keys
from flexvarlen.parallel.key_exchange import KeyExchange
from flexvarlen.parallel.pieces import Pieces
from flexvarlen.parallel.plan import RowPlan

if TYPE_CHECKING:  # not available in a torch built without distributed
    from torch.distributed import ProcessGroup


class GatheredKeys(NamedTuple):
    """The keys of this rank and those that others send: `RowKeys` of a row with split documents.

    Attributes:
        exchange: which keys.
        group: the ranks; None: all.
    """

    exchange: KeyExchange
    group: ProcessGroup | None

    def layouts(self, layout: PackedLayout) -> tuple[PackedLayout, PackedLayout | None]:
        if self.exchange.own_keys is not None:
            return self.exchange.layout_k, None
        return layout, self.exchange.layout_k

    def attend(
        self,
        attend: Attend,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        layer: int | None = None,
    ) -> Any:
        k, v = gather_keys(k, v, self.exchange, self.group)
        own_keys = self.exchange.own_keys
        if own_keys is None:
            return attend(q, k, v, sinks)
        q = q.new_zeros(len(k), *q.shape[1:]).index_copy(0, own_keys, q)
        return attend(q, k, v, sinks).index_select(0, own_keys)


@dataclass(frozen=True, eq=False)
class RowShard:
    """Where a rank's documents continue on other ranks, and what it exchanges: a `RowSplit`.

    Attributes:
        rank, ranks: the rank in the group, and the group's size.
        starts: int64 `[capacity + 1]`, on the device of the tokens: the position of each piece's
            first token in its document; 0 in spare slots, and for padding.
        exchange: what the ranks exchange for attention; None if no document of the row is cut.
        causal: whether it is for causal attention.
        splits_documents: whether other rows may have cut documents: False of trees.
        links: int64 `[3]` on the host, the `BoundaryLinks` of contiguous ranks; else None.
        window: the widest of layers with sliding windows.
        windowed: what the ranks exchange in these; None without a window, or if no document of the
            row is cut.
    """

    rank: int
    ranks: int
    starts: Tensor
    exchange: KeyExchange | None
    causal: bool
    splits_documents: bool = True
    links: Tensor | None = None
    window: int | None = None
    windowed: KeyExchange | None = None
    is_whole: ClassVar[bool] = False
    needs_group: ClassVar[bool] = True
    is_part_of_tree: ClassVar[bool] = False

    @property
    def exchanges_keys(self) -> bool:
        """Whether a document of the row is cut."""
        return self.exchange is not None

    def position_bound(self, row_tokens: int) -> int:
        """A bound on the positions, of the whole row."""
        return row_tokens * self.ranks

    def positions(self, layout: PackedLayout, positions: Tensor) -> Tensor:
        """Positions in the documents, from those in the rank's pieces of them."""
        return positions + self.starts[layout.document_ids()]

    def moved(self, move: Callable[[Tensor], Tensor]) -> RowShard:
        """The same shard with `move` of its tensors on the device."""
        return replace(
            self,
            starts=move(self.starts),
            exchange=None if self.exchange is None else self.exchange.moved(move),
            windowed=None if self.windowed is None else self.windowed.moved(move),
        )

    def why_not(self, *, causal: bool, window: int | None) -> str | None:
        """Why it does not serve layers with such a mask, or None.

        Checked even when no document is cut, so the answer does not depend on the row.
        """
        two_sided = None if causal else window
        if self.causal is causal and (two_sided is None or two_sided <= (self.window or 0)):
            return None
        wanted = f"causal={causal}" + ("" if two_sided is None else f", window={two_sided}")
        got = f"causal={self.causal}" + ("" if self.window is None else f", window={self.window}")
        return (
            f"the layout of a shard must be made for attention with {wanted}, got {got}; call "
            f"fv.shard_row(batch, group, {wanted})."
        )

    def keys(
        self, window: int | None, chunk: int | None, group: ProcessGroup | None
    ) -> RowKeys[PackedLayout]:
        """The keys of layers with this mask.

        Layers with chunks, which count from a document's first token, need all keys before.
        """
        exchange = self.windowed
        if window is None or self.window is None or window > self.window or chunk is not None:
            exchange = self.exchange
        return OWN_KEYS if exchange is None else GatheredKeys(exchange, group)


def sharded_layout(
    plan: RowPlan, rank: int, *, device: torch.device | str = "cpu", window: int | None = None
) -> PackedLayout:
    """The layout of one rank's pieces, with its `shard`.

    Args:
        plan: of the row.
        rank: whose.
        device: where its tensors go.
        window: as in `shard_row`.

    Sizes that kernels and compiled graphs depend on are the same on all ranks, and rounded up.
    """
    pieces, tokens_per_rank = plan.pieces, plan.tokens_per_rank
    lengths = [[stop - start for _, start, stop in own] for own in pieces]
    longest = round_up_to_power_of_two(max((n for own in lengths for n in own), default=1))
    capacity = round_up_to_power_of_two(max(map(len, pieces)))
    layout = PackedLayout.from_lengths(
        lengths[rank],
        total_tokens=tokens_per_rank,
        capacity=capacity,
        max_seqlen_bound=min(longest, tokens_per_rank),
    )
    starts = torch.zeros(capacity + 1, dtype=torch.int64, device="cpu")
    for slot, (_, start, _) in enumerate(pieces[rank]):
        starts[slot] = start
    exchange, windowed = KeyExchange.of(plan, rank, capacity=capacity), None
    if window is not None:
        windowed = KeyExchange.of(plan, rank, capacity=capacity, window=window)
    shard = RowShard(
        rank,
        plan.ranks,
        starts=starts,
        exchange=exchange,
        causal=plan.causal,
        links=_links(pieces, rank) if plan.contiguous else None,
        window=window,
        windowed=windowed,
    )
    return layout.replace(shard=shard).to(device)


def _links(pieces: Pieces, rank: int) -> Tensor:
    own, following = pieces[rank], pieces[rank + 1] if rank + 1 < len(pieces) else ()
    found = BoundaryLinks(
        continues_from_previous=bool(own) and own[0].start > 0,
        continues_on_next=bool(own and following) and own[-1].document == following[0].document,
        last_slot=max(len(own) - 1, 0),
    )
    return torch.tensor(found, dtype=torch.int64, device="cpu")
