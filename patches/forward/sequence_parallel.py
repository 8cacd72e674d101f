"""Sequence parallelism in a patched model: what a group, and a forward on a shard, must be.

Each rank runs the model on its shard of one row; only in attention and recurrent layers do the
ranks exchange anything (`flexvarlen.parallel`). So nothing else may depend on a token's position in
the row, and only the layout of the shard gives the documents.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch.distributed as dist

from flexvarlen.layout.labels import LABEL_COUNTS, SAMPLE_COUNTS
from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.layout.row_split import RowSplit
from flexvarlen.patches.batch.given import CACHE_NAMES, Given
from flexvarlen.patches.forward.head_checks import user_loss
from flexvarlen.patches.forward.router import returns_router_logits
from flexvarlen.patches.refusal import Refusal, refuse


def check_group(group: Any) -> None:
    """Raise ValueError unless it is a group of ranks, and this process is one of them."""
    if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
        raise ValueError(
            "sequence_parallel_group must be a torch.distributed ProcessGroup that this process is "
            f"in, got {type(group).__name__}; pass torch.distributed.group.WORLD, or "
            "mesh.get_group(name) of a DeviceMesh."
        )


def check_shard(given: Given) -> None:
    """Refuse what a shard does not go with, see `SHARDS`.

    Reads shapes only. That all ranks hold the same layout is checked by `shard_row`, not here.
    """
    refuse(given, SHARDS)


# ---- what a shard does not go with ----

_OF_WHOLE_ROWS = ("attention_mask", *CACHE_NAMES, "use_cache", "logits_to_keep")
_COLUMNS = ("position_ids", "labels", "shift_labels", LABEL_COUNTS, SAMPLE_COUNTS)
_FOR_LOSS = ("shift_labels", "num_items_in_batch")


def _shard(given: Given) -> RowSplit[PackedLayout]:
    shard: RowSplit[PackedLayout] = given.boundaries["packed_layout"].shard
    return shard


def _of_whole_row(given: Given) -> str | None:
    values = given.boundaries | {name: given.inputs.get(name) for name in _OF_WHOLE_ROWS}
    del values["packed_layout"]
    wrong = (k for k, x in values.items() if x is not None and not (isinstance(x, int) and x == 0))
    return next(wrong, None)


def _no_shard(given: Given) -> str | None:
    layout = given.boundaries["packed_layout"]
    if not isinstance(layout, PackedLayout):
        return type(layout).__name__
    return repr(layout) if layout.shard.is_whole else None


def _other_tokens(given: Given) -> str | None:
    layout, tokens = given.boundaries["packed_layout"], given.tokens
    if (1, layout.total_tokens) == given.shape and layout.device == tokens.device:
        return None
    return (
        f"{layout.total_tokens} tokens on {layout.device} with input_ids {list(given.shape)} on "
        f"{tokens.device}"
    )


def _other_rank(given: Given) -> str | None:
    shard, group = _shard(given), given.patch.sequence_parallel_group
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    if (shard.rank, shard.ranks) == (rank, ranks):
        return None
    return f"rank {rank} of {ranks}, got that of rank {shard.rank} of {shard.ranks}"


def _other_mask(given: Given) -> str | None:
    kinds, shard = given.parts.kinds, _shard(given)
    whys = (shard.why_not(causal=kind.causal, window=kind.window) for kind in kinds)
    return next((why for why in whys if why is not None), None)


def _pools(given: Given) -> str | None:
    module = given.module
    pools = given.parts.head.pools or module._modules.get("pooler") is not None
    return type(module).__name__ if pools else None


def _column_of_row(given: Given) -> str | None:
    for name in _COLUMNS:
        x = given.inputs.get(name)
        if x is not None and x.shape != given.shape:
            return f"{name} must be those of the shard, {list(given.shape)}, got {list(x.shape)}"
    return None


def _learns(given: Given, labels: str) -> bool:
    return given.inputs.get("labels") is not None and given.parts.head.labels == labels


def _mean_over_rank(given: Given) -> str | None:
    """A loss that is not the rank's part of a sum over the row."""
    head, causal = given.parts.head, given.parts.causal
    if given.inputs.get("labels") is None or head.labels == "next token":
        return None
    is_own = head.labels == "own token" and not causal and user_loss(given.module) is None
    return None if is_own else head.ending or "of none"


def _parameters_missing(given: Given) -> str | None:
    """Parameters that the user's loss lacks, so that it would shift labels, or take a mean."""
    loss = user_loss(given.module) if _learns(given, "next token") else None
    known = _FOR_LOSS if loss is None else inspect.signature(loss).parameters
    return ", ".join(name for name in _FOR_LOSS if name not in known) or None


SHARDS = (
    Refusal(
        _of_whole_row,
        "{got} cannot be combined with sequence_parallel_group: packed_layout alone gives a "
        "shard's documents and padding, and nothing is cached or generated; call fv.shard_row on "
        "a batch with packed_layout, or unpatch_model.",
    ),
    Refusal(
        _no_shard,
        "packed_layout must be that of this rank's shard under sequence_parallel_group, got {got}; "
        "call fv.shard_row on a batch that has one, or run whole rows inside `with "
        "fv.patched(model):`.",
    ),
    Refusal(
        _other_tokens,
        "packed_layout must cover the shard's tokens [1, S], got {got}; call fv.shard_row on the "
        "whole row.",
    ),
    Refusal(
        _other_rank,
        "packed_layout must be the shard of {got}; call fv.shard_row with the group of the model.",
    ),
    Refusal(
        lambda given: (
            given.parts.recurrent and _shard(given).splits_documents and _shard(given).links is None
        ),
        "a model with recurrent layers must get consecutive tokens of the row on each rank, got "
        "another shard; call fv.shard_row(batch, group, **fv.shard_options(model)).",
    ),
    Refusal(_other_mask, "{got}"),
    Refusal(
        _pools,
        "{got} pools documents, which may be cut over the ranks; give each rank rows of its own, "
        "or call the base model (of BERT with add_pooling_layer=False), and pool what you gather "
        "of all ranks.",
        NotImplementedError,
    ),
    Refusal(
        _column_of_row,
        "{got}; call fv.shard_row on the whole row.",
    ),
    Refusal(
        lambda given: (
            _learns(given, "next token")
            and any(given.inputs.get(name) is None for name in _FOR_LOSS)
        ),
        "labels of a shard must come with shift_labels, whose last one is the next shard's first "
        "token, and num_items_in_batch, the labels of the whole row; call fv.shard_row, which "
        "makes both.",
    ),
    Refusal(
        _parameters_missing,
        "model.loss_function must have parameters shift_labels and num_items_in_batch under "
        "sequence_parallel_group, got one without {got}: it would shift labels inside the shard, "
        "or take a mean over it; take the sum over shift_labels, divided by num_items_in_batch.",
    ),
    Refusal(
        _mean_over_rank,
        "labels must be next tokens under sequence_parallel_group, or those of an encoder's own "
        "tokens without a loss function of your own, got those of a head {got}; take the sum of "
        "the losses of its logits yourself, divided by the labels of the row.",
        NotImplementedError,
    ),
    Refusal(
        lambda given: (
            _learns(given, "own token")
            and (
                given.inputs.get("shift_labels") is not None
                or given.inputs.get("num_items_in_batch") is None
            )
        ),
        "labels of a shard must come with num_items_in_batch, the labels of the whole row, and "
        "without shift_labels under a head whose labels are the tokens' own; call "
        "fv.shard_row(batch, group, **fv.shard_options(model)).",
    ),
    Refusal(
        lambda given: (
            (_learns(given, "own token") or returns_router_logits(given))
            and False in (given.inputs.get("return_dict"), given.config.return_dict)
        ),
        "return_dict must stay True with labels or router logits of a shard, got False; remove it.",
    ),
    Refusal(
        lambda given: (
            given.inputs.get(LABEL_COUNTS) is not None
            and given.inputs.get("num_items_in_batch") is None
        ),
        "label_counts of a shard must come with num_items_in_batch, the labels of the whole row; "
        "call fv.shard_row, which counts them.",
    ),
)
"""What a shard of a row does not go with, so that the losses of the shards sum to the row's."""
