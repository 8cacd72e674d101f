"""`send_keys` and `receive_keys`: the exchange in two steps, in eager mode.

Between them a rank attends with the pieces whose keys it has. In the backward the gradients of
received keys travel while it computes those of these pieces, as autograd runs the newest nodes
first.

Shapes: C = tokens of a rank, K = gathered keys, H = num_kv_heads, D = head_dim (Dv of values).

Imports: torch. Never transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from flexvarlen.parallel.key_exchange import KeyExchange, TwoCalls
from flexvarlen.parallel.transfer import (
    Pair,
    of_own,
    own_and_others,
    receive,
    rows,
    send,
    send_back,
    sum_gradients,
)

if TYPE_CHECKING:  # not available in a torch built without distributed
    from torch.distributed import ProcessGroup


class KeysOnTheWay:
    """Keys and values that a rank has sent and will receive, and their gradients on the way back.

    Args:
        calls: which pieces wait for keys.
        exchange: of this rank.
        group: the ranks; None: all.
    """

    def __init__(self, calls: TwoCalls, exchange: KeyExchange, group: ProcessGroup | None) -> None:
        self.here = slice(*calls.tokens_here)
        self.key_ranges, self.num_keys = rows(calls.key_ranges), calls.num_keys
        self.sends, self.arrivals = rows(exchange.send_ranges), rows(exchange.grad_ranges)
        self.receive_counts: list[int] = exchange.receive_counts.tolist()
        self.group = (dist.group.WORLD if group is None else group).group_name  # type: ignore[union-attr]
        self.own: Pair | None = None
        self.arriving: Tensor | None = None
        self.own_gradients: list[tuple[int, Pair]] = []
        self.returning: Tensor | None = None

    def send(self, k_CHD: Tensor, v_CHD: Tensor) -> None:
        self.own, self.tokens = (k_CHD, v_CHD), len(k_CHD)
        self.arriving = send(self.own, self.sends, self.receive_counts, self.group)

    def receive(self) -> Pair:
        own, arriving, self.own, self.arriving = self.own, self.arriving, None, None
        assert own is not None
        assert arriving is not None
        return receive(own, arriving, self.key_ranges, self.num_keys)

    def send_back(self, gradients: Pair) -> None:
        own, of_others = own_and_others(self.key_ranges, self.tokens)
        self.own_gradients = of_own(gradients, own)
        ranks = len(self.receive_counts)
        self.returning = send_back(gradients, of_others, self.arrivals, ranks, self.group)

    def summed(self, of_here: Pair) -> Pair:
        if not self.num_keys:  # `receive_keys` was not called
            self.send_back((of_here[0][:0], of_here[1][:0]))
        returning, self.returning = self.returning, None
        assert returning is not None
        own, self.own_gradients = [(self.here.start, of_here), *self.own_gradients], []
        return sum_gradients(own, returning, self.arrivals, of_here, self.tokens)


def send_keys(k_CHD: Tensor, v_CHD: Tensor, way: KeysOnTheWay) -> tuple[Tensor, Tensor, Tensor]:
    """Send what other ranks need; the keys and values of pieces that wait for none, and a token.

    The token is for `receive_keys`, whose backward runs before that of this.
    """
    k, v, token = _SendKeys.apply(k_CHD, v_CHD, way)  # type: ignore[no-untyped-call]
    return k, v, token


def receive_keys(token: Tensor, way: KeysOnTheWay) -> Pair:
    """`[K, H, D]` and `[K, H, Dv]`, of the pieces that wait for keys."""
    k, v = _ReceiveKeys.apply(token, way)  # type: ignore[no-untyped-call]
    return k, v


class _SendKeys(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, k_CHD: Tensor, v_CHD: Tensor, way: KeysOnTheWay
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.way = way
        way.send(k_CHD, v_CHD)
        return k_CHD[way.here], v_CHD[way.here], k_CHD.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dk: Tensor, dv: Tensor, _: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        return *ctx.way.summed((dk, dv)), None


class _ReceiveKeys(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, way: KeysOnTheWay) -> Pair:  # type: ignore[override]
        ctx.way = way
        return way.receive()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dk: Tensor, dv: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.way.send_back((dk, dv))
        return dk.new_empty(0), None
