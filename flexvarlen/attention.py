"""`packed_attention`: validate, choose a kernel, call it.

Shape legend: T = tokens of the query row, Tk = of the key row (equal in self-attention),
H = num_heads, Hkv = num_kv_heads, D = head_dim.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor

from flexvarlen.backends import (
    AttentionOptions,
    AttentionRequest,
    choose_backend,
    get_backend,
    refusal,
)
from flexvarlen.bounds import Align, MaskSpec
from flexvarlen.layout import PackedLayout
from flexvarlen.mask import DocumentMask, Prefix


def packed_attention(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    layout: PackedLayout,
    *,
    layout_k: PackedLayout | None = None,
    causal: bool = True,
    window: int | tuple[int, int] | None = None,
    chunk: int | None = None,
    prefix: Prefix | None = None,
    align: Align = "bottom_right",
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    backend: str = "auto",
    deterministic: bool = False,
    batch_invariant: bool = False,
    return_lse: bool = False,
    plan: Any = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of every document of a packed row to itself alone, or to its own keys elsewhere.

    Args:
        q_THD: `[T, H, D]`, float, on the layout's device.
        k_THD, v_THD: `[Tk, Hkv, D]`, same dtype and device; H a multiple of Hkv (grouped-query
            attention; K and V are not repeated).
        layout: the documents.
        layout_k, causal, window, chunk, prefix, align: which keys of its document a query sees; as
            in `DocumentMask.of`.
        softcap: scores become `softcap * tanh(score / softcap)`.
        sinks: `[H]`, one logit a head that joins the softmax's denominator.
        scale: factor on the scores; default `D ** -0.5`.
        backend: a name of `flexvarlen.BACKENDS`, or "auto": the first usable of a static order by
            device.
        deterministic: the backward must give the same bits every time.
        batch_invariant: a document must give the same bits whatever else is in the row.
        return_lse: also return the log-sum-exp of the scores.
        plan: what `get_backend(name).plan(mask)` gave for this very mask (a BlockMask, for flex),
            to share it among layers.

    Returns:
        The output `[T, H, D]`, zero at padding; with `return_lse` also the LSE, fp32 `[H, T]`, -inf
        at padding (differentiable on flex and reference only).

    Raises:
        ValueError: tensors that do not fit one another or the layout.
        NotImplementedError: the named backend cannot serve the call; the sentence says why, and
            what to do.

    No host sync on the GPU backends but `sdpa`; traces under `fullgraph=True`.

    >>> layout = PackedLayout.from_lengths([3, 2])
    >>> q = torch.randn(5, 4, 8); k = torch.randn(5, 2, 8)
    >>> packed_attention(q, k, k, layout).shape
    torch.Size([5, 4, 8])
    """
    mask = DocumentMask.of(
        layout,
        causal=causal,
        window=window,
        chunk=chunk,
        prefix=prefix,
        layout_k=layout_k,
        align=align,
    )
    _check_tensors(q_THD, k_THD, v_THD, mask, sinks)
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(
            f"softcap must be above 0 and finite, got {softcap}; pass None for no softcap."
        )
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"scale must be finite, got {scale}; pass None for head_dim ** -0.5.")
    request = (
        q_THD.device.type,
        q_THD.device.index,
        q_THD.dtype,
        q_THD.shape[1],
        k_THD.shape[1],
        q_THD.shape[2],
        tuple(mask.spec.as_ints()),
        softcap,
        sinks is not None,
        torch.is_grad_enabled()
        and (q_THD.requires_grad or k_THD.requires_grad or v_THD.requires_grad),
        deterministic,
        batch_invariant,
        return_lse,
    )
    name = _resolve(backend, *request)
    chosen = get_backend(name)
    options = AttentionOptions(
        scale=q_THD.shape[2] ** -0.5 if scale is None else scale,
        softcap=softcap,
        sinks_H=sinks,
        deterministic=deterministic,
        return_lse=return_lse,
    )
    if plan is None:
        plan = chosen.plan(mask)
    out_THD, lse_HT = chosen.attend(q_THD, k_THD, v_THD, mask, plan, options)
    return out_THD if lse_HT is None else (out_THD, lse_HT)


def resolve_backend(
    backend: str,
    device: torch.device,
    dtype: torch.dtype,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    needs_grad: bool,
) -> str:
    """The backend's name for plain causal calls of this kind, "auto" resolved.

    Raises:
        NotImplementedError: the backend, or every candidate of "auto", cannot serve them.

    Traces under `fullgraph=True`, as a constant.
    """
    call = (device.type, device.index, dtype, num_heads, num_kv_heads, head_dim)
    causal = tuple(MaskSpec().as_ints())
    name: str = _resolve(backend, *call, causal, None, False, needs_grad, False, False, False)
    return name


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _resolve(backend: str, device_type: str, device_index: int | None, *rest: Any) -> str:
    """The backend's name, once it is known to serve such calls.

    Takes constants only: Dynamo runs it while tracing.
    """
    # torch's switch decides what `varlen` can serve, so an answer holds only while it stays.
    switch = torch.are_deterministic_algorithms_enabled()
    return _resolve_cached(switch, backend, device_type, device_index, *rest)


@cache
def _resolve_cached(
    torch_is_deterministic: bool,
    backend: str,
    device_type: str,
    device_index: int | None,
    dtype: torch.dtype,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    mask: tuple[int, ...],
    softcap: float | None,
    sinks: bool,
    needs_grad: bool,
    deterministic: bool,
    batch_invariant: bool,
    return_lse: bool,
) -> str:
    request = AttentionRequest(
        device=torch.device(
            device_type if device_index is None else f"{device_type}:{device_index}"
        ),
        dtype=dtype,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        mask=MaskSpec.from_ints(mask),
        softcap=softcap,
        sinks=sinks,
        needs_grad=needs_grad,
        deterministic=deterministic,
        batch_invariant=batch_invariant,
        return_lse=return_lse,
    )
    if backend == "auto":
        return choose_backend(request)
    reason = refusal(backend, request)
    if reason is not None:
        raise NotImplementedError(reason)
    return backend


def _check_tensors(
    q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, mask: DocumentMask, sinks: Tensor | None
) -> None:
    """Raise a sentence unless the tensors fit one another and the layouts.

    Reads shapes only, no values.
    """
    device = mask.layout.device
    of_keys = "layout_k" if mask.spec.cross else "layout"
    for name, x in (("q", q_THD), ("k", k_THD), ("v", v_THD)):
        whose, layout = ("layout", mask.layout) if name == "q" else (of_keys, mask.layout_k)
        if x.ndim != 3:
            raise ValueError(
                f"{name} must have shape [tokens, heads, head_dim], got {tuple(x.shape)}; drop the "
                "batch dimension, or flatten it into the tokens."
            )
        if x.shape[0] != layout.total_tokens:
            raise ValueError(
                f"{name} must have the {whose}'s total_tokens={layout.total_tokens} rows, got "
                f"{x.shape[0]}; pass total_tokens= to the layout if the row ends in padding."
            )
        if x.device != device:
            raise ValueError(
                f"{name} must be on the layout's device {device}, got {x.device}; call layout.to()."
            )
        if x.dtype != q_THD.dtype:
            raise ValueError(
                f"q, k and v must have one dtype, got {q_THD.dtype} and {x.dtype} for {name}; cast "
                "one."
            )
    if k_THD.shape != v_THD.shape or k_THD.shape[2] != q_THD.shape[2]:
        raise ValueError(
            f"k and v must have shape [tokens, kv_heads, {q_THD.shape[2]}], got "
            f"{tuple(k_THD.shape)} and {tuple(v_THD.shape)}; head_dim must be q's."
        )
    if k_THD.shape[1] == 0 or q_THD.shape[1] % k_THD.shape[1]:
        raise ValueError(
            f"num_heads must be a multiple of num_kv_heads, got {q_THD.shape[1]} and "
            f"{k_THD.shape[1]}; check how the heads were split."
        )
    if sinks is not None and (sinks.shape != q_THD.shape[1:2] or sinks.device != device):
        raise ValueError(
            f"sinks must have shape [{q_THD.shape[1]}] on {device}, got {tuple(sinks.shape)} on "
            f"{sinks.device}; pass one logit a head."
        )
