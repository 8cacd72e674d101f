"""`gather_keys`: the keys and values of a row's cut documents, from the ranks that hold them.

One all-to-all in the forward, and one in the backward that returns the gradients. The gradient of a
key is summed over the pieces that attend to it, in fp32 and in a fixed order.

Shapes: C = tokens of a rank, R = tokens received, Tk = gathered keys, Hkv = num_kv_heads,
D = head_dim. Token indices count the C own tokens, then the R received ones.

Imports: torch. Never transformers.
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

CopyRanges = list[list[int]]


def gather_keys(
    k_CHD: Tensor, v_CHD: Tensor, exchange: KeyExchange, group: ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """The keys and values that `exchange.layout_k` describes, from this rank and the others.

    Args:
        k_CHD, v_CHD: `[C, Hkv, D]`, of the rank's own tokens.
        exchange: of this rank.
        group: the ranks; None: all.

    Returns:
        `[Tk, Hkv, D]` each, zero past the last key. Differentiable. All ranks call it and its
        backward, each of which is one collective. No sync; traces under `fullgraph=True`.
    """
    where = dist.group.WORLD if group is None else group
    assert where is not None
    tables = exchange.runs, exchange.sends, exchange.received
    num_keys = exchange.layout_k.total_tokens
    k_KHD, v_KHD = gather_keys_forward(k_CHD, v_CHD, *tables, num_keys, where.group_name)
    return k_KHD, v_KHD


@torch.library.custom_op("flexvarlen::gather_keys_forward", mutates_args=(), tags=NOT_CAPTURED)
def gather_keys_forward(
    k_CHD: Tensor,
    v_CHD: Tensor,
    runs: Tensor,
    sends: Tensor,
    received: Tensor,
    num_keys: int,
    group: str,
) -> tuple[Tensor, Tensor]:
    """`gather_keys` as an operator, so that no shape of a graph is the number of tokens sent."""
    own = k_CHD, v_CHD
    sent = torch.cat([_slices(x, sends).flatten(1) for x in own], 1)
    arriving = _all_to_all(sent, received.tolist(), _counts(sends, received), group)
    gathered = [x.new_empty(num_keys, *x.shape[1:]) for x in own]
    _copy_runs(gathered, own, runs, first_token=0)  # while the others are on their way
    filled = max(key + tokens for _, key, tokens in runs.tolist())
    for x in gathered:
        x[filled:] = 0  # a kernel may multiply what its mask hides by 0
    _copy_runs(gathered, _split(_wait_for(arriving), own), runs, first_token=len(k_CHD))
    return gathered[0], gathered[1]


@gather_keys_forward.register_fake
def _(
    k_CHD: Tensor,
    v_CHD: Tensor,
    runs: Tensor,
    sends: Tensor,
    received: Tensor,
    num_keys: int,
    group: str,
) -> tuple[Tensor, Tensor]:
    return k_CHD.new_empty(num_keys, *k_CHD.shape[1:]), v_CHD.new_empty(num_keys, *v_CHD.shape[1:])


@torch.library.custom_op("flexvarlen::gather_keys_backward", mutates_args=(), tags=NOT_CAPTURED)
def gather_keys_backward(
    dk_KHD: Tensor,
    dv_KHD: Tensor,
    runs: Tensor,
    sends: Tensor,
    received: Tensor,
    tokens: int,
    group: str,
) -> tuple[Tensor, Tensor]:
    """Sum each key's gradients, return those of received keys, and add what comes back, in fp32.

    The leading tokens that only one piece of this rank attends to are copied without that sum.
    """
    assert dk_KHD.dtype == dv_KHD.dtype
    gradients, all_runs = (dk_KHD, dv_KHD), runs.tolist()
    unshared = _leading_unshared_tokens(all_runs, sends.tolist(), tokens)
    indices, width = tokens + int(received.sum()), sum(x[0].numel() for x in gradients)
    wide = torch.promote_types(dk_KHD.dtype, torch.float32)
    summed = dk_KHD.new_zeros(indices - unshared, width, dtype=wide)
    _add_runs(summed, gradients, [run for run in all_runs if run[0] >= tokens], unshared)
    grads_of_received = summed[tokens - unshared :]
    arriving = _all_to_all(grads_of_received, _counts(sends, received), received.tolist(), group)
    # while the others are on their way
    _add_runs(summed, gradients, [run for run in all_runs if run[0] < tokens], unshared)
    own = [x.new_empty(tokens, *x.shape[1:]) for x in gradients]
    for target, x in zip(own, gradients, strict=True):
        target[:unshared] = x[:unshared]
    grads_from_others, done = _wait_for(arriving), 0
    for token, _, n in sends.tolist():  # rank after rank
        summed[token - unshared :][:n] += grads_from_others[done : done + n]
        done += n
    for target, sums in zip(own, _split(summed[: tokens - unshared], own), strict=True):
        target[unshared:] = sums
    return own[0], own[1]


@gather_keys_backward.register_fake
def _(
    dk_KHD: Tensor,
    dv_KHD: Tensor,
    runs: Tensor,
    sends: Tensor,
    received: Tensor,
    tokens: int,
    group: str,
) -> tuple[Tensor, Tensor]:
    return dk_KHD.new_empty(tokens, *dk_KHD.shape[1:]), dv_KHD.new_empty(tokens, *dv_KHD.shape[1:])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    k_CHD, _, *tables, _, group = inputs
    ctx.save_for_backward(*tables)
    ctx.tokens, ctx.group = k_CHD.shape[0], group


def _backward(ctx: Any, dk_KHD: Tensor, dv_KHD: Tensor) -> tuple[Tensor | None, ...]:
    dk_CHD, dv_CHD = gather_keys_backward(dk_KHD, dv_KHD, *ctx.saved_tensors, ctx.tokens, ctx.group)
    return dk_CHD, dv_CHD, None, None, None, None, None


gather_keys_forward.register_autograd(_backward, setup_context=_save)


def _slices(x_CHD: Tensor, sends: Tensor) -> Tensor:
    """The tokens that are sent, `[S, Hkv, D]`."""
    return torch.cat([x_CHD[:0], *(x_CHD[token : token + n] for token, _, n in sends.tolist())])


def _copy_runs(
    targets: Sequence[Tensor], sources: Sequence[Tensor], runs: Tensor, *, first_token: int
) -> None:
    """Copy the runs whose tokens are those of the sources."""
    for token, key, n in runs.tolist():
        begin = token - first_token
        if 0 <= begin < len(sources[0]):
            for target, x in zip(targets, sources, strict=True):
                target[key : key + n] = x[begin : begin + n]


def _add_runs(summed: Tensor, gradients: Sequence[Tensor], runs: CopyRanges, unshared: int) -> None:
    """Add the gradients of these runs to the sums, whose first token is `unshared`."""
    for token, key, n in runs:
        skip = max(0, min(unshared - token, n))
        for sums, x in zip(_split(summed, gradients), gradients, strict=True):
            sums[token + skip - unshared :][: n - skip] += x[key + skip : key + n]


def _leading_unshared_tokens(runs: CopyRanges, sends: CopyRanges, tokens: int) -> int:
    """How many of the first own tokens are the first keys, too, and no others, and are not sent."""
    others = [token for token, _, n in (*runs[1:], *sends) if n]
    return min([runs[0][2], tokens, *others])


def _split(x: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """`[…, 2 · Hkv · D]` -> keys and values `[…, Hkv, D]`, views."""
    widths = [y[0].numel() for y in like]
    return [
        part.unflatten(1, y.shape[1:]) for part, y in zip(x.split(widths, 1), like, strict=True)
    ]


def _counts(sends: Tensor, received: Tensor) -> list[int]:
    """The tokens sent to each rank."""
    counts: list[int] = torch.zeros_like(received).index_add(0, sends[:, 1], sends[:, 2]).tolist()
    return counts


def _all_to_all(x: Tensor, receives: list[int], sends: list[int], group: Any) -> Tensor:
    from torch.distributed._functional_collectives import all_to_all_single

    return all_to_all_single(x, receives, sends, group)


def _wait_for(x: Tensor) -> Tensor:
    from torch.distributed._functional_collectives import wait_tensor

    arrived: Tensor = wait_tensor(x)
    return arrived
