"""Sequence parallelism in a patched model: checks of the group and of the forward's inputs.

Each rank runs the model on its shard of one row; only in attention and recurrent layers do the
ranks exchange anything (`flexvarlen.parallel`). So nothing else may depend on a token's position in
the row, and only the layout of the shard gives the documents.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flexvarlen.layout.labels import LABEL_COUNTS, SAMPLE_COUNTS, tree_loss
from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.layout.row_split import RowSplit
from flexvarlen.patches.forward.heads import user_loss
from flexvarlen.patches.forward.inputs import CACHE_NAMES
from flexvarlen.patches.models.heads import CAUSAL, PER_DOCUMENT, PER_ROW, PER_TOKEN
from flexvarlen.patches.why_not import ROUTER_LOGITS_OF_A_SHARD

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from flexvarlen.patches.forward.inputs import ForwardInputs
    from flexvarlen.patches.parts import ModelParts


def check_group(group: Any) -> None:
    """Raise ValueError unless it is a group of ranks, and this process is one of them."""
    if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
        raise ValueError(
            "sequence_parallel_group must be a torch.distributed ProcessGroup that this process is "
            f"in, got {type(group).__name__}; pass torch.distributed.group.WORLD, or "
            "mesh.get_group(name) of a DeviceMesh."
        )


_OF_WHOLE_ROWS = ("attention_mask", *CACHE_NAMES, "use_cache", "logits_to_keep")


def prepare_shard(forward: ForwardInputs, group: ProcessGroup) -> None:
    """Check a forward's keyword arguments, and build missing position_ids of this shard.

    Raises:
        ValueError: documents are given by anything but the layout; the layout is not that of the
            shard, or is for another kind of layers; other tensors are not those of the shard; or
            the loss would be a mean over this rank alone.
        NotImplementedError: the loss of a router, or of a head that pools documents.

    Reads shapes only. That all ranks hold the same layout is checked by `shard_row`, not here.
    """
    inputs, boundaries, tokens = forward.inputs, forward.boundaries, forward.tokens
    others = {name: x for name, x in boundaries.items() if name != "packed_layout"}
    others |= {name: inputs.get(name) for name in _OF_WHOLE_ROWS}
    for name, given in others.items():
        if given is not None and not (isinstance(given, int) and given == 0):
            raise ValueError(
                f"{name} must be left out under sequence_parallel_group, got it with a shard of a "
                "row: packed_layout alone gives its documents and padding, and nothing is cached "
                "or generated; call fv.shard_row on a batch with packed_layout, or unpatch_model."
            )
    layout, (batch, row_tokens) = boundaries["packed_layout"], tokens.shape[:2]
    if not isinstance(layout, PackedLayout) or layout.shard.is_whole:
        given = repr(layout) if isinstance(layout, PackedLayout) else type(layout).__name__
        raise ValueError(
            "packed_layout must be that of this rank's shard under sequence_parallel_group, got "
            f"{given}; call fv.shard_row on a batch that has one, or run whole rows inside `with "
            "fv.patched(model):`."
        )
    _check_layout(layout, batch, row_tokens, tokens.device, group)
    _check_attention(layout.shard, forward.parts)
    _check_pooling(forward)
    for name in ("position_ids", "labels", "shift_labels", LABEL_COUNTS, SAMPLE_COUNTS):
        given = inputs.get(name)
        if given is not None and given.shape != (1, row_tokens):
            raise ValueError(
                f"{name} must be those of the shard, [1, {row_tokens}], got {list(given.shape)}; "
                "call fv.shard_row on the whole row."
            )
    if inputs.get("labels") is not None:
        _check_loss(forward)
    if forward.returns_router_logits:
        raise NotImplementedError(ROUTER_LOGITS_OF_A_SHARD)
    if layout.segments is None and inputs.get(LABEL_COUNTS) is None:
        _set_positions(layout, forward)
    elif inputs.get(LABEL_COUNTS) is not None and inputs.get("num_items_in_batch") is None:
        raise ValueError(
            "label_counts of a shard must come with num_items_in_batch, the labels of the whole "
            "row, got none; call fv.shard_row, which counts them."
        )


def _set_positions(layout: PackedLayout, forward: ForwardInputs) -> None:
    """Build missing position_ids, and add the first position to those that count from 0."""
    positions = layout.position_ids() * layout.real_tokens()  # every table has 0, for padding
    given: Tensor | None = forward.inputs.get("position_ids")
    position_ids = positions[None] if given is None else given
    first = forward.parts.first_position  # RoBERTa's is not 0
    if first:
        position_ids = position_ids + first * (position_ids[:, :1] == positions[:1])
    forward.inputs["position_ids"] = position_ids


def _check_pooling(forward: ForwardInputs) -> None:
    """Raise where documents are pooled."""
    module, head = forward.module, forward.parts.head
    if head in (*PER_DOCUMENT, *PER_ROW) or module._modules.get("pooler") is not None:
        raise NotImplementedError(
            f"{type(module).__name__} pools documents, which may be cut over the ranks; give each "
            "rank rows of its own, or call the base model (of BERT with add_pooling_layer=False), "
            "and pool what you gather of all ranks."
        )


def _check_layout(
    layout: PackedLayout, batch: int, row_tokens: int, device: torch.device, group: ProcessGroup
) -> None:
    """Raise unless the layout is that of the tokens, and of this rank."""
    if batch != 1 or layout.total_tokens != row_tokens or layout.device != device:
        raise ValueError(
            f"packed_layout must cover the shard's {row_tokens} tokens on {device}, and input_ids "
            f"be [1, {row_tokens}], got {layout.total_tokens} tokens on {layout.device} and "
            f"{batch} rows; call fv.shard_row on the whole row."
        )
    shard, rank, ranks = layout.shard, dist.get_rank(group), dist.get_world_size(group)
    if (shard.rank, shard.ranks) != (rank, ranks):
        raise ValueError(
            f"packed_layout must be the shard of rank {rank} of {ranks}, got that of rank "
            f"{shard.rank} of {shard.ranks}; call fv.shard_row with the group of the model."
        )


def _check_attention(shard: RowSplit[PackedLayout], parts: ModelParts) -> None:
    """Raise unless the shard was made for the model's kinds of layers."""
    if parts.recurrent and shard.splits_documents and shard.links is None:
        raise ValueError(
            "a model with recurrent layers must get the next tokens of the row on each rank, got "
            "another shard; call fv.shard_row(batch, group, **fv.shard_options(model))."
        )
    for kind in parts.kinds:
        why = shard.why_not(causal=kind.causal, window=kind.window)
        if why is not None:
            raise ValueError(why)


def _check_loss(forward: ForwardInputs) -> None:
    """Raise unless the losses of the shards sum to the loss of the row."""
    head, inputs = forward.parts.head, forward.inputs
    if head in CAUSAL:
        _check_loss_of_next_tokens(forward.module, inputs)
    elif head not in PER_TOKEN or forward.parts.causal or user_loss(forward.module) is not None:
        raise NotImplementedError(
            "labels must be next tokens under sequence_parallel_group, or those of an encoder's "
            f"own tokens without a loss function of your own, got those of a head {head}; take the "
            "sum of the losses of its logits yourself, divided by the labels of the row."
        )
    elif inputs.get("shift_labels") is not None or inputs.get("num_items_in_batch") is None:
        raise ValueError(
            "labels of a shard must come with num_items_in_batch, the labels of the whole row, and "
            f"without shift_labels under a head {head}, whose labels are the tokens' own; call "
            "fv.shard_row(batch, group, **fv.shard_options(model))."
        )
    elif False in (inputs.get("return_dict"), forward.config.return_dict):
        raise ValueError(
            "return_dict must stay True with labels of a shard, got False; leave it out."
        )


def pop_shard_labels(forward: ForwardInputs) -> Callable[[Tensor], Tensor] | None:
    """Pop a shard's labels of its own tokens, as most heads take the mean over them.

    Returns:
        logits -> the shard's part of the loss of the row; None without such labels.
    """
    inputs = forward.inputs
    if forward.parts.head in CAUSAL or inputs.get("labels") is None:
        return None
    labels = inputs.pop("labels")
    return functools.partial(
        tree_loss,
        shift_labels=labels,
        label_counts=torch.ones_like(labels),
        num_items_in_batch=inputs.pop("num_items_in_batch"),
    )


def _check_loss_of_next_tokens(module: nn.Module, inputs: dict[str, Any]) -> None:
    if inputs.get("shift_labels") is None or inputs.get("num_items_in_batch") is None:
        raise ValueError(
            "labels of a shard must come with shift_labels, whose last one is the next shard's "
            "first token, and num_items_in_batch, the labels of the whole row, got labels without; "
            "call fv.shard_row, which makes both."
        )
    loss = user_loss(module)
    if loss is not None:
        missing = {"shift_labels", "num_items_in_batch"} - set(inspect.signature(loss).parameters)
        if missing:
            raise ValueError(
                "model.loss_function must have parameters shift_labels and num_items_in_batch "
                f"under sequence_parallel_group, got one without {', '.join(sorted(missing))}: it "
                "would shift labels inside the shard, or take a mean over it; take the sum over "
                "shift_labels, divided by num_items_in_batch."
            )
