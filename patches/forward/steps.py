"""What a patched model's forward is called with: its documents found, or marked as not packed.

The documents are found once, the labels at their first tokens are masked, every layer gets the same
`PackedForward`, and the base model's mask becomes a 4D placeholder, so that transformers builds
none and reads nothing back. A head keeps a mask of padding, which it may need (auxiliary losses).

Shapes: B rows of S tokens, T = B·S.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.patches.attention.context import CONTEXT, PackedForward, Reach, Unpacked
from flexvarlen.patches.attention.functions import IMPLEMENTATIONS
from flexvarlen.patches.attention.routing import base_of, dtype_of_queries, row_wide
from flexvarlen.patches.batch.cache import mark_cache, note_documents, refuse_packed_documents
from flexvarlen.patches.batch.find_layout import BOUNDARIES, find_layout
from flexvarlen.patches.batch.keywords import refuse_mask_of_another_kind, refuse_other_names
from flexvarlen.patches.batch.labels import mask_labels
from flexvarlen.patches.batch.one_document import (
    check_one_document,
    one_document_a_row,
    why_not_whole_rows,
)
from flexvarlen.patches.batch.positions import has_axes, positions_for, text_positions
from flexvarlen.patches.forward.context_parallel import refuse_context_parallel
from flexvarlen.patches.forward.heads import POOLS, keep_from_loss, refuse_pooling
from flexvarlen.patches.forward.sequence_parallel import prepare_shard
from flexvarlen.patches.forward.wrapper import (
    arguments_of_caller,
    has_our_forward,
    refuse_bypassed_caller,
)
from flexvarlen.patches.models.image_masks import refuse_image_blocks
from flexvarlen.patches.models.rope import has_longrope, positions_by_run
from flexvarlen.patches.models.towers import first_layer, text_config_of, text_tower
from flexvarlen.patches.state import ATTRIBUTE, Patch


def before_forward(module: nn.Module, inputs: dict[str, Any]) -> dict[str, Any] | None:
    patch: Patch | None = module.__dict__.get(ATTRIBUTE)
    return None if patch is None else prepare_inputs(module, patch, inputs)


def after_forward(inputs: dict[str, Any], outputs: Any) -> None:
    packed = inputs.get(CONTEXT)
    if not isinstance(packed, PackedForward):
        return
    if packed.reach is not None and not packed.reach.base:
        raise ValueError(_KEPT_BY_HEAD)
    if packed.one_a_row is not None:
        mark_cache(outputs, packed)
    if packed.drops_pooled and "pooler_output" in outputs:
        outputs["pooler_output"] = None


def prepare_inputs(module: nn.Module, patch: Patch, inputs: dict[str, Any]) -> dict[str, Any]:
    """A forward's keyword arguments with the documents found, or marked as checked for decoding.

    Raises:
        ValueError: boundaries that break the contract, a packed batch with a non-empty cache, with
            one that makes room for other tokens, or with a 4D mask, or another attn_implementation
            set since (it would take our placeholder for a mask that hides nothing).

    Decoding reads the device once a forward, if there are positions or a mask to look at.
    """
    tokens = _tokens(inputs)
    pooling_head = inputs.pop(POOLS, None)
    handed = inputs.get(CONTEXT)
    if tokens is None or handed is not None:
        if isinstance(handed, PackedForward):
            if handed.reach is not None:
                handed.reach.base = True
            if base_of(module) is module:  # type: ignore[arg-type]
                inputs["attention_mask"] = _placeholder(handed.layout.device)
        return inputs
    refuse_bypassed_caller(module)
    refuse_context_parallel()
    refuse_other_names(inputs, type(module))
    refuse_mask_of_another_kind(inputs.get("attention_mask"))
    refuse_image_blocks(module.config, inputs)
    config: Any = text_config_of(module.config)
    causal = any(kind.causal for kind in patch.kinds)
    if IMPLEMENTATIONS.get(config._attn_implementation) not in patch.backends:
        raise ValueError(
            "a patched model's attn_implementation must stay its own, got "
            f"{config._attn_implementation!r}, set since; call unpatch_model before setting "
            "another, or patch_model again."
        )
    batch, row_tokens = tokens.shape[:2]
    attention_mask, cache = inputs.get("attention_mask"), inputs.get("past_key_values")
    given = {name: inputs.pop(name, None) for name in BOUNDARIES}
    group = patch.sequence_parallel_group
    if group is not None:
        prepare_shard(module, inputs, given, tokens, config, group)
    explicit = given["packed_layout"] is not None or given["cu_seq_lens_q"] is not None
    not_whole_rows = why_not_whole_rows(cache, attention_mask, row_tokens)
    position_ids = text_positions(
        inputs.get("position_ids"),
        axes=has_axes(config),
        borders_elsewhere=explicit or given["seq_idx"] is not None or not_whole_rows is not None,
    )
    if not_whole_rows is not None:
        if any(boundaries is not None for boundaries in given.values()):
            raise ValueError(
                f"a packed batch must not come with {not_whole_rows}; pass an empty cache or "
                "use_cache=False, and no 4D attention_mask."
            )
        refuse_packed_documents(cache)
        check_one_document(
            row_tokens,
            position_ids=position_ids,
            attention_mask=attention_mask,
            with_what=not_whole_rows,
            seen=0 if cache is None else cache.get_seq_length(),
        )
        inputs[CONTEXT] = Unpacked.CHECKED
        return inputs
    layout = given["packed_layout"]
    if group is None:
        layout = find_layout(
            batch,
            row_tokens,
            tokens.device,
            position_ids=position_ids,
            attention_mask=attention_mask,
            capacity=patch.capacity,
            max_seqlen_bound=patch.max_seqlen_bound,
            **given,
        )
    refuse_pooling(pooling_head, layout, batch)
    if not torch.compiler.is_compiling() and not explicit:
        _refuse_kept_by_head(module, tokens, layout)
    if position_ids is not None and has_longrope(config):
        inputs["position_ids"] = positions_by_run(layout, position_ids, row_tokens)
    # Inside a compiled graph nothing that varies with the documents may be asked: it would be
    # guarded on.
    packs = torch.compiler.is_compiling() or layout.num_docs != batch or bool(layout.has_padding)
    base = base_of(module)  # type: ignore[arg-type]
    positions = positions_for(base, layout, inputs, packs=packs, causal=causal)
    if positions is not None:
        inputs["position_ids"] = positions
    if causal:  # else a label is the token's own, not the next one
        mask_labels(module, inputs, layout, group)
    caches: bool | None = getattr(config, "use_cache", None)  # None: an encoder, which has no cache
    wants_no_cache = caches is not None and (
        explicit
        or not causal
        or module.training
        or torch.compiler.is_compiling()
        or _compiled_by_layer(base)
    )
    if wants_no_cache and inputs.get("use_cache") is None and cache is None:
        inputs["use_cache"] = False
    packed = packed_forward(module, patch, layout)
    use_cache = inputs.get("use_cache")
    if cache is not None or (caches if use_cache is None else use_cache):
        packed.one_a_row = one_document_a_row(layout, batch)
        if not torch.compiler.is_compiling():
            packed.several_a_row = not bool(packed.one_a_row)
        note_documents(cache, packed)  # before any layer fills it: one of them may fail
    if base._modules.get("pooler") is not None:
        packed.drops_pooled = _drops_pooled(layout, batch, config, inputs)
    inputs[CONTEXT] = packed
    if base is module:
        inputs["attention_mask"] = _placeholder(tokens.device)
        return inputs
    may_pad = (explicit or attention_mask is not None) and group is None
    inputs["attention_mask"] = _mask_of_padding(layout, tokens) if packs and may_pad else None
    packed.packs = packs
    if has_our_forward(base):  # another that was set on it since hands the layers theirs, too
        packed.reach = Reach(base=not packs)
    keep_from_loss(module)
    return inputs


def _refuse_kept_by_head(base: nn.Module, tokens: Tensor, layout: PackedLayout) -> None:
    """Raise if a running head has other documents in like rows, which it did not hand on.

    Where they are the same, they have reached the base model.

    Raises:
        ValueError: it has.
    """
    given = arguments_of_caller(base) or {}
    handed, theirs = given.get(CONTEXT), _tokens(given)
    if not isinstance(handed, PackedForward) or not handed.packs or theirs is None:
        return
    if theirs.shape[:2] != tokens.shape[:2] or theirs.device != tokens.device:
        return  # another batch
    if not torch.equal(layout.document_ids(), handed.layout.document_ids()):
        raise ValueError(_KEPT_BY_HEAD)
    if handed.reach is not None:
        handed.reach.base = True


_KEPT_BY_HEAD = (
    "a patched head's forward must hand its **kwargs on to its base model, as the documents come "
    "to the layers by them, got one that did not: its outputs may cross documents; call the base "
    "model with **kwargs."
)


def _placeholder(device: torch.device) -> Tensor:
    """A mask beside which transformers makes none, and that nobody reads."""
    return torch.ones((1, 1, 1, 1), dtype=torch.bool, device=device)


def _mask_of_padding(layout: PackedLayout, tokens: Tensor) -> Tensor | None:
    """int64 `[B, S]`, 0 at padding, 1 at documents; None if it is known that there is no padding.

    What a graph knows of it varies with the documents, and is not asked.
    """
    if not torch.compiler.is_compiling() and layout.has_padding is False:
        return None
    return layout.real_tokens().view(tokens.shape[:2]).long()


def _tokens(inputs: dict[str, Any]) -> Tensor | None:
    """The forward's `[B, S]` ids or `[B, S, hidden]` embeddings."""
    input_ids: Tensor | None = inputs.get("input_ids")
    return inputs.get("inputs_embeds") if input_ids is None else input_ids


def _compiled_by_layer(base: Any) -> bool:
    """Whether its layers are compiled one by one: with a cache each would get its own graph."""
    first = first_layer(text_tower(base))
    if first is None:
        return False
    return "_orig_mod" in first._modules or first._compiled_call_impl is not None


def packed_forward(module: nn.Module, patch: Patch, layout: PackedLayout) -> PackedForward:
    """What the layers of a forward with these documents get.

    Args:
        module: the model, or its tower, whose `patch` has the kinds of layers.
    """
    promises = (patch.deterministic, patch.batch_invariant)
    packed = PackedForward(layout, patch.backend, *promises, **row_wide(module.config))
    packed.group = patch.sequence_parallel_group
    device_type = layout.device.type
    dtype = (
        torch.get_autocast_dtype(device_type)
        if torch.is_autocast_enabled(device_type)
        else dtype_of_queries(module)
    )
    # As in the layers: a reentrant checkpoint runs a training forward without gradients first.
    needs_grad = torch.is_grad_enabled() or module.training
    for kind in patch.kinds:
        others = tuple(packed.routes.items())
        packed.routes[kind] = packed.make_route(kind, dtype, needs_grad, others)
    return packed


def _drops_pooled(layout: PackedLayout, batch: int, config: Any, inputs: dict[str, Any]) -> bool:
    """Whether a row may hold several documents: the pooler would take the first one's for all.

    Raises:
        ValueError: then the outputs are asked for as a tuple, in which none can be left out.
    """
    if not torch.compiler.is_compiling() and bool(one_document_a_row(layout, batch)):
        return False
    return_dict = inputs.get("return_dict")
    if not (config.return_dict if return_dict is None else return_dict):
        raise ValueError(
            "return_dict must stay True where a row may hold several documents, got False: the "
            "pooler's output, of the row's first token alone, is left out; leave return_dict out, "
            "and pool last_hidden_state by document."
        )
    return True
