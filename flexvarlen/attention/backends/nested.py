"""`nested`: torch's SDPA on nested tensors with the jagged layout.

SDPA is restricted to the flash kernel that `varlen` uses: otherwise torch 2.11 uses cuDNN for
some calls, and cuDNN's packed backward gives NaN.

Shape legend: as in `call.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from flexvarlen.attention.backends.cu_seqlens.kernel import KERNELS, MIN_BOUND, CallBoundaries
from flexvarlen.attention.backends.limits import fa4_gradient_refusal
from flexvarlen.attention.call import AttentionCall
from flexvarlen.env import flash_attention_impl
from flexvarlen.mask.document_mask import DocumentMask
from flexvarlen.mask.spec import MaskSpec


class NestedBackend:
    """SDPA on nested tensors. K and V are repeated for grouped-query attention."""

    name = "nested"

    def why_not(self, call: AttentionCall) -> str | None:
        """Require a plain causal or bidirectional mask."""
        spec = call.spec
        if spec.has_window or spec.chunk or spec.prefix or spec.runs:
            return "nested has no windows, chunks, prefixes or runs; use backend='flex'."
        if spec.tree:
            return "nested has no trees; use backend='flex'."
        if spec.cross:
            return "nested does not support layout_k; use backend='varlen' or 'flex'."
        if call.softcap is not None or call.sinks or call.return_lse:
            return "nested has no softcap, no sinks and no LSE; use backend='flex'."
        if call.ordered_backward:
            return (
                "nested guarantees neither determinism nor batch invariance; use backend='fa3', "
                "'fa2' or 'varlen'."
            )
        if call.past_int32:
            return (
                "nested reads out of bounds for queries of 2**31 elements or more "
                "(tokens x heads x head_dim); pack shorter rows, or use backend='fa3' or 'flex'."
            )
        if flash_attention_impl() == "FA4":
            return fa4_gradient_refusal(self.name, call)
        return None

    def plan(self, mask: DocumentMask, *, batch_invariant: bool = False) -> Tensor:
        """Return the offsets of the nested tensors, int64 `[N + 1]`."""
        return mask.layout.cu_seqlens.long()

    def attend(
        self,
        q_THD: Tensor,
        k_THD: Tensor,
        v_THD: Tensor,
        sinks_H: Tensor | None,
        call: AttentionCall,
        mask: DocumentMask,
        plan: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """Use torch's autograd in eager mode and a custom operator in compiled graphs."""
        settings = (
            max(mask.layout.max_seqlen_bound, MIN_BOUND),
            mask.spec.causal,
            call.scale,
        )
        function: Any = nested_forward if torch.compiler.is_compiling() else _sdpa
        out_THD = function(q_THD, k_THD, v_THD, plan, *settings)
        # The kernel leaves the tokens past the last boundary unwritten.
        dead_T = torch.arange(q_THD.shape[0], device=q_THD.device) >= plan[-1]
        if mask.layout.padding is not None:
            dead_T = dead_T | mask.layout.padding
        return torch.where(dead_T[:, None, None], 0, out_THD), None


def _sdpa(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    offsets: Tensor,
    max_seqlen: int,
    causal: bool,
    scale: float,
) -> Tensor:
    repeats = q_THD.shape[1] // k_THD.shape[1]
    if repeats > 1:
        k_THD, v_THD = (x.repeat_interleave(repeats, 1) for x in (k_THD, v_THD))
    # min_seqlen=1 although slots may be empty: with 0, torch would not use the flash kernel.

    def jagged(x_THD: Tensor) -> Tensor:
        x_THD = _TailZeroed.apply(x_THD.contiguous(), offsets)  # type: ignore[no-untyped-call]
        nested: Tensor = torch.nested.nested_tensor_from_jagged(
            x_THD, offsets, min_seqlen=1, max_seqlen=max_seqlen
        )
        return nested.transpose(1, 2)

    q, k, v = jagged(q_THD), jagged(k_THD), jagged(v_THD)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
    out_THD: Tensor = out.transpose(1, 2).values()
    return out_THD


class _TailZeroed(torch.autograd.Function):
    """Identity whose gradient is zeroed past the last boundary, where no kernel writes it."""

    @staticmethod
    def forward(ctx: Any, x_THD: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(offsets)
        return x_THD.view_as(x_THD)

    @staticmethod
    def backward(ctx: Any, grad_THD: Tensor) -> tuple[Tensor, None]:
        (offsets,) = ctx.saved_tensors
        tail = torch.arange(grad_THD.shape[0], device=grad_THD.device) >= offsets[-1]
        return grad_THD.masked_fill(tail[:, None, None], 0), None


@torch.library.custom_op("flexvarlen::nested_forward", mutates_args=())
def nested_forward(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    offsets: Tensor,
    max_seqlen: int,
    causal: bool,
    scale: float,
) -> Tensor:
    """Run `_sdpa` as a single operator, for compiled graphs."""
    return _sdpa(q_THD, k_THD, v_THD, offsets, max_seqlen, causal, scale).contiguous()


@nested_forward.register_fake
def _(q_THD: Tensor, *rest: Any) -> Tensor:
    return q_THD.new_empty(q_THD.shape)


@torch.library.custom_op("flexvarlen::nested_backward", mutates_args=())
def nested_backward(
    grad_THD: Tensor,
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    offsets: Tensor,
    max_seqlen: int,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute gradients with the same kernel as the autograd of nested tensors.

    SDPA does not return the LSE, and autograd does not run in an operator, so the forward is rerun.
    """
    heads, groups = q_THD.shape[1], k_THD.shape[1]
    k_THD, v_THD = (x.repeat_interleave(heads // groups, 1) for x in (k_THD, v_THD))
    cu_seqlens = offsets.to(torch.int32)
    boundaries = CallBoundaries(cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    call = AttentionCall(
        *(q_THD.device, q_THD.dtype, heads, heads, q_THD.shape[2]),
        spec=MaskSpec.of(causal=causal),
        scale=scale,
    )
    flash, qkv = KERNELS["varlen"], (q_THD, k_THD, v_THD)
    out_THD, lse_HT = flash.forward(*qkv, boundaries, call)
    grads = flash.backward(grad_THD.contiguous(), *qkv, out_THD, lse_HT, boundaries, call)
    tail = (torch.arange(grad_THD.shape[0], device=grad_THD.device) >= offsets[-1])[:, None, None]
    dq, dk, dv = (x.masked_fill(tail, 0) for x in grads)
    dk, dv = (x.unflatten(1, (groups, -1)).sum(2) for x in (dk, dv))
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


@nested_backward.register_fake
def _(
    grad_THD: Tensor, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return q_THD.new_empty(q_THD.shape), k_THD.new_empty(k_THD.shape), v_THD.new_empty(v_THD.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    q_THD, k_THD, v_THD, offsets, *ctx.settings = inputs
    ctx.save_for_backward(q_THD, k_THD, v_THD, offsets)


def _backward(ctx: Any, grad_THD: Tensor) -> tuple[Tensor | None, ...]:
    grads = nested_backward(grad_THD, *ctx.saved_tensors, *ctx.settings)
    return *grads, None, None, None, None


nested_forward.register_autograd(_backward, setup_context=_save)

BACKEND = NestedBackend()
