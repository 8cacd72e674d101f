"""`gather_keys`: the keys and values of a row's cut documents, from the ranks that hold them.

One all-to-all in the forward, and one in the backward that sends the gradients of received keys to
the ranks that hold these.

Shapes: C = tokens of a rank, K = gathered keys, H = num_kv_heads, D = head_dim (Dv of values).

Imports: torch. Never transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from flexvarlen.layout.launch_sizes import NOT_CAPTURED
from flexvarlen.parallel.key_exchange import KeyExchange
from flexvarlen.parallel.transfer import (
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


def gather_keys(
    k_CHD: Tensor, v_CHD: Tensor, exchange: KeyExchange, group: ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """The keys and values that `exchange.layout_k` describes, from this rank and the others.

    Args:
        k_CHD, v_CHD: `[C, H, D]` and `[C, H, Dv]`, of the rank's own tokens.
        exchange: of this rank.
        group: the ranks; None: all.

    Returns:
        `[K, H, D]` and `[K, H, Dv]`, zero past the last key. Differentiable. All ranks call it and
        its backward, each of which is one collective. No sync; traces under `fullgraph=True`.
    """
    process_group = dist.group.WORLD if group is None else group
    assert process_group is not None
    k_KHD, v_KHD = gather_keys_forward(
        k_CHD,
        v_CHD,
        exchange.key_ranges,
        exchange.send_ranges,
        exchange.receive_counts,
        exchange.grad_ranges,
        exchange.layout_k.total_tokens,
        process_group.group_name,
    )
    return k_KHD, v_KHD


@torch.library.custom_op("flexvarlen::gather_keys_forward", mutates_args=(), tags=NOT_CAPTURED)
def gather_keys_forward(
    k_CHD: Tensor,
    v_CHD: Tensor,
    key_ranges: Tensor,
    send_ranges: Tensor,
    receive_counts: Tensor,
    grad_ranges: Tensor,
    num_keys: int,
    group: str,
) -> tuple[Tensor, Tensor]:
    """`gather_keys` as an operator, as the number of tokens sent must not be a shape in a graph.

    `grad_ranges` are for the backward.
    """
    own = k_CHD, v_CHD
    arriving = send(own, rows(send_ranges), receive_counts.tolist(), group)
    return receive(own, arriving, rows(key_ranges), num_keys)


@gather_keys_forward.register_fake
def _(
    k_CHD: Tensor,
    v_CHD: Tensor,
    key_ranges: Tensor,
    send_ranges: Tensor,
    receive_counts: Tensor,
    grad_ranges: Tensor,
    num_keys: int,
    group: str,
) -> tuple[Tensor, Tensor]:
    return k_CHD.new_empty(num_keys, *k_CHD.shape[1:]), v_CHD.new_empty(num_keys, *v_CHD.shape[1:])


@torch.library.custom_op("flexvarlen::gather_keys_backward", mutates_args=(), tags=NOT_CAPTURED)
def gather_keys_backward(
    dk_KHD: Tensor,
    dv_KHD: Tensor,
    key_ranges: Tensor,
    grad_ranges: Tensor,
    ranks: int,
    tokens: int,
    group: str,
) -> tuple[Tensor, Tensor]:
    """Send the gradients of received keys to their ranks, and sum those of the rank's own keys."""
    gradients, arrivals = (dk_KHD, dv_KHD), rows(grad_ranges)
    own, of_others = own_and_others(rows(key_ranges), tokens)
    arriving = send_back(gradients, of_others, arrivals, ranks, group)
    return sum_gradients(of_own(gradients, own), arriving, arrivals, gradients, tokens)


@gather_keys_backward.register_fake
def _(
    dk_KHD: Tensor,
    dv_KHD: Tensor,
    key_ranges: Tensor,
    grad_ranges: Tensor,
    ranks: int,
    tokens: int,
    group: str,
) -> tuple[Tensor, Tensor]:
    return dk_KHD.new_empty(tokens, *dk_KHD.shape[1:]), dv_KHD.new_empty(tokens, *dv_KHD.shape[1:])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    k_CHD, _, key_ranges, _, receive_counts, grad_ranges, _, group = inputs
    ctx.save_for_backward(key_ranges, grad_ranges)
    ctx.ranks, ctx.tokens, ctx.group = receive_counts.shape[0], k_CHD.shape[0], group


def _backward(ctx: Any, dk_KHD: Tensor, dv_KHD: Tensor) -> tuple[Tensor | None, ...]:
    dk_CHD, dv_CHD = gather_keys_backward(
        dk_KHD, dv_KHD, *ctx.saved_tensors, ctx.ranks, ctx.tokens, ctx.group
    )
    return dk_CHD, dv_CHD, None, None, None, None, None, None


gather_keys_forward.register_autograd(_backward, setup_context=_save)
