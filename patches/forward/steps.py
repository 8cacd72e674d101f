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

from flexvarlen.layout.arguments import holds_integers, require_tensor
from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.layout.per_document import unpredicted_tokens
from flexvarlen.patches.attention.context import PackedForward, Unpacked
from flexvarlen.patches.batch.cache import (
    mark_cache,
    note_documents,
    refuse_packed_documents,
    tokens_seen,
)
from flexvarlen.patches.batch.labels import mask_labels
from flexvarlen.patches.batch.padded_batch import PaddedBatch
from flexvarlen.patches.batch.positions import (
    causal_positions,
    positions_by_run,
)
from flexvarlen.patches.batch.unpacked_rows import (
    check_one_document,
    one_document_per_row,
    refuse_boundaries,
)
from flexvarlen.patches.forward.adapters import refuse_adapters_of_rows
from flexvarlen.patches.forward.heads import (
    CAUSAL,
    CHOICES,
    PER_DOCUMENT,
    PER_ROW,
    check_document_labels,
    refuse_pooling,
    wrap_loss,
)
from flexvarlen.patches.forward.inputs import ForwardInputs
from flexvarlen.patches.forward.neftune import scale_noise_by_document
from flexvarlen.patches.forward.padding import (
    HIDDEN_FIRST_TOKEN,
    give_to_base,
    layout_of_pooling_head,
    note_pooler,
    pad_and_pool,
    padded_batch,
    reads_first_token,
    refuse_empty_rows,
    refuse_hidden_first_token,
    share_prefixes,
)
from flexvarlen.patches.forward.recurrent_layers import DOCUMENTS, head_drops_keywords
from flexvarlen.patches.forward.refusals import (
    KEPT_BY_HEAD,
    refuse_head_without_documents,
    refuse_inputs,
)
from flexvarlen.patches.forward.sequence_parallel import prepare_shard
from flexvarlen.patches.forward.trees import refuse_beside_tree, take_loss
from flexvarlen.patches.models.gemma4 import keep_all_queries, refuse_reentrant_checkpoints
from flexvarlen.patches.models.layers import (
    base_of,
    chunk_size_of,
    dtype_of_queries,
    first_position,
    is_compiled_by_layer,
    text_config_of,
    text_tower,
    vision_tower,
)
from flexvarlen.patches.models.llama4 import has_temperature
from flexvarlen.patches.models.qwen_vl import has_images, image_positions
from flexvarlen.patches.models.rope import has_longrope
from flexvarlen.patches.state import ATTRIBUTE, CONTEXT, Patch
from flexvarlen.recurrent.documents import RecurrentDocuments


def before_forward(module: nn.Module, inputs: dict[str, Any]) -> dict[str, Any] | None:
    """Prepare the keyword arguments of a patched model's own forward.

    Raises:
        ValueError: invalid boundaries; a packed batch with a non-empty cache, with
            a cache with room for other tokens, or with a 4D mask; or another attn_implementation
            set since (which would read our placeholder as a mask that hides nothing).

    Decoding reads the device once per forward, if there are positions or a mask to check.
    """
    patch: Patch | None = module.__dict__.get(ATTRIBUTE)
    if patch is None:
        return None
    if "peft_config" in module.__dict__:
        refuse_adapters_of_rows(module)
    if module.training:
        scale_noise_by_document(module)
    is_head = base_of(module) is not module  # type: ignore[arg-type]
    if is_head and patch.head == CHOICES:
        return _prepare_choices(module, patch, inputs)
    return _prepare(module, patch, inputs, is_head=is_head)


def _prepare(
    module: nn.Module, patch: Patch, inputs: dict[str, Any], *, is_head: bool
) -> dict[str, Any]:
    if not is_head:
        text_config = text_config_of(module.config)
        refuse_reentrant_checkpoints(text_config, text_tower(module))
        keep_all_queries(text_config, inputs)
    if isinstance(inputs.get("attention_mask"), PackedForward):  # see `head_drops_keywords`
        _pass_on(inputs, inputs["attention_mask"], patch)
    tokens, given = _tokens(inputs), inputs.get(CONTEXT)
    if tokens is None or isinstance(given, PackedForward | Unpacked):
        return _from_head(module, inputs)
    refuse_inputs(module, patch, inputs, tokens)
    _widen_numbers(inputs)
    head = patch.head if is_head else ""
    padded = padded_batch(module, patch, inputs, tokens)
    if padded is not None and is_head:
        return _padded_head(module, head, inputs, padded)
    came_from_head = padded is not None and padded is given
    if padded is not None:
        padded = share_prefixes(module, patch, inputs, padded)
        inputs, tokens = padded.inputs_of_row(inputs), padded.to_row(tokens)
    forward = ForwardInputs(module, patch, inputs, tokens, padded)
    if not came_from_head:
        refuse_head_without_documents(module, forward.is_explicit)
    if forward.group is not None:
        prepare_shard(module, inputs, forward.boundaries, tokens, forward.config, forward.group)
    if forward.why_unpacked is not None:
        return _unpacked(forward, forward.why_unpacked)
    if head in PER_DOCUMENT:
        layout, rows = layout_of_pooling_head(forward)
        documents = forward.batch if rows is None else rows.batch
        check_document_labels(inputs.get("labels"), documents)
        if rows is not None:
            inputs = rows.inputs_of_batch(inputs, forward.config.pad_token_id)
            return give_to_base(module, inputs, rows)
    else:
        layout = forward.find_layout()
    return _packed_row(forward, layout, head)


def _padded_head(
    module: nn.Module, head: str, inputs: dict[str, Any], padded: PaddedBatch
) -> dict[str, Any]:
    """The arguments of a head whose base model runs its padded batch as a packed row."""
    if head in CAUSAL:
        mask_labels(module, inputs, padded.unpredicted_tokens())
    if head in (*PER_DOCUMENT, CHOICES):
        refuse_empty_rows(padded)
        if padded.pads_left and reads_first_token(module):
            raise ValueError(HIDDEN_FIRST_TOKEN)
    if head in PER_DOCUMENT:
        check_document_labels(inputs.get("labels"), padded.batch)
    return give_to_base(module, inputs, padded)


def _packed_row(forward: ForwardInputs, layout: PackedLayout, head: str) -> dict[str, Any]:
    """The arguments of a model that runs rows of documents.

    Args:
        head: as in `Patch`; "" where the base model is called.
    """
    module, inputs, patch = forward.module, forward.inputs, forward.patch
    is_base = forward.base is module
    if head in PER_ROW:
        refuse_pooling(type(module).__name__, layout, forward.batch)
    if head == CHOICES and forward.packs and reads_first_token(module):
        refuse_hidden_first_token(layout, forward.batch)
    if layout.segments is not None and forward.padded is None:
        refuse_beside_tree(forward, pools=not is_base and head not in CAUSAL)
    _set_positions(forward, layout)
    # Other heads' labels belong to the tokens themselves, and so do a tree's.
    if patch.head in CAUSAL and layout.segments is None:
        first = unpredicted_tokens(layout)
        mask_labels(module, inputs, first, forward.group, packs=forward.packs)
    _set_use_cache(forward, layout)
    packed = packed_forward(module, patch, layout)
    _pass_on(inputs, packed, patch)
    packed.packs, packed.padded = forward.packs, forward.padded
    packed.padded_row_tokens = forward.padded_row_tokens
    packed.tree_loss = take_loss(module, inputs)
    _note_cache(forward, packed)
    if is_base:
        note_pooler(module, inputs, packed, forward.batch)
    _set_attention_mask(forward, packed)
    return inputs


def _prepare_choices(module: nn.Module, patch: Patch, inputs: dict[str, Any]) -> dict[str, Any]:
    """Prepare the arguments of a multiple-choice head, whose rows are `[B, choices, S]`."""
    tokens = _tokens(inputs)
    if tokens is None:
        return inputs
    rows = tokens.shape[:2]
    of_tokens = [
        name
        for name, x in inputs.items()
        if isinstance(x, Tensor) and x.ndim > 2 and x.shape[:2] == rows
    ]
    flat = inputs | {name: inputs[name].flatten(0, 1) for name in of_tokens}
    prepared = _prepare(module, patch, flat, is_head=True)
    for name in {*of_tokens, "position_ids", "attention_mask"}:  # some are made from documents
        x = prepared.get(name)
        if isinstance(x, Tensor) and len(x) == rows.numel():
            prepared[name] = x.unflatten(0, rows)
    return prepared


def after_forward(module: nn.Module, inputs: dict[str, Any], outputs: Any) -> None:
    """Check the outputs of a forward, pad and pool them, and mark the cache it filled.

    Raises:
        ValueError: a head did not pass the documents on to its base model.
    """
    packed = inputs.get(CONTEXT)
    if not isinstance(packed, PackedForward):
        return
    base = base_of(module)  # type: ignore[arg-type]
    is_head = base is not module and ATTRIBUTE in base.__dict__
    if is_head and packed.packs and not packed.reached_base:
        raise ValueError(KEPT_BY_HEAD)
    if packed.tree_loss is not None and base is not module:
        outputs["loss"] = packed.tree_loss(outputs.logits)
    if packed.one_per_row is not None:
        mark_cache(outputs, packed.one_per_row)
    if base is module:
        pad_and_pool(base, packed, outputs)


def packed_forward(module: nn.Module, patch: Patch, layout: PackedLayout) -> PackedForward:
    """Build the `PackedForward` that the layers of a forward share.

    Args:
        module: the model, or its tower, whose `patch` has the kinds of layers.
    """
    config = text_config_of(module.config)
    grads = torch.is_grad_enabled()
    recurrent = None
    if patch.recurrent:
        by_layer = is_compiled_by_layer(base_of(module))  # type: ignore[arg-type]
        recurrent = RecurrentDocuments(layout, for_any_row=by_layer)
    packed = PackedForward(
        layout,
        patch.backend,
        deterministic=patch.deterministic,
        batch_invariant=patch.batch_invariant,
        training=grads or module.training or patch.unpad,
        kinds=patch.kinds,
        group=patch.sequence_parallel_group,
        chunk_size=chunk_size_of(config),
        has_temperature=has_temperature(config),
        recurrent=recurrent,
    )
    dtype, learns = dtype_of_queries(module)
    device_type = layout.device.type
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
    packed.prepare(dtype, needs_grad=grads and learns)
    return packed


# ---- the steps ----


def _from_head(module: nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a base model whose head has already found the documents."""
    packed = inputs.get(CONTEXT)
    if isinstance(packed, PackedForward):
        packed.in_base = True
        if base_of(module) is module:  # type: ignore[arg-type]
            inputs["attention_mask"] = _placeholder(packed.layout.device)
    return inputs


def _pass_on(inputs: dict[str, Any], context: PackedForward | Unpacked, patch: Patch) -> None:
    """Pass the documents to the layers, as keywords that models pass on."""
    inputs[CONTEXT] = context
    if patch.recurrent:
        inputs[DOCUMENTS] = context  # the only keyword that every recurrent layer gets


def _widen_numbers(inputs: dict[str, Any]) -> None:
    """Make positions and a 2D mask int64 where they are integers, as sums and differences wrap."""
    for name in ("position_ids", "attention_mask"):
        given = inputs.get(name)
        if isinstance(given, Tensor) and given.ndim < 4 and holds_integers(given):
            inputs[name] = given.to(torch.int64)


def _unpacked(forward: ForwardInputs, why: str) -> dict[str, Any]:
    """Prepare a forward that is not packed: decoding, or a 4D mask."""
    refuse_boundaries(forward.boundaries, why)
    refuse_packed_documents(forward.cache)
    check_one_document(
        forward.row_tokens,
        position_ids=forward.positions,
        attention_mask=forward.mask,
        with_what=why,
        seen=tokens_seen(forward.cache),
    )
    patch = forward.patch
    unpacked = Unpacked(patch.backend, patch.deterministic, patch.batch_invariant)
    _pass_on(forward.inputs, unpacked, patch)
    return forward.inputs


def _set_positions(forward: ForwardInputs, layout: PackedLayout) -> None:
    """Set the position_ids: given ones, or per document; otherwise the model builds them.

    In a causal model whose rows hold one document each, padding is counted too, as the model's own
    positions do, so that decoding continues from them. So it is in a padded batch.
    """
    inputs, base = forward.inputs, forward.base
    if forward.padded is not None and forward.positions is None and not first_position(base):
        forward.positions = inputs["position_ids"] = forward.padded.offsets_in_rows()
    if forward.positions is not None and has_longrope(forward.config):
        inputs["position_ids"] = positions_by_run(layout, forward.positions, forward.row_tokens)
    given: Tensor | None = inputs.get("position_ids")
    has_vision = vision_tower(base) is not None
    shape = (forward.batch, forward.row_tokens)
    if has_vision and has_images(inputs):
        inputs["position_ids"] = image_positions(base, layout, inputs)
    elif given is not None:
        first = first_position(base)
        if first and given.ndim == 2:  # given from 0 on, as collators do: such a model has no 0
            inputs["position_ids"] = given + first * (given[:, :1] == 0)
    elif forward.packs or has_vision:  # a model of images would make them from our placeholder
        if forward.causal:
            inputs["position_ids"] = causal_positions(layout, forward.batch).view(shape)
        else:
            in_document = layout.position_ids() * layout.real_tokens()  # no table ends before 0
            inputs["position_ids"] = (in_document + first_position(base)).view(shape)


def _set_use_cache(forward: ForwardInputs, layout: PackedLayout) -> None:
    """Disable the default cache for packed batches, in training and in compiled graphs."""
    inputs = forward.inputs
    if getattr(forward.config, "use_cache", None) is None:  # an encoder, which has no cache
        return
    wants_none = (
        forward.is_explicit
        or forward.patch.unpad
        or not forward.causal
        or forward.module.training
        or torch.compiler.is_compiling()
        or is_compiled_by_layer(forward.base)
        or (forward.patch.recurrent and not bool(one_document_per_row(layout, forward.batch)))
    )
    if wants_none and inputs.get("use_cache") is None and forward.cache is None:
        inputs["use_cache"] = False


def _note_cache(forward: ForwardInputs, packed: PackedForward) -> None:
    """Flag the cache that the forward may fill, before any layer fills it."""
    use_cache = forward.inputs.get("use_cache")
    if use_cache is None:
        use_cache = getattr(forward.config, "use_cache", None)
    if forward.cache is not None or use_cache:
        one_per_row = one_document_per_row(packed.layout, forward.batch)
        packed.one_per_row = one_per_row if torch.compiler.is_compiling() else bool(one_per_row)
        if forward.patch.recurrent and packed.one_per_row is not True:
            raise ValueError(_STATES_OF_ROWS)
        note_documents(forward.cache, packed.one_per_row)


_STATES_OF_ROWS = (
    "a cache of recurrent layers holds one state per row, got a batch whose rows hold several "
    "documents (or a compiled graph, where they may); pass use_cache=False and no cache, or "
    "prefill each document in a row of its own."
)


def _set_attention_mask(forward: ForwardInputs, packed: PackedForward) -> None:
    """Pass a placeholder to a base model, and a padding mask to a head, for its losses."""
    inputs, module = forward.inputs, forward.module
    if forward.base is module:
        inputs["attention_mask"] = _placeholder(forward.tokens.device)
        return
    may_pad = (forward.is_explicit or forward.mask is not None) and forward.group is None
    masked = forward.packs and may_pad
    inputs["attention_mask"] = packed.mask_of_rows(forward.batch) if masked else None
    if head_drops_keywords(module):
        inputs["attention_mask"] = packed
    wrap_loss(module)


def _placeholder(device: torch.device) -> Tensor:
    """A 4D mask that keeps transformers from building one; it is never read."""
    return torch.ones((1, 1, 1, 1), dtype=torch.bool, device=device)


def _tokens(inputs: dict[str, Any]) -> Tensor | None:
    """The forward's `[B, S]` ids or `[B, S, hidden]` embeddings."""
    name = "inputs_embeds" if inputs.get("input_ids") is None else "input_ids"
    tokens: Tensor | None = inputs.get(name)
    if tokens is not None:
        require_tensor(name, tokens)
        if tokens.ndim < 2:
            raise ValueError(
                f"{name} must have shape [B, S], or [B, S, hidden] of embeddings, got "
                f"{tuple(tokens.shape)}; pass {name}[None] for one row."
            )
    return tokens
