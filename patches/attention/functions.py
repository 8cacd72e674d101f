"""The attention and mask functions registered with transformers as `flexvarlen_*`.

A patched model passes each layer a `PackedForward`. Without `patch_model` (attn_implementation
only) a layer reads the boundaries from its arguments: see `without_patch.py`.

Fewer queries than keys, or a 4D mask, means decoding, which is not packed: see `decoding.py`.

Shapes: B rows of S tokens; H = num_heads, Hkv = num_kv_heads, D = head_dim; T = B·S.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from flexvarlen.attention.api import to_one_head_dim
from flexvarlen.attention.backends.registry import IMPLEMENTATIONS
from flexvarlen.patches.attention.decoding import attend_to_cache
from flexvarlen.patches.attention.packed_forward import PackedForward, PackedVision, Unpacked
from flexvarlen.patches.attention.without_patch import (
    check_unpacked,
    is_unpacked,
    packed_by_name,
    refuse_by_name,
)
from flexvarlen.patches.models.image_masks import assert_causal, has_overlay
from flexvarlen.patches.models.layers import LayerKind, chunk_of, layer_type_of
from flexvarlen.patches.models.llama4 import own_temperature
from flexvarlen.patches.state import (
    CONTEXT,
    LAYER_MARK,
    LOST_DOCUMENTS,
    VISION_IMPLEMENTATION,
    LostDocuments,
)

Attention = Callable[..., tuple[Tensor, None]]


def register() -> None:
    """Register every implementation's attention and mask function with transformers.

    Safe to call twice.
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
        context: PackedForward | Unpacked | None = kwargs.get(CONTEXT)
        if context is None:
            _refuse_lost_documents(module)
            refuse_by_name(attention_mask, kwargs)
        if not isinstance(context, PackedForward):
            if is_unpacked(query, key, attention_mask):
                _refuse(module, dropout, kwargs)
                if context is None:
                    check_unpacked(module, query.shape[2], attention_mask, kwargs)
                return attend_to_cache(
                    module, query, key, value, attention_mask, scaling, softcap, is_causal, kwargs
                )
            context = packed_by_name(module, query, attention_mask, backend, context, kwargs)
        _refuse(module, dropout, kwargs)
        batch, heads, row_tokens, head_dim = query.shape
        _check_tokens(context, batch, row_tokens, key.shape[2])
        sinks: Tensor | None = kwargs.get("s_aux")
        v_dim, chunk = value.shape[3], context.chunk_size
        if chunk is not None:
            chunk = chunk_of(module, chunk)
        own = module.__dict__
        if sliding_window is None and own.get("is_sliding", True):
            sliding_window = own.get("sliding_window")  # Qwen2-MoE does not pass it on
        kind = LayerKind(
            layer_type_of(module, sliding_window, chunk),
            bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal,
            sliding_window,
            chunk,
            heads,
            key.shape[1],
            max(head_dim, v_dim),
            head_dim**-0.5 if scaling is None else scaling,
            softcap,
            sinks is not None,
        )
        q, k, v = _under_autocast(_as_THD(query), _as_THD(key), _as_THD(value))
        if context.has_temperature:
            q = own_temperature(module, q, context, row_tokens)
        if v_dim != head_dim:
            q, k, v = to_one_head_dim(q, k, v)
        out = context.attend(kind, q, k, v, sinks, own.get("layer_idx"))
        if v_dim < head_dim:
            out = out[..., :v_dim]
        return out.reshape(batch, row_tokens, heads, v_dim), None

    return flexvarlen_attention


_attention = _attention_function("auto")  # a PackedForward names its backend


def _vision_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    cu_seq_lens_q: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention in a vision tower's layer, by frame or window: query `[1, H, patches, D]`."""
    vision: object = kwargs.pop(CONTEXT, None)
    if not isinstance(vision, PackedVision):
        raise LostDocuments(LOST_DOCUMENTS)
    kwargs[CONTEXT] = vision.packed(cu_seq_lens_q)
    return _attention(module, query, key, value, None, **kwargs)


def _as_THD(x_BHSD: Tensor) -> Tensor:
    """`[T, H, D]`, usually a view, as most models compute heads as `[B, S, H, D]`."""
    batch, heads, row_tokens, head_dim = x_BHSD.shape
    return x_BHSD.transpose(1, 2).reshape(batch * row_tokens, heads, head_dim)


def _under_autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cast all three to autocast's dtype, as torch's SDPA does; RoPE leaves q and k in fp32."""
    device_type = q.device.type
    if not torch.is_autocast_enabled(device_type):
        return q, k, v
    dtype = torch.get_autocast_dtype(device_type)
    return q.to(dtype), k.to(dtype), v.to(dtype)


# ---- unsupported arguments ----


def _refuse_lost_documents(layer: nn.Module) -> None:
    """Raise for a layer of a patched model that is called without its documents."""
    if LAYER_MARK in layer.__dict__:
        raise LostDocuments(LOST_DOCUMENTS)


def _check_tokens(context: PackedForward, batch: int, row_tokens: int, keys: int) -> None:
    """Raise unless queries and keys are the tokens of the packed batch."""
    if row_tokens != keys or row_tokens * batch != context.layout.total_tokens:
        raise ValueError(
            f"queries and keys must be the {context.layout.total_tokens} tokens of the packed "
            f"batch, got {batch * row_tokens} queries and {batch * keys} keys; pack "
            "without a cache."
        )


def _refuse(module: nn.Module, dropout: float, kwargs: dict[str, Any]) -> None:
    """Raise for unsupported options."""
    if dropout:
        # Its name differs by family: attention_dropout, attn_pdrop, attention_probs_dropout_prob.
        config = vars(getattr(module, "config", module))
        found = (k for k, x in config.items() if "att" in k and "drop" in k and x == dropout)
        option = next(found, "attention_dropout")
        raise NotImplementedError(
            f"attention dropout must be 0, got {dropout}, which no kernel here supports; set "
            f"config.{option}=0.0 before the model is built (from_pretrained takes {option}=0.0)."
        )
    if kwargs.get("position_bias") is not None:
        raise NotImplementedError(
            "a position_bias is not supported; use the model's own attention."
        )
    if kwargs.get("output_attentions"):
        raise NotImplementedError(
            "output_attentions=True is not supported, as no kernel returns the weights; use "
            "attn_implementation='eager'."
        )
    if kwargs.get("cache") is not None:
        raise NotImplementedError(
            "continuous batching is not supported by flexvarlen's implementations; use "
            "attn_implementation='sdpa' for it."
        )


# ---- the mask function ----


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

    Whole rows keep their 2D mask, from which the attention function reads padding. Everything else,
    including masks that a model adds for images, gets transformers' sdpa mask; packed documents are
    then refused.
    """
    whole_rows = (
        q_length == kv_length
        and not use_vmap
        and isinstance(q_offset, int)
        and q_offset == 0
        and not has_overlay(kwargs.get("mask_function"))
    )
    if whole_rows and (attention_mask is None or attention_mask.shape[-1] == kv_length):
        if torch.compiler.is_compiling() and "allow_is_bidirectional_skip" not in kwargs:
            assert_causal(kwargs.get("mask_function"), batch_size, q_length, kwargs.get("device"))
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

    transformers pads it with zeros, and a layer that sees only the padded mask would treat
    the documents after its end as padding.
    """
    seen = 0 if isinstance(q_offset, Tensor) and torch.compiler.is_compiling() else int(q_offset)
    if columns < seen + q_length:
        raise ValueError(
            f"attention_mask must have a column for each of the {seen + q_length} tokens of a row, "
            f"including those in the cache, got {columns}; pass a mask of that length."
        )
