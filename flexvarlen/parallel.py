"""Ulysses sequence parallelism, for rows too long for one GPU, on any backend.

Each of P ranks holds T/P tokens of one packed row, with all heads. For attention, the ranks
exchange data: each rank receives all T tokens of H/P heads, attends over the whole row as a single
GPU would, and sends the outputs back. The rest of the model is token-wise, without communication.
`patch_model(..., sequence_parallel_group=)` applies this to a model's layers, and `shard_row`
shards a batch.

Source: Jacobs et al., DeepSpeed Ulysses (arXiv 2309.14509).

Shapes: P = ranks, T = tokens of the whole row, H = num_heads, Hkv = num_kv_heads, D = head_dim.

Imports: torch. Never transformers.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
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


def shard_row(
    batch: Mapping[str, Any],
    group: ProcessGroup | None = None,
    *,
    ignore_index: int = -100,
) -> dict[str, Any]:
    """Shard a batch that holds one packed row and is replicated on every rank.

    Args:
        batch: `packed_layout` over T tokens, with T a multiple of P; `input_ids` and other `[1, T]`
            columns with one value per token (`labels`, `position_ids`); and numbers.
        group: the ranks; None: all.
        ignore_index: the label that the loss ignores.

    Returns:
        This rank's batch, for a model patched with `sequence_parallel_group=group`. Tensors are
        `[1, T/P]`. If `labels` is given, there are also `shift_labels`, the label of each next
        token (the last one comes from the next rank) or those given, masked where the next token
        starts a document, and `num_items_in_batch` (unless given), an integer tensor: the row's
        number of unmasked labels. `packed_layout` and numbers are returned unchanged.

    The losses of the ranks then sum to the mean loss over the whole row, and their gradients sum
    likewise. DDP averages gradients over ranks, so multiply the loss by the number of ranks.

    Raises:
        ValueError: there is no layout, a tensor is not one row of T tokens, T is not a multiple of
            P, the ranks hold different rows or documents (a collective compares them, so every rank
            raises), or this process is not in the group.

    Runs one collective. Syncs if tensors are on a device.

    >>> model = fv.patch_model(model, sequence_parallel_group=group)  # doctest: +SKIP
    >>> loss = model(**fv.shard_row(batch, group)).loss  # doctest: +SKIP
    """
    size = dist.get_world_size(group)
    if size < 1:
        raise ValueError(
            "group must be one that this process is in, got one of other ranks; pass its own, "
            "mesh.get_group(name) of a DeviceMesh."
        )
    _require_one_row(batch, _why_no_row(batch, size), group)
    layout: PackedLayout = batch["packed_layout"]
    if layout.segments is not None:
        raise NotImplementedError(
            "shard_row does not cut trees, whose branches would end in other shards; pack each "
            "path as a document."
        )
    found = {
        name: x if _is_whole(x) else shard_tokens(x[0], group)[None] for name, x in batch.items()
    }
    if "labels" in batch:
        given = batch.get("shift_labels")
        shifted = batch["labels"][0].roll(-1) if given is None else given[0]
        # The row's first token starts a document or is padding, so roll also masks the last label.
        in_no_loss = ((layout.position_ids() == 0) | ~layout.real_tokens()).roll(-1)
        shifted = shifted.masked_fill(in_no_loss.to(shifted.device), ignore_index)
        found["shift_labels"] = shard_tokens(shifted, group)[None]
        found.setdefault("num_items_in_batch", (shifted != ignore_index).sum())
    return found


def _is_whole(x: Any) -> bool:
    """Return whether every rank gets the value unchanged: the layout, or a number."""
    return isinstance(x, (PackedLayout, int, float)) or (isinstance(x, Tensor) and x.ndim == 0)


def _why_no_row(batch: Mapping[str, Any], size: int) -> str | None:
    """Return why a batch cannot be sharded over `size` ranks, or None."""
    layout = batch.get("packed_layout")
    if not isinstance(layout, PackedLayout):
        return (
            "batch must have its documents as packed_layout, a PackedLayout, got "
            f"{type(layout).__name__}; use PackedCollator or PackedLayout.from_lengths."
        )
    tokens = layout.total_tokens
    if tokens % size:
        return (
            f"total_tokens must be a multiple of the {size} ranks, got {tokens}; pad the row: pass "
            "such a total_tokens to PackedCollator or PackedLayout.from_lengths."
        )
    for name, x in batch.items():
        if not _is_whole(x) and not (isinstance(x, Tensor) and x.shape == (1, tokens)):
            shape: Sequence[int] | str = (
                list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            )
            return f"{name} must be one row, [1, {tokens}], got {shape}; leave it out."
    return None


def _require_one_row(
    batch: Mapping[str, Any], refusal: str | None, group: ProcessGroup | None
) -> None:
    """Raise unless all ranks have the same row, as a data loader may silently mix rows. Syncs.

    A rank whose batch is refused still takes part in the collective, so the others do not hang.
    """
    mine: Any = refusal
    if refusal is None:
        layout = batch["packed_layout"]
        tensors = {name: x for name, x in batch.items() if isinstance(x, Tensor)}
        tensors |= {"document_ids": layout.document_ids(), "real_tokens": layout.real_tokens()}
        mine = {name: _checksum(x) for name, x in sorted(tensors.items())}
    others: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(others, mine, group=group)
    if refusal is not None:
        raise ValueError(refusal)
    for rank, theirs in enumerate(others):
        if theirs != mine:
            raise ValueError(
                "batch must be the same row on every rank of the group, got another on rank "
                f"{rank}; give all ranks of a group the same data: let its sampler assign rows to "
                "groups (num_replicas=, rank=)."
            )


def _checksum(x: Tensor) -> int:
    numbers_T = x.detach().cpu().contiguous().reshape(-1)
    return zlib.crc32(numbers_T.view(torch.uint8).numpy().tobytes())  # numpy has no bfloat16
