"""The functions that transformers calls by the names `flexvarlen_*`: attention and its mask.

A patched model hands each layer a `PackedForward`. Without it (the name alone, no `patch_model`) a
layer finds the boundaries in what reaches it: position_ids, cu_seq_lens, seq_idx and 2D padding
masks, but not masks of document ids, which transformers turns to booleans, nor labels.

A patched model that is pickled keeps the name and loses `patch_model`'s wrapper: its layers know,
and raise.

Fewer queries than keys, or a 4D mask, is decoding, which is not packed: it goes to `decoding.py`.
With several documents in a row, in the new tokens or in the cache, it raises; but by the name alone
a cache of several is not noticed if a compiled forward filled it, if all its layers have a sliding
window, or if it keeps no keys as they came (quantized). A patched model notices these too, but on
its own cache only, not on one rebuilt from its tensors.

Shapes: B rows of S tokens; H = num_heads, Hkv = num_kv_heads, D = head_dim; T = B·S.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from flexvarlen.attention.api import packed_attention
from flexvarlen.attention.backends.registry import BACKENDS
from flexvarlen.attention.recompile_limit import warn_if_fallen_back
from flexvarlen.env import BATCH_INVARIANT, DETERMINISTIC, promised
from flexvarlen.parallel import heads_a_rank, ulysses_attention
from flexvarlen.patches.attention.by_name import shared_between_layers
from flexvarlen.patches.attention.compile_warnings import SIZELESS, note_sizes
from flexvarlen.patches.attention.context import CONTEXT, PackedForward, PackedVision, Unpacked
from flexvarlen.patches.attention.decoding import OTHER_KEYS, attend_to_cache
from flexvarlen.patches.attention.own_guards import drop_own_guards
from flexvarlen.patches.attention.routing import (
    LayerKind,
    chunk_of,
    layer_type_of,
    refusal_of_layers,
)
from flexvarlen.patches.batch.cache import set_apart
from flexvarlen.patches.batch.find_layout import BOUNDARIES
from flexvarlen.patches.batch.keywords import refuse_mask_of_another_kind, refuse_other_names
from flexvarlen.patches.forward.context_parallel import refuse_context_parallel
from flexvarlen.patches.forward.wrapper import (
    MARK,
    refuse_dropped_documents,
    refuse_lost_patch,
    refuse_replica,
)
from flexvarlen.patches.models.image_masks import has_overlay
from flexvarlen.patches.models.llama4 import own_temperature
from flexvarlen.patches.models.registry import require_verified_alone
from flexvarlen.patches.models.rope import refuse_dynamic_rope, refuse_unpatched_longrope

IMPLEMENTATIONS = {
    # transformers takes any name with "sdpa" or "flash" in it for its own
    "flexvarlen_doc" if backend == "sdpa" else f"flexvarlen_{backend}": backend
    for backend in (*BACKENDS, "auto")
}
"""`attn_implementation` names, and the backend behind each."""

VISION_IMPLEMENTATION = "flexvarlen_flash_vision"
"""The name on the config of a patched vision tower.

With "flash" in it the tower calls attention once a layer, with cu_seqlens; without, once a frame.
It is never passed to transformers' setters, which would load a package for it.
"""

Attention = Callable[..., tuple[Tensor, None]]


def register() -> None:
    """Register every implementation's attention and mask function with transformers.

    Twice does no harm.
    """
    for name, backend in IMPLEMENTATIONS.items():
        AttentionInterface.register(name, _attention_function(backend))
        AttentionMaskInterface.register(name, _mask_function)
    AttentionInterface.register(VISION_IMPLEMENTATION, _vision_attention)


def _attention_function(backend: str) -> Attention:
    def flexvarlen_attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        is_causal: bool | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Attention of query `[B, H, S, D]`, key and value `[B, Hkv, S, D]`: `[B, S, H, D]`."""
        handed: PackedForward | Unpacked | None = kwargs.get(CONTEXT)
        if handed is None:
            refuse_context_parallel()
            if kwargs.get("cu_seq_lens_q") is not None:
                refuse_replica(module)
            refuse_lost_patch(module)
            refuse_other_names(kwargs)
            refuse_mask_of_another_kind(attention_mask)
            _refuse_lost_documents(module, attention_mask, key)
        packed = handed if isinstance(handed, PackedForward) else None
        compiling = torch.compiler.is_compiling()
        if not compiling:
            warn_if_fallen_back(type(module).__name__)
        # First whether it compiles: nothing that varies with the documents may be guarded on.
        if packed is not None and not compiling and packed.several_a_row:
            key = set_apart(key)
        _refuse(module, dropout, kwargs)
        if packed is None and (
            query.shape[2] != key.shape[2]
            or (attention_mask is not None and attention_mask.ndim == 4)
        ):
            if handed is None and kwargs.get("seq_idx") is not None:
                raise ValueError(
                    f"a packed batch must not come with {OTHER_KEYS}; pass an empty cache or "
                    "use_cache=False, and no 4D attention_mask."
                )
            return attend_to_cache(
                module, query, key, value, attention_mask, scaling, softcap, is_causal, kwargs
            )
        batch, heads, row_tokens, head_dim = query.shape
        kv_heads = key.shape[1]
        if packed is None:
            if handed is None:  # nobody has looked at what no layer sees
                require_verified_alone(module.config.model_type)  # type: ignore[union-attr, arg-type]
                refuse_dynamic_rope(module.config)
                refuse_unpatched_longrope(module.config)
            packed = shared_between_layers(
                module,
                backend,
                batch,
                row_tokens,
                query.device,
                attention_mask=attention_mask,
                **{name: kwargs.get(name) for name in (*BOUNDARIES, "position_ids")},
            )
            if not compiling and packed.several_a_row:
                key = set_apart(key)
        elif row_tokens != key.shape[2] or row_tokens * batch != packed.tokens_here:
            raise ValueError(
                f"queries and keys must be the {packed.tokens_here} tokens of the packed "
                f"batch, got {batch * row_tokens} queries and {batch * key.shape[2]} keys; pack "
                "without a cache."
            )
        causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
        sinks = kwargs.get("s_aux")
        q_THD, k_THD, v_THD = _under_autocast(_as_THD(query), _as_THD(key), _as_THD(value))
        if packed.has_temperature:
            q_THD = own_temperature(module, q_THD, packed.layout, row_tokens, packed.group)
        options: dict[str, Any] = {}
        attend: Callable[..., Any] = packed_attention
        own_heads = heads, kv_heads
        if packed.group is not None:
            attend, options = ulysses_attention, {"group": packed.group}
            own_heads = heads_a_rank(heads, kv_heads, dist.get_world_size(packed.group))
        chunk = chunk_of(module, packed.chunk_size)
        kind = LayerKind(
            layer_type_of(module, sliding_window, chunk),
            causal,
            sliding_window,
            chunk,
            *own_heads,
            max(head_dim, value.shape[3]),
            softcap,
            sinks is not None,
        )
        route = packed.route(kind, q_THD.dtype, torch.is_grad_enabled() or module.training)
        if compiling and route.backend not in SIZELESS:
            layout = packed.layout
            note_sizes(module, kind, layout.total_tokens, layout.capacity, layout.max_seqlen_bound)
        try:
            out_THD = attend(
                q_THD,
                k_THD,
                v_THD,
                packed.layout,
                causal=causal,
                window=sliding_window,
                chunk=chunk,
                softcap=softcap,
                sinks=sinks,
                scale=scaling,
                backend=route.backend,
                deterministic=packed.deterministic,
                batch_invariant=packed.batch_invariant,
                plan=route.plan,
                **options,
            )
        except NotImplementedError as refusal:
            if len(packed.routes) < 2:
                raise
            raise NotImplementedError(
                refusal_of_layers(
                    refusal,
                    route.backend,
                    kind,
                    device=q_THD.device,
                    dtype=q_THD.dtype,
                    needs_grad=torch.is_grad_enabled(),
                    deterministic=promised(DETERMINISTIC, packed.deterministic),
                    batch_invariant=promised(BATCH_INVARIANT, packed.batch_invariant),
                )
            ) from refusal
        assert isinstance(out_THD, Tensor)
        if compiling:
            drop_own_guards()
        return out_THD.reshape(batch, row_tokens, heads, value.shape[3]), None

    return flexvarlen_attention


_attend = _attention_function("auto")  # a PackedForward has its own backend


def _vision_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    cu_seq_lens_q: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of a vision tower's layer, by frame or window: query `[1, H, patches, D]`."""
    vision: PackedVision | None = kwargs.pop(CONTEXT, None)
    if vision is None:
        refuse_lost_patch(module)
        raise ValueError(
            "a patched vision tower's layers must be called by its forward, which finds the "
            "frames, got a call of their own; call the tower."
        )
    kwargs[CONTEXT] = vision.packed(cu_seq_lens_q)
    return _attend(module, query, key, value, None, **kwargs)


def _as_THD(x_BHSD: Tensor) -> Tensor:
    """`[T, H, D]`: a view, as most models make their heads from `[B, S, H, D]` memory."""
    batch, heads, row_tokens, head_dim = x_BHSD.shape
    return x_BHSD.transpose(1, 2).reshape(batch * row_tokens, heads, head_dim)


def _under_autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """All three in autocast's dtype, as torch's own SDPA does; rotations leave q and k in fp32."""
    device_type = q.device.type
    if not torch.is_autocast_enabled(device_type):
        return q, k, v
    dtype = torch.get_autocast_dtype(device_type)
    return q.to(dtype), k.to(dtype), v.to(dtype)


_DROPOUTS = ("attention_probs_dropout_prob", "attention_dropout")  # of BERT, of all others


def _refuse_lost_documents(layer: nn.Module, mask: Tensor | None, key: Tensor) -> None:
    """Raise for a patched model's placeholder of a mask that comes without its `PackedForward`.

    Raises:
        ValueError: it does, and would be taken for a mask that hides nothing.
    """
    is_placeholder = mask is not None and mask.shape == (1, 1, 1, 1)
    if is_placeholder and key.shape[2] > 1 and MARK in layer.__dict__:
        refuse_dropped_documents(layer)


def _refuse(module: nn.Module, dropout: float, kwargs: dict[str, Any]) -> None:
    """Raise a sentence for what cannot be honoured."""
    if dropout:
        config = getattr(module, "config", None)
        option = next((name for name in _DROPOUTS if hasattr(config, name)), _DROPOUTS[-1])
        own = "dropout.p" if "dropout" in module._modules else "attention_dropout"
        raise NotImplementedError(
            f"attention dropout must be 0, got {dropout}: no packed kernel here drops; set "
            f"config.{option}=0.0 before the model is built (from_pretrained takes {option}=0.0), "
            f"or {own} = 0.0 on its attention modules."
        )
    if kwargs.get("position_bias") is not None:
        raise NotImplementedError(
            "a position_bias is not supported; use the model's own attention."
        )
    if kwargs.get("output_attentions"):
        raise NotImplementedError(
            "output_attentions=True is not supported, no kernel here keeps the weights; use "
            "attn_implementation='eager'."
        )
    if kwargs.get("cache") is not None:
        raise NotImplementedError(
            "continuous batching is not supported by flexvarlen's implementations; use "
            "attn_implementation='sdpa' for it."
        )


def _mask_function(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    **kwargs: Any,
) -> Tensor | None:
    """The mask for a model that is not patched, or for decoding.

    Whole rows keep their 2D mask: the attention function reads padding from it. All else, and what
    a model draws over images, is transformers' sdpa mask, beside which packed documents are
    refused.
    """
    whole_rows = (
        q_length == kv_length
        and not use_vmap
        and isinstance(q_offset, int)
        and q_offset == 0
        and not has_overlay(kwargs.get("mask_function"))
    )
    if whole_rows and (attention_mask is None or attention_mask.shape[-1] == kv_length):
        return attention_mask
    if attention_mask is not None and attention_mask.ndim == 2 and q_length > 1:
        _check_mask_length(attention_mask.shape[-1], q_length, q_offset)
    mask: Tensor | None = sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        attention_mask=attention_mask,
        use_vmap=use_vmap,
        **kwargs,
    )
    return mask


def _check_mask_length(columns: int, q_length: int, q_offset: int | Tensor) -> None:
    """Refuse a 2D mask that ends before the new tokens do.

    transformers fills it up with zeros, and a layer that sees the filled-up mask alone would take
    the documents behind its end for padding.
    """
    seen = 0 if isinstance(q_offset, Tensor) and torch.compiler.is_compiling() else int(q_offset)
    if columns < seen + q_length:
        raise ValueError(
            f"attention_mask must have a column for each of the {seen + q_length} tokens of a row, "
            f"those of the cache included, got {columns}; pass one of that length."
        )
