"""Sliding windows to both sides, over a row whose documents are cut.

A piece, with the tokens that its windows reach on both sides, is treated as one document. With
`layout_k` a document's last query is aligned with its last key, so keys after it cannot be given.
So each query is put at the index of its own key; the others are zeros, and their outputs dropped.

Shapes: C = tokens of a rank, Tk = gathered keys, Hkv = num_kv_heads, D = head_dim.

Imports: torch. Never transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.parallel.gather_keys import gather_keys
from flexvarlen.parallel.key_exchange import KeyExchange
from flexvarlen.parallel.pieces import Pieces

if TYPE_CHECKING:  # not available in a torch built without distributed
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class WindowExchange:
    """What one rank sends, receives and attends to in layers with sliding windows.

    Attributes:
        keys: the pieces and what their windows reach; its `layout_k` is also that of the queries.
        own_keys: int64 `[C]`, on the device of the tokens: the key of each of the rank's tokens.
    """

    keys: KeyExchange
    own_keys: Tensor

    @classmethod
    def of(
        cls, pieces: Pieces, tokens_per_rank: int, rank: int, *, capacity: int, window: int
    ) -> WindowExchange | None:
        """The exchange of one rank; None, on every rank, if no document of the row is cut.

        Args:
            pieces, tokens_per_rank, rank, capacity: as in `KeyExchange.of`.
            window: a query sees the keys less than this many tokens away.
        """
        reach = window - 1
        keys = KeyExchange.of(
            pieces, tokens_per_rank, rank, capacity=capacity, causal=False, reach=reach
        )
        if keys is None:
            return None
        own_keys: list[int] = []
        starts = keys.layout_k.cu_seqlens.tolist()
        for (_, start, stop), key in zip(pieces[rank], starts, strict=False):
            first = key + min(start, reach)
            own_keys += range(first, first + stop - start)
        padding = tokens_per_rank - len(own_keys)
        own_keys += range(starts[-1], starts[-1] + padding)
        return cls(keys, torch.tensor(own_keys, dtype=torch.int64, device="cpu"))

    @property
    def layout(self) -> PackedLayout:
        """Of queries and keys."""
        return self.keys.layout_k

    def moved(self, move: Callable[[Tensor], Tensor]) -> WindowExchange:
        """The same with `move` of the tensors on the device."""
        return WindowExchange(self.keys.moved(move), move(self.own_keys))

    def attend(
        self,
        q_CHD: Tensor,
        k_CHD: Tensor,
        v_CHD: Tensor,
        attend: Callable[..., Any],
        group: ProcessGroup | None,
    ) -> Tensor:
        """The output `[C, H, D]` of this rank's tokens.

        Args:
            q_CHD, k_CHD, v_CHD: of the rank's own tokens.
            attend: q, k, v `[Tk, ...]` in the order of `layout` -> the output `[Tk, H, D]`.
            group: the ranks; None: all.

        No sync; traces under `fullgraph=True`.
        """
        k_KHD, v_KHD = gather_keys(k_CHD, v_CHD, self.keys, group)
        q_KHD = q_CHD.new_zeros(len(k_KHD), *q_CHD.shape[1:]).index_copy(0, self.own_keys, q_CHD)
        out_KHD: Tensor = attend(q_KHD, k_KHD, v_KHD)
        return out_KHD.index_select(0, self.own_keys)
