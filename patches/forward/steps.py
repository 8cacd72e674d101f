"""The steps of a patched model's forward, from its arguments to what its layers get.

The documents are found once, the labels at their first tokens are masked, every layer gets the same
`PackedForward`, and the base model's mask becomes a 4D placeholder, so that transformers builds
none and does not sync. A head gets a padding mask, which it may need for auxiliary losses.

Compiled code must not branch on values that depend on the documents, which would add guards.

Shapes: B rows of S tokens, T = B·S.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flexvarlen.layout.boundaries import raise_or_assert
from flexvarlen.layout.labels import LABEL_COUNTS, SAMPLE_COUNTS, unpredicted_tokens
from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.patches.attention.packed_forward import PackedForward, Unpacked
from flexvarlen.patches.batch.labels import mask_labels
from flexvarlen.patches.batch.padded_batch import PaddedBatch, share_prefixes_of_rows
from flexvarlen.patches.batch.positions import (
    causal_positions,
    image_positions,
    positions_by_run,
)
from flexvarlen.patches.batch.unpacked_rows import check_one_document, one_document_per_row
from flexvarlen.patches.batch.unsupported_keywords import COLUMNS
from flexvarlen.patches.forward.heads import (
    balance_loss,
    check_document_labels,
    take_loss,
    token_weights,
    wrap_loss,
)
from flexvarlen.patches.forward.inputs import ForwardInputs, flatten_choices, tokens_of
from flexvarlen.patches.forward.neftune import scale_noise_by_document
from flexvarlen.patches.forward.padding import (
    find_padded_batch,
    layout_of_pooling_head,
    note_pooler,
    pad_and_pool,
    refuse_hidden_first_token,
    refuse_rows_to_pool,
)
from flexvarlen.patches.forward.recurrent_layers import DOCUMENTS
from flexvarlen.patches.forward.refusals import (
    HEAD_DROPPED_DOCUMENTS,
    refuse_beside_tree,
    refuse_head_without_documents,
    refuse_inputs,
    refuse_reentrant_checkpoints,
)
from flexvarlen.patches.forward.sequence_parallel import pop_shard_labels, prepare_shard
from flexvarlen.patches.forward.wrapper import Steps
from flexvarlen.patches.models.heads import CAUSAL, CHOICES, PER_DOCUMENT, PER_ROW
from flexvarlen.patches.models.layers import dtype_of_queries, is_compiled_by_layer
from flexvarlen.patches.state import ATTRIBUTE, CONTEXT, LostDocuments, Patch
from flexvarlen.patches.why_not import why_not_adapters
from flexvarlen.recurrent.documents import RecurrentDocuments
from flexvarlen.recurrent.fla_kernels.check import is_first_forward


def before_forward(module: nn.Module, inputs: dict[str, Any]) -> dict[str, Any] | None:
    """Prepare the keyword arguments of a patched model's own forward.

    Raises:
        ValueError: invalid boundaries; a packed batch with a cache, or with a 4D mask; or another
            attn_implementation, which would read our placeholder as a mask that hides nothing.
    """
    patch: Patch | None = module.__dict__.get(ATTRIBUTE)
    if patch is None:
        return None
    prepare_module(module, patch, inputs)
    context = inputs.get(CONTEXT)
    if isinstance(context, PackedForward | Unpacked):  # the head has found the documents
        pass_on(inputs, context, patch)
        return inputs
    inputs, restore_choices = flatten_choices(patch, inputs)
    tokens = tokens_of(inputs)
    if tokens is None:
        return inputs
    forward = ForwardInputs(module, patch, inputs, tokens)
    refuse_inputs(forward)
    drop_padding(forward)
    if forward.padded is not None and patch.parts.base_name:
        return restore_choices(give_to_base(forward, forward.padded))
    forward.take_boundaries()
    refuse_head_without_documents(forward)
    if forward.group is not None:
        prepare_shard(forward, forward.group)
    if forward.why_unpacked is not None:
        return restore_choices(pass_unpacked(forward, forward.why_unpacked))
    if patch.parts.head in PER_DOCUMENT:
        layout, rows = layout_of_pooling_head(forward)
        if rows is not None:
            return give_to_base(forward, rows)
    else:
        layout = forward.find_layout()
    refuse_beside_documents(forward, layout)
    set_positions(forward, layout)
    mask_first_labels(forward, layout)
    pass_documents(forward, layout, fills_cache=set_use_cache(forward, layout))
    return restore_choices(forward.inputs)


def after_forward(module: nn.Module, inputs: dict[str, Any], outputs: Any) -> None:
    """Check the outputs of a forward, pad and pool them.

    Raises:
        ValueError: a head did not pass the documents on to its base model.
    """
    packed, patch = inputs.get(CONTEXT), module.__dict__.get(ATTRIBUTE)
    if not isinstance(packed, PackedForward) or patch is None:
        return
    base = patch.parts.base(module)
    if base is module:
        pad_and_pool(base, packed, outputs)
        return
    if ATTRIBUTE in base.__dict__ and packed.packs and not packed.reached_base:
        raise LostDocuments(HEAD_DROPPED_DOCUMENTS)
    if packed.loss is not None:
        outputs["loss"] = packed.loss(outputs.logits) + balance_loss(module, outputs)


STEPS = Steps(before_forward, after_forward, reads=COLUMNS)
"""What `patch_model` puts around the forward of a model and of its base model."""


# ---- before the documents are found ----


def prepare_module(module: nn.Module, patch: Patch, inputs: dict[str, Any]) -> None:
    """Refuse, or take in, what was added to the model since it was patched.

    Raises:
        NotImplementedError: an adapter whose effect depends on the row; NEFTune in a compiled
            graph; reentrant checkpoints of layers that share keys.
    """
    why = why_not_adapters(module) if "peft_config" in module.__dict__ else None
    if why is not None:
        raise NotImplementedError(why)
    if module.training:
        scale_noise_by_document(module)
    parts = patch.parts
    if parts.shares_keys and not parts.base_name:
        refuse_reentrant_checkpoints(parts.text_tower(module))
        # Else the last tokens alone run through the later layers, where windows start elsewhere.
        inputs["logits_to_keep"] = None
    if isinstance(inputs.get("attention_mask"), PackedForward | PaddedBatch):
        inputs[CONTEXT] = inputs.pop("attention_mask")  # of a head that drops keywords


def drop_padding(forward: ForwardInputs) -> None:
    """Find the padded batch that runs as a packed row, and in the base model make it that row."""
    padded = find_padded_batch(forward)
    if padded is not None and not forward.parts.base_name:
        if forward.patch.share_prefixes:
            padded = share_prefixes_of_rows(
                padded, forward.inputs, multiple_of=forward.unpad_to_multiple_of
            )
        forward.inputs = padded.inputs_of_row(forward.inputs)
        forward.tokens = padded.to_row(forward.tokens)
    forward.padded = padded


def give_to_base(forward: ForwardInputs, padded: PaddedBatch) -> dict[str, Any]:
    """The arguments of a head whose base model runs its padded batch as a packed row."""
    module, inputs, head = forward.module, forward.inputs, forward.parts.head
    if forward.padded is None:  # of packed rows, from which it was made
        inputs = padded.inputs_of_batch(inputs, forward.config.pad_token_id)
    elif head in CAUSAL:
        mask_labels(module, inputs, padded.unpredicted_tokens())
    elif head in (*PER_DOCUMENT, CHOICES):
        refuse_rows_to_pool(padded, reads_first=forward.reads_first_token)
    if head in PER_DOCUMENT:
        check_document_labels(inputs.get("labels"), padded.batch)
    if forward.parts.drops_keywords:
        inputs["attention_mask"] = padded
    wrap_loss(module)
    return inputs | {CONTEXT: padded}


def pass_unpacked(forward: ForwardInputs, why: str) -> dict[str, Any]:
    """Prepare a forward that is not packed: decoding, or a 4D mask.

    Reads the device once, if there are positions or a mask to check.
    """
    cache = forward.cache
    counts = cache is not None and any(hasattr(x, "get_seq_length") for x in cache.layers)
    check_one_document(
        forward.row_tokens,
        position_ids=forward.positions,
        attention_mask=forward.mask,
        with_what=why,
        seen=cache.get_seq_length() if cache is not None and counts else 0,  # not of states alone
        boundaries=forward.boundaries,
    )
    patch = forward.patch
    unpacked = Unpacked(patch.backend, patch.deterministic, patch.batch_invariant)
    pass_on(forward.inputs, unpacked, patch)
    return forward.inputs


# ---- the documents, and what follows from them ----


def refuse_beside_documents(forward: ForwardInputs, layout: PackedLayout) -> None:
    """Refuse a head, or other arguments, that these documents do not go with."""
    head = forward.parts.head
    if head in PER_DOCUMENT:
        check_document_labels(forward.inputs.get("labels"), forward.batch)
    if head in PER_ROW:
        raise_or_assert(
            one_document_per_row(layout, forward.batch),
            f"{type(forward.module).__name__} pools each row to one output, so a row must hold one "
            "document, got several; pass one document per row, or patch and call the base model, "
            "and pool its last_hidden_state by document.",
        )
    if head == CHOICES and forward.packs and forward.reads_first_token:
        refuse_hidden_first_token(layout, forward.batch)
    # Also where samples happen to share nothing, so that it does not depend on the batch.
    has_trees = layout.segments is not None or forward.inputs.get(LABEL_COUNTS) is not None
    if has_trees and forward.padded is None:
        refuse_beside_tree(forward)


def set_positions(forward: ForwardInputs, layout: PackedLayout) -> None:
    """Set the position_ids: given ones, or per document; otherwise the model builds them.

    In a causal model whose rows hold one document each, padding is counted too, as the model's own
    positions do, so that decoding continues from them. So it is in a padded batch.
    """
    inputs, parts = forward.inputs, forward.parts
    first = parts.first_position
    if forward.padded is not None and forward.positions is None and not first:
        forward.positions = inputs["position_ids"] = forward.padded.offsets_in_rows()
    if forward.positions is not None and parts.has_longrope:
        inputs["position_ids"] = positions_by_run(layout, forward.positions, forward.row_tokens)
    given: Tensor | None = inputs.get("position_ids")
    has_vision, shape = bool(parts.vision_name), (forward.batch, forward.row_tokens)
    if has_vision and forward.has_images:
        inputs["position_ids"] = image_positions(parts.base(forward.module), layout, inputs)
    elif given is not None:
        if first and given.ndim == 2:  # given from 0 on, as collators do: such a model has no 0
            inputs["position_ids"] = given + first * (given[:, :1] == 0)
    elif forward.packs or has_vision:  # a model of images would make them from our placeholder
        if parts.causal:
            inputs["position_ids"] = causal_positions(layout, forward.batch).view(shape)
        else:
            in_document = layout.position_ids() * layout.real_tokens()  # no table ends before 0
            inputs["position_ids"] = (in_document + first).view(shape)


def mask_first_labels(forward: ForwardInputs, layout: PackedLayout) -> None:
    """Mask the labels at documents' first tokens, where labels are next tokens.

    Other heads' labels belong to the tokens themselves, and so do a tree's. Those of a shard's
    documents come shifted from `shard_row`, which masks them.
    """
    if forward.parts.head in CAUSAL and layout.segments is None and layout.shard.is_whole:
        first = unpredicted_tokens(layout)
        mask_labels(forward.module, forward.inputs, first, packs=forward.packs)


ONE_DOCUMENT_PER_ROW = (
    "a cache must be filled by rows of one document each, as a new token sees its whole row, got "
    "rows that hold several (or a compiled graph of recurrent layers, where they may); pass "
    "use_cache=False and no cache, or prefill each document in a row of its own."
)


def set_use_cache(forward: ForwardInputs, layout: PackedLayout) -> bool:
    """Turn the default cache off for packed batches, in training and in compiled graphs.

    Returns:
        Whether the forward fills a cache.

    Raises:
        ValueError: one is asked for, and a row holds several documents. Inside a compiled graph
            the device asserts that none does.
    """
    inputs, by_default = forward.inputs, getattr(forward.config, "use_cache", None)
    if by_default is None:  # an encoder, which has no cache
        return False
    if forward.cache is None and inputs.get("use_cache") is None:
        may_fill = not (
            forward.is_explicit
            or forward.patch.unpad
            or not forward.parts.causal
            or forward.module.training
            or forward.is_compiled
        )
        fills = by_default and may_fill and bool(one_document_per_row(layout, forward.batch))
        if not fills:
            inputs["use_cache"] = False
        return fills
    fills = forward.cache is not None or bool(inputs["use_cache"])
    if fills and forward.parts.recurrent and torch.compiler.is_compiling():
        raise ValueError(ONE_DOCUMENT_PER_ROW)
    if fills:
        raise_or_assert(one_document_per_row(layout, forward.batch), ONE_DOCUMENT_PER_ROW)
    return fills


def pass_documents(forward: ForwardInputs, layout: PackedLayout, *, fills_cache: bool) -> None:
    """Build what the layers share, and pass it on."""
    module, inputs, patch = forward.module, forward.inputs, forward.patch
    packed = packed_forward(module, patch, layout)
    packed.packs, packed.padded, packed.fills_cache = forward.packs, forward.padded, fills_cache
    packed.padded_row_tokens = forward.padded_row_tokens
    counts = inputs.get(SAMPLE_COUNTS)
    packed.loss = take_loss(module, inputs)
    if not layout.shard.is_whole and packed.loss is None:
        packed.loss = pop_shard_labels(forward)
    pass_on(inputs, packed, patch)
    if patch.parts.base_name:
        prepare_head(forward, packed, counts)
    else:
        note_pooler(forward, packed)


def packed_forward(module: nn.Module, patch: Patch, layout: PackedLayout) -> PackedForward:
    """Build the `PackedForward` that the layers of a forward share.

    Args:
        module: the model, or its tower, that has the patch.
    """
    parts, tower = patch.parts, patch.parts.text_tower(module)
    grads = torch.is_grad_enabled()
    recurrent = None
    if parts.recurrent:
        group = patch.sequence_parallel_group
        recurrent = RecurrentDocuments(
            layout,
            group="" if group is None else group.group_name,
            for_any_row=is_compiled_by_layer(tower),
        )
    packed = PackedForward(
        layout,
        patch.backend,
        deterministic=patch.deterministic,
        batch_invariant=patch.batch_invariant,
        training=grads or module.training or patch.unpad,
        kinds=patch.kinds,
        has_all_kinds=not patch.verify,  # which compares outputs
        group=patch.sequence_parallel_group,
        chunk_size=parts.chunk_size,
        has_temperature=parts.has_temperature,
        recurrent=recurrent,
    )
    dtype, learns = dtype_of_queries(tower)
    device_type = layout.device.type
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
    needs_grad = grads and learns
    if recurrent is not None and _compiles_at_once(recurrent):
        packed.postpone(recurrent, dtype, needs_grad)
    else:
        packed.prepare(dtype, needs_grad=needs_grad)
    return packed


def _compiles_at_once(recurrent: RecurrentDocuments) -> bool:
    """Whether the first recurrent layer is to check fla's kernels: in eager mode, on one rank."""
    if torch.compiler.is_compiling() or recurrent.for_any_row or recurrent.over_ranks:
        return False
    return is_first_forward(recurrent.layout.device)


def prepare_head(forward: ForwardInputs, packed: PackedForward, counts: Tensor | None) -> None:
    """Give a head a padding mask, for its auxiliary losses, and keep our keywords from its loss.

    These losses weigh each token by the mask, so where tokens stand for several samples it counts
    these.

    Args:
        counts: the sample_counts, or None.
    """
    inputs, parts, layout = forward.inputs, forward.parts, packed.layout
    may_pad = forward.is_explicit or forward.mask is not None
    masked = forward.packs and may_pad and layout.shard.is_whole
    inputs["attention_mask"] = packed.mask_of_rows(forward.batch) if masked else None
    has_counts = counts is not None or packed.loss is not None
    if forward.returns_router_logits and (has_counts or layout.segments is not None):
        inputs["attention_mask"] = token_weights(parts, layout, counts)
    if parts.drops_keywords:
        inputs["attention_mask"] = packed
    wrap_loss(forward.module)


def pass_on(inputs: dict[str, Any], context: PackedForward | Unpacked, patch: Patch) -> None:
    """Pass the documents to the layers, as keywords that models pass on.

    A packed base model gets a 4D mask, which keeps transformers from building one, and is not read.
    """
    inputs[CONTEXT] = context
    if patch.parts.recurrent:
        inputs[DOCUMENTS] = context  # the only keyword that every recurrent layer gets
    if isinstance(context, PackedForward) and not patch.parts.base_name:
        context.in_base = True
        device = context.layout.device
        inputs["attention_mask"] = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=device)
