"""`gather_keys`: the keys and values of a row's cut documents, from the ranks that hold them.

One all-to-all in the forward, and one in the backward that returns the gradients, those of each
piece that attends to a key. The rank that holds the key sums them, in fp32 and in a fixed order.

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
    tables = exchange.runs, exchange.sends, exchange.received, exchange.returns
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
    returns: Tensor,
    num_keys: int,
    group: str,
) -> tuple[Tensor, Tensor]:
    """`gather_keys` as an operator, so that no shape of a graph is the number of tokens sent."""
    own, ranges = (k_CHD, v_CHD), sends.tolist()
    sent = _side_by_side(own, [(token, n) for token, _, n in ranges])
    arriving = _all_to_all(sent, received.tolist(), _by_rank(ranges, len(received)), group)
    gathered = [x.new_empty(num_keys, *x.shape[1:]) for x in own]
    _copy_runs(gathered, own, runs, first_token=0)  # while the others are on their way
    filled = max(key + tokens for *_, tokens, key in runs.tolist())
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
    returns: Tensor,
    num_keys: int,
    group: str,
) -> tuple[Tensor, Tensor]:
    return k_CHD.new_empty(num_keys, *k_CHD.shape[1:]), v_CHD.new_empty(num_keys, *v_CHD.shape[1:])


@torch.library.custom_op("flexvarlen::gather_keys_backward", mutates_args=(), tags=NOT_CAPTURED)
def gather_keys_backward(
    dk_KHD: Tensor,
    dv_KHD: Tensor,
    runs: Tensor,
    returns: Tensor,
    ranks: int,
    tokens: int,
    group: str,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of received keys, and sum those of the rank's own keys, in fp32.

    The leading tokens that only one piece of the row attends to are copied without that sum.
    """
    assert dk_KHD.dtype == dv_KHD.dtype
    gradients, all_runs, comes_back = (dk_KHD, dv_KHD), runs.tolist(), returns.tolist()
    own_runs = [run for run in all_runs if run[0] < tokens]
    of_others = [run for run in all_runs if run[0] >= tokens]
    sent = _side_by_side(gradients, [(key, n) for *_, n, key in of_others])
    arriving = _all_to_all(sent, _by_rank(comes_back, ranks), _by_rank(of_others, ranks), group)
    # while the others are on their way
    unshared = _leading_unshared_tokens(own_runs, comes_back, tokens)
    own = [x.new_empty(tokens, *x.shape[1:]) for x in gradients]
    for target, x in zip(own, gradients, strict=True):
        target[:unshared] = x[:unshared]
    wide = torch.promote_types(dk_KHD.dtype, torch.float32)
    summed = dk_KHD.new_zeros(tokens - unshared, sum(x[0].numel() for x in own), dtype=wide)
    for token, _, n, key in own_runs:
        skip = max(0, min(unshared - token, n))
        for sums, x in zip(_split(summed, own), gradients, strict=True):
            sums[token + skip - unshared :][: n - skip] += x[key + skip : key + n]
    grads_from_others, done = _wait_for(arriving), 0
    for token, _, n in comes_back:  # rank after rank
        summed[token - unshared :][:n] += grads_from_others[done : done + n]
        done += n
    for target, sums in zip(own, _split(summed, own), strict=True):
        target[unshared:] = sums
    return own[0], own[1]


@gather_keys_backward.register_fake
def _(
    dk_KHD: Tensor,
    dv_KHD: Tensor,
    runs: Tensor,
    returns: Tensor,
    ranks: int,
    tokens: int,
    group: str,
) -> tuple[Tensor, Tensor]:
    return dk_KHD.new_empty(tokens, *dk_KHD.shape[1:]), dv_KHD.new_empty(tokens, *dv_KHD.shape[1:])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    k_CHD, _, runs, _, received, returns, _, group = inputs
    ctx.save_for_backward(runs, returns)
    ctx.options = received.shape[0], k_CHD.shape[0], group


def _backward(ctx: Any, dk_KHD: Tensor, dv_KHD: Tensor) -> tuple[Tensor | None, ...]:
    dk_CHD, dv_CHD = gather_keys_backward(dk_KHD, dv_KHD, *ctx.saved_tensors, *ctx.options)
    return dk_CHD, dv_CHD, None, None, None, None, None, None


gather_keys_forward.register_autograd(_backward, setup_context=_save)


def _side_by_side(sources: Sequence[Tensor], ranges: Sequence[tuple[int, int]]) -> Tensor:
    """`[S, 2 · Hkv · D]`: ranges (first token, tokens) of the sources, one after another."""
    rows = sources[0].new_empty(sum(n for _, n in ranges), sum(x[0].numel() for x in sources))
    for target, x in zip(_split(rows, sources), sources, strict=True):
        done = 0
        for begin, n in ranges:
            target[done : done + n] = x[begin : begin + n]
            done += n
    return rows


def _copy_runs(
    targets: Sequence[Tensor], sources: Sequence[Tensor], runs: Tensor, *, first_token: int
) -> None:
    """Copy the runs whose tokens are those of the sources."""
    for token, _, n, key in runs.tolist():
        begin = token - first_token
        if 0 <= begin < len(sources[0]):
            for target, x in zip(targets, sources, strict=True):
                target[key : key + n] = x[begin : begin + n]


def _leading_unshared_tokens(runs: CopyRanges, returns: CopyRanges, tokens: int) -> int:
    """How many of the first own tokens are the first keys, too, and no others, here or there."""
    others = [token for token, _, n, *_ in (*runs[1:], *returns) if n]
    return min([runs[0][2], tokens, *others])


def _split(x: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """`[…, 2 · Hkv · D]` -> keys and values `[…, Hkv, D]`, views."""
    widths = [y[0].numel() for y in like]
    return [
        part.unflatten(1, y.shape[1:]) for part, y in zip(x.split(widths, 1), like, strict=True)
    ]


def _by_rank(ranges: Sequence[Sequence[int]], ranks: int) -> list[int]:
    """How many tokens the ranges (token, rank, tokens, …) have of each rank."""
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
