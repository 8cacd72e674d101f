"""`GatheredKeys`: attention of a rank's queries to its own keys and to those that others send.

Imports: torch. Never transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.layout.row_split import Attend
from flexvarlen.parallel.gather_keys import gather_keys
from flexvarlen.parallel.key_exchange import KeyExchange, TwoCalls
from flexvarlen.parallel.keys_on_the_way import KeysOnTheWay, receive_keys, send_keys

if TYPE_CHECKING:  # not available in a torch built without distributed
    from torch.distributed import ProcessGroup


class GatheredKeys(NamedTuple):
    """All keys in one row, for one call: `RowKeys` of a row with cut documents.

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

    def in_two_calls(
        self, attend_to: Callable[[PackedLayout, PackedLayout | None], Attend]
    ) -> KeysInTwoCalls | GatheredKeys:
        calls = self.exchange.two_calls
        if calls is None:
            return self
        waiting = None if calls.waiting is None else attend_to(calls.waiting, calls.waiting_k)
        return KeysInTwoCalls(self, calls, attend_to(calls.here, None), waiting)


class KeysInTwoCalls(NamedTuple):
    """In eager mode the pieces whose keys are here first, while keys of the others travel.

    Attributes:
        gathered: the same in one call, for compiled graphs, which have one size for all rows.
        calls: which pieces wait for keys.
        here, waiting: attend in these calls; `waiting` is None if no piece waits.
    """

    gathered: GatheredKeys
    calls: TwoCalls
    here: Attend
    waiting: Attend | None

    def layouts(self, layout: PackedLayout) -> tuple[PackedLayout, PackedLayout | None]:
        return self.gathered.layouts(layout)

    def attend(
        self,
        attend: Attend,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        layer: int | None = None,
    ) -> Any:
        if torch.compiler.is_compiling():
            return self.gathered.attend(attend, q, k, v, sinks)
        calls, (exchange, group) = self.calls, self.gathered
        way = KeysOnTheWay(calls, exchange, group)
        k_here, v_here, token = send_keys(k, v, way)
        if self.waiting is None:
            out = self.here(q, k_here, v_here, sinks)
            way.receive()
            return out
        parts = q.split(calls.sizes)
        q_here, q_waiting = parts if calls.here_first else parts[::-1]
        of_here = self.here(q_here, k_here, v_here, sinks)
        k_waiting, v_waiting = receive_keys(token, way)
        outs = of_here, self.waiting(q_waiting, k_waiting, v_waiting, sinks)
        return torch.cat(outs if calls.here_first else outs[::-1])

    def in_two_calls(
        self, attend_to: Callable[[PackedLayout, PackedLayout | None], Attend]
    ) -> KeysInTwoCalls | GatheredKeys:
        return self.gathered.in_two_calls(attend_to)
