"""`gather_keys`: the keys and values of a row's cut documents, from the ranks that hold them.

One all-to-all in the forward, and one in the backward that sends the gradients of received keys to
the ranks that hold these, one for each piece that attends to a key. They are summed there in fp32
(fp64 of fp64 inputs), in a fixed order.

Shapes: C = tokens of a rank, S = tokens sent, K = gathered keys, H = num_kv_heads, D = head_dim (Dv
of values). Token indices count the C own tokens, then those received.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from flexvarlen.layout.launch_sizes import NOT_CAPTURED
from flexvarlen.parallel.key_exchange import KeyExchange

if TYPE_CHECKING:  # not available in a torch built without distributed
    from torch.distributed import ProcessGroup

Ranges = Sequence[Sequence[int]]
"""Rows of a table of `KeyExchange`."""


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
    own, ranges, sends = (k_CHD, v_CHD), _rows(key_ranges), _rows(send_ranges)
    sent = _pack(own, [(token, n) for token, _, n in sends])
    counts = receive_counts.tolist()
    arriving = _all_to_all(sent, counts, _tokens_per_rank(sends, len(counts)), group)
    gathered = [x.new_empty(num_keys, *x.shape[1:]) for x in own]
    _copy_ranges(gathered, own, ranges, first_token=0)  # overlaps with the all-to-all
    last = max((key + tokens for *_, tokens, key in ranges), default=0)
    for x in gathered:
        x[last:] = 0  # a kernel may multiply masked values by 0, and 0 · NaN is NaN
    received = _unpack(_wait_for(arriving), own)
    _copy_ranges(gathered, received, ranges, first_token=len(k_CHD))
    return gathered[0], gathered[1]


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
    """Send the gradients of received keys to their ranks, and sum those of the rank's own keys.

    Leading tokens that have only one gradient are copied.
    """
    gradients, ranges, arrivals = (dk_KHD, dv_KHD), _rows(key_ranges), _rows(grad_ranges)
    own_ranges = [each for each in ranges if each[0] < tokens]
    of_others = [each for each in ranges if each[0] >= tokens]
    sent = _pack(gradients, [(key, n) for *_, n, key in of_others])
    sizes = _tokens_per_rank(arrivals, ranks), _tokens_per_rank(of_others, ranks)
    arriving = _all_to_all(sent, *sizes, group)
    # overlaps with the all-to-all
    single = _leading_single_tokens(own_ranges, arrivals)
    own = [x.new_empty(tokens, *x.shape[1:]) for x in gradients]
    for target, x in zip(own, gradients, strict=True):
        target[:single] = x[:single]
    dtype = torch.promote_types(dk_KHD.dtype, torch.float32)
    summed = dk_KHD.new_zeros(tokens - single, sum(x[0].numel() for x in own), dtype=dtype)
    parts = _unpack(summed, own)
    for token, _, n, key in own_ranges:
        skip = max(0, single - token)
        for sums, x in zip(parts, gradients, strict=True):
            sums[token + skip - single :][: n - skip] += x[key + skip : key + n]
    grads_from_others, done = _wait_for(arriving), 0
    for token, _, n in arrivals:  # rank after rank
        summed[token - single :][:n] += grads_from_others[done : done + n]
        done += n
    for target, sums in zip(own, parts, strict=True):
        target[single:] = sums
    return own[0], own[1]


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


def _pack(sources: Sequence[Tensor], ranges: Sequence[tuple[int, int]]) -> Tensor:
    """`[S, H · (D + Dv)]`: ranges (first, tokens) of keys and of values, each token's in a row."""
    packed = sources[0].new_empty(sum(n for _, n in ranges), sum(x[0].numel() for x in sources))
    for target, x in zip(_unpack(packed, sources), sources, strict=True):
        done = 0
        for first, n in ranges:
            target[done : done + n] = x[first : first + n]
            done += n
    return packed


def _unpack(packed: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """`[S, H · (D + Dv)]` -> keys `[S, H, D]` and values `[S, H, Dv]`, views."""
    widths = [x[0].numel() for x in like]
    parts = zip(packed.split(widths, 1), like, strict=True)
    return [part.unflatten(1, x.shape[1:]) for part, x in parts]


def _copy_ranges(
    targets: Sequence[Tensor], sources: Sequence[Tensor], ranges: Ranges, *, first_token: int
) -> None:
    """Copy the ranges that lie in the sources, whose first token has index `first_token`."""
    for token, _, n, key in ranges:
        first = token - first_token
        if 0 <= first < len(sources[0]):
            for target, x in zip(targets, sources, strict=True):
                target[key : key + n] = x[first : first + n]


def _leading_single_tokens(own_ranges: Ranges, arrivals: Ranges) -> int:
    """The largest n such that own tokens 0:n are keys 0:n, needed by no other piece of the row."""
    if not own_ranges or own_ranges[0][0] or own_ranges[0][3]:
        return 0
    others = [token for token, *_ in (*own_ranges[1:], *arrivals)]
    return min([own_ranges[0][2], *others])


def _rows(table: Tensor) -> list[list[int]]:
    """Without spare rows, of no tokens."""
    return [row for row in table.tolist() if row[2]]


def _tokens_per_rank(ranges: Ranges, ranks: int) -> list[int]:
    """How many tokens of each rank the ranges have."""
    counts = [0] * ranks
    for _, rank, n, *_ in ranges:
        counts[rank] += n
    return counts


def _all_to_all(x: Tensor, receives: list[int], sends: list[int], group: Any) -> Tensor:
    from torch.distributed._functional_collectives import all_to_all_single

    return all_to_all_single(x, receives, sends, group)


def _wait_for(x: Tensor) -> Tensor:
    from torch.distributed._functional_collectives import wait_tensor

    arrived: Tensor = wait_tensor(x)
    return arrived
