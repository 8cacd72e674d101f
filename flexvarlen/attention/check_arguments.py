"""Validate the arguments of `packed_attention` against one another."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flexvarlen.layout.arguments import require_tensor
from flexvarlen.layout.packed_layout import PackedLayout


def check_numbers(softcap: float | None, scale: float | None = None) -> None:
    """Raise ValueError unless softcap and scale are positive and finite.

    Kernels multiply masked scores of -inf, and a running maximum, by the scale.
    """
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(
            f"softcap must be above 0 and finite, got {softcap}; pass None for no softcap."
        )
    if scale is not None and not 0 < scale < math.inf:
        raise ValueError(
            f"scale must be above 0 and finite, got {scale}; pass None for head_dim ** -0.5, or "
            "scale q itself."
        )


def check_heads(num_heads: int, num_kv_heads: int) -> None:
    """Raise ValueError unless each KV head has the same number of query heads."""
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            f"num_heads must be a multiple of num_kv_heads, got {num_heads} and {num_kv_heads}; "
            "check how the heads were split."
        )


def check_tensors(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    layout: PackedLayout,
    layout_k: PackedLayout,
    sinks: Tensor | None,
) -> None:
    """Raise ValueError unless these are tensors that match one another and both layouts.

    v may have another head_dim. Reads only shapes, no values.
    """
    for name, x in (("q", q_THD), ("k", k_THD), ("v", v_THD)):
        require_tensor(name, x)
    if sinks is not None:
        require_tensor("sinks", sinks)
    device, dtype, q_shape, k_shape = q_THD.device, q_THD.dtype, q_THD.shape, k_THD.shape
    fit = (  # one expression, to save host time; `_raise_misfit` finds what is wrong
        len(q_shape) == 3
        and len(k_shape) == 3
        and k_shape[:2] == v_THD.shape[:-1]
        and q_shape[0] == layout.total_tokens
        and k_shape[0] == layout_k.total_tokens
        and q_shape[2] == k_shape[2]
        and k_shape[1] > 0
        and q_shape[1] % k_shape[1] == 0
        and dtype == k_THD.dtype == v_THD.dtype
        and device == k_THD.device == v_THD.device == layout.cu_seqlens.device
        and (sinks is None or _is_sinks(sinks, q_shape[1:2], device))
    )
    if not fit:
        _raise_misfit(q_THD, k_THD, v_THD, layout, layout_k, sinks)


def _is_sinks(sinks: Tensor, shape: tuple[int, ...], device: torch.device) -> bool:
    return sinks.is_floating_point() and sinks.shape == shape and sinks.device == device


def _raise_misfit(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    layout: PackedLayout,
    layout_k: PackedLayout,
    sinks: Tensor | None,
) -> None:
    """Raise the error for tensors that do not match."""
    device = layout.device
    of_keys = "layout" if layout_k is layout else "layout_k"
    for name, x in (("q", q_THD), ("k", k_THD), ("v", v_THD)):
        whose, tokens = of_keys, layout_k.total_tokens
        if name == "q":
            whose, tokens = "layout", layout.total_tokens
        if x.ndim != 3:
            raise ValueError(
                f"{name} must have shape [tokens, heads, head_dim], got {tuple(x.shape)}; drop the "
                "batch dimension, or flatten it into the tokens."
            )
        if x.shape[0] != tokens:
            raise ValueError(
                f"{name} must have the {whose}'s total_tokens={tokens} rows, got "
                f"{x.shape[0]}; pass total_tokens= to the layout if the row ends in padding."
            )
        if x.device != device:
            raise ValueError(
                f"{name} must be on the layout's device {device}, got {x.device}; call layout.to()."
            )
        if x.dtype != q_THD.dtype:
            raise ValueError(
                f"q, k and v must have one dtype, got {q_THD.dtype} and {x.dtype} for {name}; cast "
                "one of them."
            )
    if k_THD.shape[:2] != v_THD.shape[:2] or k_THD.shape[2] != q_THD.shape[2]:
        raise ValueError(
            f"k and v must have shape [tokens, kv_heads, {q_THD.shape[2]}], got "
            f"{tuple(k_THD.shape)} and {tuple(v_THD.shape)}; head_dim must be q's."
        )
    check_heads(q_THD.shape[1], k_THD.shape[1])
    if sinks is not None and not _is_sinks(sinks, q_THD.shape[1:2], device):
        raise ValueError(
            f"sinks must be floating point [{q_THD.shape[1]}] on {device}, got {sinks.dtype} "
            f"{tuple(sinks.shape)} on {sinks.device}; pass one logit per head."
        )
