"""Sequence parallelism in a patched model: supported models, and checks of the forward's inputs.

Each rank runs the model on its shard of one row; only attention exchanges heads for tokens and
sees the whole row (`flexvarlen.parallel`). So nothing else may depend on a token's position in the
row, and only the layout of the whole row gives the documents.

Shapes: P ranks, T tokens of the whole row, S = T/P of a shard.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn

from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.parallel.ulysses import shard_tokens
from flexvarlen.patches.forward.heads import user_loss
from flexvarlen.patches.forward.inputs import CACHE_NAMES
from flexvarlen.patches.models.layers import LayerKind
from flexvarlen.patches.why_not import ROUTER_LOGITS_OF_A_SHARD

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from flexvarlen.patches.forward.inputs import ForwardInputs


def kinds_per_rank(kinds: tuple[LayerKind, ...], group: ProcessGroup) -> tuple[LayerKind, ...]:
    """The kinds of a model's layers, with the heads that each rank of the group attends with.

    Raises:
        ValueError: this process is not in the group, or the heads cannot be divided by its ranks.
    """
    if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
        raise ValueError(
            "sequence_parallel_group must be a torch.distributed ProcessGroup that this process is "
            f"in, got {type(group).__name__}; pass torch.distributed.group.WORLD, or "
            "mesh.get_group(name) of a DeviceMesh."
        )
    return tuple(kind.per_rank(dist.get_world_size(group)) for kind in kinds)


_OF_WHOLE_ROWS = ("attention_mask", *CACHE_NAMES, "use_cache", "logits_to_keep")


def prepare_shard(forward: ForwardInputs, group: ProcessGroup) -> None:
    """Check a forward's keyword arguments, and build missing position_ids of this shard.

    Raises:
        ValueError: documents are given by anything but the layout; the layout does not cover P such
            shards; other tensors are not those of the shard; labels lack the next shard's
            first one; or a loss is a mean over this rank only, also in a user's loss function.
        NotImplementedError: an auxiliary loss.

    Reads shapes only. That all ranks hold the same layout is checked by `shard_row`, not here.
    """
    inputs, boundaries, tokens = forward.inputs, forward.boundaries, forward.tokens
    others = {name: x for name, x in boundaries.items() if name != "packed_layout"}
    others |= {name: inputs.get(name) for name in _OF_WHOLE_ROWS}
    for name, given in others.items():
        if given is not None and not (isinstance(given, int) and given == 0):
            raise ValueError(
                f"{name} must be left out under sequence_parallel_group, got it with a shard of a "
                "row: packed_layout of the whole row alone gives its documents and padding, and "
                "nothing is cached or generated; call fv.shard_row on a batch with packed_layout, "
                "or unpatch_model."
            )
    layout = boundaries["packed_layout"]
    size, (batch, row_tokens) = dist.get_world_size(group), tokens.shape[:2]
    if not isinstance(layout, PackedLayout):
        raise ValueError(
            "packed_layout of the whole row must come with each rank's shard under "
            f"sequence_parallel_group, a PackedLayout, got {type(layout).__name__}; call "
            "fv.shard_row on a batch that has one."
        )
    if batch != 1 or layout.total_tokens != size * row_tokens or layout.device != tokens.device:
        raise ValueError(
            f"packed_layout must cover the {row_tokens} tokens of each of {size} ranks on "
            f"{tokens.device}, and input_ids be [1, {row_tokens}], got {layout.total_tokens} "
            f"tokens on {layout.device} and {batch} rows; call fv.shard_row on the whole row, "
            "padded to a multiple of the ranks, or run whole rows inside `with fv.patched(model):`."
        )
    for name in ("position_ids", "labels", "shift_labels"):
        given = inputs.get(name)
        if given is not None and given.shape != (1, row_tokens):
            raise ValueError(
                f"{name} must be those of the shard, [1, {row_tokens}], got {list(given.shape)}; "
                "call fv.shard_row on the whole row."
            )
    if inputs.get("labels") is not None:
        _check_loss(forward.module, inputs)
    if forward.returns_router_logits:
        raise NotImplementedError(ROUTER_LOGITS_OF_A_SHARD)
    if inputs.get("position_ids") is None:
        inputs["position_ids"] = shard_tokens(layout.position_ids(), group)[None]


def _check_loss(module: nn.Module, inputs: dict[str, Any]) -> None:
    """Raise unless the loss of a shard is its share of the row's loss."""
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
