"""`shard_row` gives each rank its part of a batch that holds one packed row.

Shapes: P = ranks, T = tokens of the whole row.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from itertools import pairwise
from numbers import Number
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from flexvarlen.layout.arguments import require_int_at_least
from flexvarlen.layout.labels import (
    IGNORE_INDEX,
    LABEL_COUNTS,
    LABELS,
    int64_labels,
    why_not_ignore_index,
    why_not_labels,
)
from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.layout.routed_experts import ROUTED_EXPERTS
from flexvarlen.parallel.plan import plan_row
from flexvarlen.parallel.sharded_layout import sharded_layout
from flexvarlen.parallel.trees import own_trees

if TYPE_CHECKING:  # not available in a torch built without distributed
    from torch.distributed import ProcessGroup

Method = Literal["documents", "contiguous"]


def shard_row(
    batch: Mapping[str, Any],
    group: ProcessGroup | None = None,
    *,
    method: Method = "documents",
    causal: bool = True,
    window: int | None = None,
) -> dict[str, Any]:
    """Shard a batch that holds one packed row and is replicated on every rank.

    Args:
        batch: `packed_layout` over T tokens, with T a multiple of P; `input_ids` and other `[1, T]`
            columns with one value per token (`labels`, -100 where there is none, `position_ids`);
            `routed_experts` `[1, T, M, K]`; and numbers. Trees, as `TreeCollator` makes them, lie
            whole on a rank, and the ranks exchange nothing.
        group: the ranks; None: all.
        method: "documents" keeps whole documents on one rank, and cuts at most P - 1 (more if not
            causal), whose keys the ranks exchange in attention; "contiguous" gives a rank T/P
            consecutive tokens, for models with recurrent layers, whose state passes from rank to
            rank.
        causal: False for a model with bidirectional attention, whose labels are the tokens' own.
        window: the widest sliding window of the model's layers, which see the tokens less than this
            many away. Without it those of causal layers receive all keys, and others raise.

    Returns:
        This rank's batch, for a model patched with `sequence_parallel_group=group`. Tensors are
        `[1, T/P]`; `position_ids` count in the documents. If `labels` or `shift_labels` is given,
        there is also `num_items_in_batch` (unless given), an integer tensor: the row's number of
        unmasked labels; and with causal attention `shift_labels`, the label of each next token of
        the document (which another rank may have) or those given, masked where there is none. Of
        trees `num_items_in_batch` is the sum of `label_counts`. Numbers are returned unchanged.
        `packed_layout` is that of the rank's own tokens.

    The losses of the ranks then sum to the mean loss over the whole row, and their gradients sum
    likewise. DDP averages gradients over ranks, so multiply the loss by the number of ranks.

    Raises:
        ValueError: there is no layout or that of a shard, a tensor is not one row of T tokens, T is
            0 or not a multiple of P, a label is negative and not -100, trees do not fit, the ranks
            hold different rows or documents (every rank raises, as a collective compares what they
            found), this process is not in the group, `method` is unknown, or `window` is not
            positive.

    All ranks of the group call it. Syncs if tensors are on a device.

    >>> model = fv.patch_model(model, sequence_parallel_group=group)  # doctest: +SKIP
    >>> loss = model(**fv.shard_row(batch, group)).loss  # doctest: +SKIP
    """
    size = dist.get_world_size(group)
    if size < 1:
        raise ValueError(
            "group must be one that this process is in, got one of other ranks; pass its own, "
            "mesh.get_group(name) of a DeviceMesh."
        )
    options = {"method": method, "causal": causal, "window": window}
    _require_same_row(batch, options, _why_no_row(batch, size), group)
    return shard_batch(batch, dist.get_rank(group), size, **options)  # type: ignore[arg-type]


def shard_batch(
    batch: Mapping[str, Any],
    rank: int,
    ranks: int,
    *,
    method: Method = "documents",
    causal: bool = True,
    window: int | None = None,
) -> dict[str, Any]:
    """`shard_row` without communication, for collators and their workers.

    Args:
        batch, method, causal, window: as in `shard_row`.
        rank: of the shard.
        ranks: that share the row, P.

    Returns:
        As `shard_row`.

    Raises:
        ValueError: as `shard_row`; but nothing compares the ranks' rows.
    """
    if not 0 <= rank < ranks:
        raise ValueError(
            f"rank must be that of one of the {ranks} ranks that share the row, got {rank}; pass "
            "dist.get_rank(group) of a group that this process is in."
        )
    refusal = _why_no_row(batch, ranks)
    if refusal is not None:
        raise ValueError(refusal)
    _check_options(method, window)
    layout: PackedLayout = batch["packed_layout"]
    if _has_trees(batch):
        here, own = own_trees(layout, _documents_of(layout), rank, ranks)
    else:
        contiguous = method == "contiguous"
        documents = _documents_of(layout)
        lengths, total = [stop - start for start, stop in documents], layout.total_tokens
        plan = plan_row(lengths, ranks, total_tokens=total, contiguous=contiguous, causal=causal)
        order = torch.from_numpy(plan.order([start for start, _ in documents]))
        here = order.view(ranks, -1)[rank]
        own = sharded_layout(plan, rank, device=layout.device, window=window)
    row = _completed(batch, causal=causal)
    shard = {name: x if _is_replicated(x) else x[:, here.to(x.device)] for name, x in row.items()}
    return shard | {"packed_layout": own}


def _check_options(method: str, window: int | None) -> None:
    if method not in get_args(Method):
        names = ", ".join(map(repr, get_args(Method)))
        raise ValueError(f"method must be one of {names}, got {method!r}; choose one.")
    if window is not None:
        require_int_at_least("window", window, 1)


def _has_trees(batch: Mapping[str, Any]) -> bool:
    """Whether `TreeCollator` made the batch; also where no samples of it share a prefix."""
    return batch["packed_layout"].segments is not None or LABEL_COUNTS in batch


def _completed(batch: Mapping[str, Any], *, causal: bool) -> dict[str, Any]:
    """The row with what a shard alone cannot tell: positions, next labels, their number."""
    layout: PackedLayout = batch["packed_layout"]
    row = {**batch, **{name: int64_labels(batch[name]) for name in LABELS if name in batch}}
    counts: Tensor | None = None
    if _has_trees(batch):  # whose positions the model makes
        if LABEL_COUNTS in row and "shift_labels" in row:
            counts = row[LABEL_COUNTS] * (row["shift_labels"] != IGNORE_INDEX)
    else:
        in_document = layout.position_ids() * layout.real_tokens()
        row.setdefault("position_ids", in_document[None])
        if causal and ("labels" in row or "shift_labels" in row):
            row["shift_labels"] = _next_labels(row)
        labels = row.get("shift_labels" if causal else "labels")
        counts = None if labels is None else labels != IGNORE_INDEX
    if counts is not None:
        row.setdefault("num_items_in_batch", counts.sum())
    return row


def _next_labels(batch: Mapping[str, Any]) -> Tensor:
    """`[1, T]`: the label of each token's next token, masked where its document has none."""
    layout: PackedLayout = batch["packed_layout"]
    given = batch.get("shift_labels")
    shifted: Tensor = batch["labels"][0].roll(-1) if given is None else given[0]
    # The row's first token starts a document or is padding, so roll also masks the last label.
    in_no_loss = ((layout.position_ids() == 0) | ~layout.real_tokens()).roll(-1)
    shifted = shifted.masked_fill(in_no_loss.to(shifted.device), IGNORE_INDEX)
    return shifted[None]


def _documents_of(layout: PackedLayout) -> list[tuple[int, int]]:
    """The first token of each document that has tokens, and one past its last."""
    boundaries = layout.cu_seqlens_host
    starts = (layout.cu_seqlens if boundaries is None else boundaries).tolist()
    padding = [False] * layout.total_tokens if layout.padding is None else layout.padding.tolist()
    return [(a, b) for a, b in pairwise(starts) if a < b and not padding[a]]


def _is_replicated(x: Any) -> bool:
    """Return whether every rank gets the value unchanged: the layout, or a number."""
    return isinstance(x, (PackedLayout, Number)) or (isinstance(x, Tensor) and x.ndim == 0)


def _why_no_row(batch: Mapping[str, Any], size: int) -> str | None:
    """Return why a batch cannot be sharded over `size` ranks, or None."""
    if not isinstance(batch, Mapping):
        return (
            f"batch must be a mapping with packed_layout on every rank, got {type(batch).__name__};"
            " give all ranks of a group the same row."
        )
    layout = batch.get("packed_layout")
    if not isinstance(layout, PackedLayout):
        return (
            "batch must have its documents as packed_layout, a PackedLayout, got "
            f"{type(layout).__name__}; use PackedCollator or PackedLayout.from_lengths."
        )
    if not layout.shard.is_whole:
        return (
            f"packed_layout must be that of a whole row, got the shard of rank {layout.shard.rank} "
            f"of {layout.shard.ranks}; shard each row once."
        )
    tokens = layout.total_tokens
    if tokens % size or not tokens:
        return (
            f"total_tokens must be a positive multiple of the {size} ranks, got {tokens}; pad the "
            "row: pass such a total_tokens to PackedCollator or PackedLayout.from_lengths."
        )
    for name, x in batch.items():
        is_shared = _is_replicated(x) and name not in LABELS
        of_tokens = isinstance(x, Tensor) and (
            x.shape[:2] if name == ROUTED_EXPERTS else x.shape
        ) == (1, tokens)
        if not is_shared and not of_tokens:
            shape: Sequence[int] | str = (
                list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            )
            return f"{name} must be one row, [1, {tokens}], got {shape}; remove it."
    of_labels = (why_not_labels(name, batch[name]) for name in LABELS if name in batch)
    whys = (why_not_ignore_index(batch.get("ignore_index")), *of_labels)
    return next((why for why in whys if why is not None), None)


def _require_same_row(
    batch: Mapping[str, Any],
    options: dict[str, Any],
    refusal: str | None,
    group: ProcessGroup | None,
) -> None:
    """Raise unless all ranks have the same row and options, as a loader may mix rows. Syncs.

    A rank whose batch is refused still takes part in the collective, so the others do not hang.
    """
    mine = ""
    if refusal is None:
        layout = batch["packed_layout"]
        numbers = {name: x for name, x in batch.items() if isinstance(x, Number)}
        tensors = {name: x for name, x in batch.items() if isinstance(x, Tensor)}
        tensors |= {"document_ids": layout.document_ids(), "real_tokens": layout.real_tokens()}
        if layout.segments is not None:
            tensors["segments"] = layout.segments.table
        found = numbers | {name: checksum(x) for name, x in tensors.items()}
        mine = repr(sorted(found.items()))
    others: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(others, (refusal, options, mine), group=group)
    refusal = next((theirs for theirs, *_ in others if theirs is not None), None)
    if refusal is not None:
        raise ValueError(refusal)
    for rank, (_, their_options, theirs) in enumerate(others):
        if their_options != options:
            raise ValueError(
                f"the options must be the same on every rank of the group, {options}, got "
                f"{their_options} on rank {rank}; pass fv.shard_options(model) on each."
            )
        if theirs != mine:
            raise ValueError(
                "batch must be the same row on every rank of the group, got another on rank "
                f"{rank}; give all ranks of a group the same data: let its sampler assign rows to "
                "groups (num_replicas=, rank=)."
            )


def checksum(*tensors: Tensor) -> int:
    """CRC-32 of the tensors' bytes. Syncs if they are on a device."""
    found = 0
    for x in tensors:
        numbers_T = x.detach().cpu().contiguous().reshape(-1)
        found = zlib.crc32(numbers_T.view(torch.uint8).numpy().tobytes(), found)  # no bf16 in numpy
    return found
