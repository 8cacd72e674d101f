"""Make the packed row of one forward of what was given, and what its layers share of the row.

Compiled code must not branch on values that depend on the documents, which would add guards.
"""

from __future__ import annotations

import torch
from torch import nn

from flexvarlen.layout.boundaries import raise_or_assert
from flexvarlen.layout.labels import LABEL_COUNTS, SAMPLE_COUNTS
from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.patches.attention.packed_forward import PackedForward
from flexvarlen.patches.batch.given import Given
from flexvarlen.patches.batch.labels import weighted_targets
from flexvarlen.patches.batch.row import PackedRow
from flexvarlen.patches.batch.unpacked_rows import one_document_per_row
from flexvarlen.patches.forward.head_checks import user_loss
from flexvarlen.patches.forward.recurrent_layers import compiles_at_once
from flexvarlen.patches.forward.trees import TREES
from flexvarlen.patches.models.layers import dtype_of_queries, runs_compiled
from flexvarlen.patches.refusal import refuse
from flexvarlen.patches.state import Patch


def make_row(given: Given) -> PackedRow:
    """Find the documents, and make of them what the model gets.

    Raises:
        ValueError, NotImplementedError: boundaries that are not valid, or arguments, or a head,
            that these documents do not go with.
    """
    inputs, padded, stages = given.inputs, given.padded, given.patch.stages
    layout = given.documents()
    several = may_hold_several(given, layout)
    for check in stages.checks:
        check(given, layout, several)
    # Also where samples happen to share nothing, so that it does not depend on the batch.
    has_labels_of_trees = inputs.get(LABEL_COUNTS) is not None
    has_trees = layout.segments is not None or layout.shard.is_part_of_tree
    if padded is None and (has_trees or has_labels_of_trees):
        refuse(given, TREES)
    position_ids = stages.positions(given, layout, several)
    targets = stages.targets(given, layout, several)
    fills_cache, use_cache = _cache_of_row(given, layout)
    if has_labels_of_trees or inputs.get(SAMPLE_COUNTS) is not None:
        targets = weighted_targets(given, targets, user_loss(given.module))
    find_pooled, find_runs, find_routes = stages.pooled_tokens, stages.image_runs, stages.routes
    row_tokens = None if given.is_explicit else given.shape[1]
    if padded is not None and given.patch.unpad and not padded.several:
        row_tokens = padded.shape[1]
    return PackedRow(
        layout=layout,
        several=several,
        padded=padded,
        padded_row_tokens=row_tokens,
        position_ids=position_ids,
        targets=targets,
        fills_cache=fills_cache,
        use_cache=use_cache,
        pooled_tokens=None if find_pooled is None else find_pooled(given, layout, several),
        image_runs=None if find_runs is None else find_runs(given),
        routes=None if find_routes is None else find_routes(given, layout),
    )


def may_hold_several(given: Given, layout: PackedLayout) -> bool:
    """Whether a row of the batch may hold several documents, or padding.

    Always in a graph, which may run on other documents.
    """
    on_gpu = given.tokens.is_cuda
    if torch.compiler.is_compiling() or (on_gpu and torch.cuda.is_current_stream_capturing()):
        return True
    several = layout.num_docs != given.shape[0] or layout.segments is not None
    return several or bool(layout.has_padding) or layout.shard.is_part_of_tree


ONE_DOCUMENT_PER_ROW = (
    "a cache must be filled by rows of one document each, as a new token sees its whole row, got "
    "rows that hold several (or a compiled graph of recurrent layers, where they may); pass "
    "use_cache=False and no cache, or prefill each document in a row of its own."
)


def _cache_of_row(given: Given, layout: PackedLayout) -> tuple[bool, bool | None]:
    """Whether the forward fills a cache, and use_cache if the model's default does not hold.

    The default cache is off for packed batches, in training and in compiled graphs.

    Raises:
        ValueError: a cache is asked for, and a row holds several documents. Inside a compiled graph
            the device asserts that none does.
    """
    by_default, asked = getattr(given.config, "use_cache", None), given.inputs.get("use_cache")
    if by_default is None:  # an encoder, which has no cache
        return False, None
    batch, patch = given.shape[0], given.patch
    if given.cache is None and asked is None:
        may_fill = not (
            given.is_explicit
            or patch.unpad
            or not patch.parts.causal
            or given.module.training
            or runs_compiled(given.parts.text_tower(given.module))
        )
        fills = by_default and may_fill and bool(one_document_per_row(layout, batch))
        return fills, None if fills else False
    fills = given.cache is not None or bool(asked)
    if fills and patch.stages.recurrent is not None and torch.compiler.is_compiling():
        raise ValueError(ONE_DOCUMENT_PER_ROW)
    if fills:
        raise_or_assert(one_document_per_row(layout, batch), ONE_DOCUMENT_PER_ROW)
    return fills, None


def make_packed_forward(
    module: nn.Module, patch: Patch, layout: PackedLayout, row: PackedRow | None = None
) -> PackedForward:
    """Build the `PackedForward` that the layers of a forward share.

    Args:
        module: the model, or its tower, that has the patch.
        patch: of the module.
        layout: the documents.
        row: of the batch; None for a tower's images.
    """
    parts, tower = patch.parts, patch.parts.text_tower(module)
    grads, make_recurrent = torch.is_grad_enabled(), patch.stages.recurrent
    recurrent = None if make_recurrent is None else make_recurrent(tower, patch, layout)
    packed = PackedForward(
        layout,
        patch.backend,
        deterministic=patch.deterministic,
        batch_invariant=patch.batch_invariant,
        training=grads or module.training or patch.unpad,
        kinds=parts.kinds,
        has_all_kinds=not patch.verify,  # `verify` compares outputs instead
        group=patch.sequence_parallel_group,
        chunk_size=parts.chunk_size,
        has_temperature=parts.has_temperature,
        recurrent=recurrent,
        row=row,
    )
    dtype, learns = dtype_of_queries(tower)
    device_type = layout.device.type
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
    needs_grad = grads and learns
    if recurrent is not None and compiles_at_once(recurrent):
        packed.postpone(recurrent, dtype, needs_grad)
    else:
        packed.prepare(dtype, needs_grad=needs_grad)
    return packed
