"""The steps of a patched model's forward, from its arguments to what its layers get.

    arguments -> `Given` (read once) -> `PackedRow` (documents and targets) -> `PackedForward`

What only some models need is in the stages of their patch: see `stages.py`. Every layer gets the
same `PackedForward`, and the base model's mask becomes a 4D placeholder, so that transformers
builds none and does not sync. A head gets a padding mask, which it may need for auxiliary losses.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from flexvarlen.patches.adapters import why_not_adapters
from flexvarlen.patches.attention.packed_forward import PackedForward, Unpacked
from flexvarlen.patches.batch.given import Given, Inputs, read_arguments, tokens_of
from flexvarlen.patches.batch.padded_batch import PaddedBatch
from flexvarlen.patches.batch.row import PackedRow
from flexvarlen.patches.batch.unpacked_rows import check_one_document
from flexvarlen.patches.batch.unsupported_keywords import COLUMNS
from flexvarlen.patches.forward.head_checks import wrap_loss
from flexvarlen.patches.forward.make_row import make_packed_forward, make_row
from flexvarlen.patches.forward.neftune import scale_noise_by_document
from flexvarlen.patches.forward.refusals import check_inputs
from flexvarlen.patches.forward.router import router_loss
from flexvarlen.patches.forward.under_head import HEAD_DROPPED_DOCUMENTS
from flexvarlen.patches.forward.wrapper import Steps, call_own
from flexvarlen.patches.state import ATTRIBUTE, CONTEXT, LostDocuments, Patch


def before_forward(module: nn.Module, inputs: Inputs) -> Inputs | None:
    """Prepare the keyword arguments of a patched model's own forward.

    Raises:
        ValueError: invalid boundaries; a packed batch with a cache, or with a 4D mask; or another
            attn_implementation, which would read our placeholder as a mask that hides nothing.
    """
    patch: Patch | None = module.__dict__.get(ATTRIBUTE)
    if patch is None:
        return None
    check_additions(module)
    for change in patch.stages.arguments:
        change(module, patch, inputs)
    context = inputs.get(CONTEXT)
    if isinstance(context, PackedForward | Unpacked):  # the head has found the documents
        attach_context(inputs, context, patch)
        return inputs
    tokens = tokens_of(inputs)
    if tokens is None:
        return inputs
    check_inputs(module, patch, inputs, tokens)
    given = read_arguments(module, patch, inputs, tokens)
    for check in patch.stages.refusals:
        check(given)
    for enter in patch.stages.batch:
        entered: Given | Inputs = enter(given)
        if isinstance(entered, dict):  # a head's, whose base model makes the row
            return entered
        given = entered
    if given.why_unpacked is not None:
        return attach_unpacked(given, given.why_unpacked)
    return attach_row(given, make_row(given))


def after_forward(module: nn.Module, inputs: Inputs, outputs: Any) -> None:
    """Change the outputs of a base model, and give a head its loss.

    Raises:
        ValueError: a head did not pass the documents on to its base model.
    """
    packed, patch = inputs.get(CONTEXT), module.__dict__.get(ATTRIBUTE)
    if not isinstance(packed, PackedForward | PaddedBatch) or patch is None:
        return
    for change in patch.stages.outputs:
        change(module, packed, outputs)
    if isinstance(packed, PaddedBatch):  # of a head; its base model had the row
        return
    row = packed.row
    base = patch.parts.base(module)
    if base is module:
        return
    if ATTRIBUTE in base.__dict__ and row.several and not packed.delivery.reached_base:
        raise LostDocuments(HEAD_DROPPED_DOCUMENTS)
    if row.targets.loss is not None and outputs.get("loss") is None:  # not computed in chunks
        outputs["loss"] = row.targets.loss(outputs.logits) + router_loss(module, outputs)


def call_as_patched(
    module: nn.Module, own: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a module's own forward, as its patch does."""
    patch: Patch | None = module.__dict__.get(ATTRIBUTE)
    call = call_own if patch is None else patch.stages.call
    return call(module, own, args, kwargs)


STEPS = Steps(before_forward, after_forward, reads=COLUMNS, call=call_as_patched)
"""What `patch_model` puts around the forward of a model and of its base model."""


def check_additions(module: Any) -> None:
    """Reject or handle changes made to the model after patching.

    Raises:
        NotImplementedError: an adapter whose effect depends on the row; NEFTune in a compiled
            graph.
    """
    why = why_not_adapters(module) if "peft_config" in module.__dict__ else None
    if why is not None:
        raise NotImplementedError(why)
    embeddings = module.get_input_embeddings() if module.training else None
    if embeddings is not None and embeddings._forward_hooks:
        scale_noise_by_document(embeddings)


def attach_unpacked(given: Given, why: str) -> Inputs:
    """The arguments of a forward that is not packed: decoding, or a 4D mask.

    Reads the device once, if there are positions or a mask to check.
    """
    cache, patch = given.cache, given.patch
    counts = cache is not None and any(hasattr(x, "get_seq_length") for x in cache.layers)
    check_one_document(
        given.shape[1],
        position_ids=given.positions,
        attention_mask=given.mask,
        with_what=why,
        seen=cache.get_seq_length() if cache is not None and counts else 0,  # not of states alone
        boundaries=given.boundaries,
    )
    unpacked = Unpacked(patch.backend, patch.deterministic, patch.batch_invariant)
    attach_context(given.inputs, unpacked, patch)
    return given.inputs


def attach_row(given: Given, row: PackedRow) -> Inputs:
    """The arguments of a forward on a packed row."""
    module, patch = given.module, given.patch
    changed = {"position_ids": row.position_ids, "use_cache": row.use_cache}
    inputs = {name: x for name, x in given.inputs.items() if name not in row.targets.withheld}
    inputs |= row.targets.labels | {name: x for name, x in changed.items() if x is not None}
    packed = make_packed_forward(module, patch, row.layout, row)
    attach_context(inputs, packed, patch)
    if patch.parts.base_name:
        has_mask = given.is_explicit or given.mask is not None
        masked = row.several and has_mask and row.layout.shard.is_whole
        inputs["attention_mask"] = packed.mask_of_rows(given.shape[0]) if masked else None
        for change in patch.stages.head:
            change(given, row, packed, inputs)
        wrap_loss(module)
    return inputs


def attach_context(inputs: Inputs, context: PackedForward | Unpacked, patch: Patch) -> None:
    """Pass the documents to the layers, as keywords that models pass on.

    A packed base model gets a 4D mask, which keeps transformers from building one, and is not read.
    """
    for keyword in patch.stages.keywords:
        inputs[keyword] = context
    if isinstance(context, PackedForward) and not patch.parts.base_name:
        context.delivery.reached_base = True
        device = context.layout.device
        inputs["attention_mask"] = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=device)
