"""Ulysses: each rank attends over the whole row with 1/P of the heads, on any backend.

Each of P ranks holds T/P tokens of one packed row, with all heads. For attention, the ranks
exchange data: each rank receives all T tokens of H/P heads, attends over the whole row as a single
GPU would, and sends the outputs back. The rest of the model is token-wise, without communication.
`patch_model(..., sequence_parallel_group=)` applies this to a model's layers.

Source: Jacobs et al., DeepSpeed Ulysses (arXiv 2309.14509).

Shapes: P = ranks, T = tokens of the whole row, H = num_heads, Hkv = num_kv_heads, D = head_dim.

Imports: torch. Never transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from einops import rearrange
from torch import Tensor

from flexvarlen.attention.api import packed_attention
from flexvarlen.layout.packed_layout import PackedLayout

if TYPE_CHECKING:  # not available in a torch built without distributed
    from torch.distributed import ProcessGroup


def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: PackedLayout,
    *,
    group: ProcessGroup | None = None,
    **options: Any,
) -> Tensor:
    """Compute `packed_attention` on a row whose tokens are sharded in order over a group's ranks.

    Args:
        q: `[T/P, H, D]`: rank r holds tokens r·T/P to (r+1)·T/P.
        k, v: `[T/P, Hkv, D]`.
        layout: the documents of the whole row (all T tokens), identical on every rank.
        group: the ranks; None: all.
        options: as in `packed_attention`, except `layout_k` and `return_lse`; pass all `sinks`.

    Returns:
        `[T/P, H, D]`. Differentiable. The gradient of a replicated parameter, including sinks, is
        partial; sum it over the ranks. No sync except the exchange: four all-to-alls per
        forward and four per backward. Traces under `fullgraph=True`.

    H must be a multiple of P. If Hkv is not, the KV heads are replicated: if Hkv divides P, each
    rank gets the single KV head that its query heads share; otherwise it gets one KV head per
    query head.

    Raises:
        ValueError: T is not P times the local tokens, or H is not a multiple of P.
        NotImplementedError: an option is given that cannot be sharded by heads.
    """
    size = dist.get_world_size(group)
    refused = [name for name in ("layout_k", "return_lse") if options.get(name)]
    if refused:
        raise NotImplementedError(
            f"ulysses_attention has no {', '.join(refused)}; attend on one rank, or leave it out."
        )
    if q.shape[0] * size != layout.total_tokens:
        raise ValueError(
            f"layout must cover the {q.shape[0]} tokens of each of {size} ranks, got "
            f"{layout.total_tokens} tokens; build it for the whole row, and shard the row evenly."
        )

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        out = packed_attention(q, k, v, layout, sinks=sinks, **options)
        assert isinstance(out, Tensor)
        return out

    return attend_sharded(q, k, v, options.pop("sinks", None), attend, group)


def attend_sharded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    attend: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor],
    group: ProcessGroup | None,
) -> Tensor:
    """Exchange this rank's tokens for its heads, attend over the whole row, and exchange back.

    Args:
        q, k, v: as in `ulysses_attention`.
        sinks: `[H]` or None.
        attend: called with q `[T, H/P, D]`, and the k, v and sinks of these heads.
        group: the ranks; None: all.
    """
    size, kv_heads = dist.get_world_size(group), k.shape[1]
    _, own_kv_heads = heads_per_rank(q.shape[1], kv_heads, size)
    if own_kv_heads * size != kv_heads:
        k, v = (x.repeat_interleave(own_kv_heads * size // kv_heads, dim=1) for x in (k, v))
    if size == 1:
        return attend(q, k, v, sinks)
    if sinks is not None:
        sinks = sinks.chunk(size)[dist.get_rank(group)]
    on_their_way = [_heads_for_tokens(x, size, group) for x in (q, k, v)]
    all_q, all_k, all_v = (_wait_for(x) for x in on_their_way)
    return _tokens_for_heads(attend(all_q, all_k, all_v, sinks), size, group)


def heads_per_rank(num_heads: int, num_kv_heads: int, size: int) -> tuple[int, int]:
    """Return the number of query heads and of KV heads on each of `size` ranks.

    Raises:
        ValueError: `num_heads` is not a multiple of `size`.

    >>> heads_per_rank(32, 8, 4), heads_per_rank(32, 2, 4), heads_per_rank(12, 3, 4)
    ((8, 2), (8, 1), (3, 3))
    """
    if num_heads % size:
        raise ValueError(
            f"num_heads must be a multiple of the {size} ranks, got {num_heads}; use a group whose "
            "size divides it."
        )
    if num_kv_heads % size == 0:
        return num_heads // size, num_kv_heads // size
    return num_heads // size, 1 if size % num_kv_heads == 0 else num_heads // size


def shard_tokens(x_T: Tensor, group: ProcessGroup | None) -> Tensor:
    """Return a view of this rank's tokens, `[T, …]` -> `[T/P, …]`; traces with constant slices."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    tokens = x_T.shape[0] // size
    return x_T[rank * tokens : (rank + 1) * tokens]


def _heads_for_tokens(x: Tensor, size: int, group: ProcessGroup | None) -> Tensor:
    """Send block r of the heads to rank r: `[T/P, H, D]` -> `[T, H/P, D]`."""
    blocks = _all_to_all(rearrange(x, "t (p h) d -> p t h d", p=size), group)
    return rearrange(blocks, "p t h d -> (p t) h d")


def _tokens_for_heads(x: Tensor, size: int, group: ProcessGroup | None) -> Tensor:
    """Send block r of the tokens to rank r: `[T, H/P, D]` -> `[T/P, H, D]`."""
    blocks = _all_to_all(rearrange(x, "(p t) h d -> p t h d", p=size), group)
    return rearrange(_wait_for(blocks), "p t h d -> t (p h) d")


def _all_to_all(blocks: Tensor, group: ProcessGroup | None) -> Tensor:
    """Exchange blocks of `[P, …]`: send block r to rank r and receive one from it; may be async."""
    from torch.distributed._functional_collectives import all_to_all_single_autograd

    where = dist.group.WORLD if group is None else group
    assert where is not None
    return all_to_all_single_autograd(blocks.contiguous(), None, None, where)


def _wait_for(x: Tensor) -> Tensor:
    """Wait for the exchange, as FlexAttention does not accept an AsyncCollectiveTensor."""
    if torch.compiler.is_compiling():  # compiled graphs insert the wait themselves
        return x
    arrived: Tensor = _Wait.apply(x)  # type: ignore[no-untyped-call]
    return arrived


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        from torch.distributed._functional_collectives import wait_tensor

        arrived: Tensor = wait_tensor(x)
        return arrived

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient
