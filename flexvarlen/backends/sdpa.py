"""`sdpa`: torch's scaled_dot_product_attention, one call a document; differentiable anywhere.

The cost grows with the sum of squared lengths, not with T². Documents cannot touch one another, and
each gives the same bits in any batch. Launch-bound on a GPU: its place is the CPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from flexvarlen.backends.protocol import AttentionOptions, AttentionRequest
from flexvarlen.bounds import UNLIMITED, MaskSpec
from flexvarlen.layout import PackedLayout


class SdpaBackend:
    """Per-document SDPA."""

    name = "sdpa"

    def why_not(self, request: AttentionRequest) -> str | None:
        """No softcap, no sinks, no LSE: SDPA has none of them."""
        if not request.dtype.is_floating_point:
            return f"sdpa needs a float dtype, got {request.dtype}; convert the tensors."
        if request.softcap is not None or request.sinks or request.return_lse:
            return (
                "sdpa has no softcap, no sinks and no LSE; use backend='flex' on a GPU or "
                "'reference'."
            )
        if request.deterministic and request.device.type == "cuda":
            return "sdpa's backward is not deterministic on a GPU; use backend='flex' or 'fa2'."
        return None

    def plan(self, layout: PackedLayout, mask: MaskSpec) -> Tensor:
        """Boundaries and padding flags, int32 `[2, capacity + 1]`: what the loop reads.

        Reads the device back if the host does not know the boundaries, except inside a compiled
        graph.
        """
        on_host = layout.cu_seqlens_host
        cu_seqlens = layout.cu_seqlens if on_host is None else on_host
        if layout.padding is None:
            return torch.stack([cu_seqlens, torch.zeros_like(cu_seqlens)])
        first_token = layout.cu_seqlens.clamp(max=layout.total_tokens - 1).long()
        padded = layout.padding[first_token].to(device=cu_seqlens.device, dtype=torch.int32)
        return torch.stack([cu_seqlens, padded])

    def attend(
        self,
        q_THD: Tensor,
        k_THD: Tensor,
        v_THD: Tensor,
        layout: PackedLayout,
        plan: Tensor,
        options: AttentionOptions,
    ) -> tuple[Tensor, Tensor | None]:
        """Eagerly a differentiable loop; in a compiled graph an operator with a backward."""
        left, right = options.mask.left, options.mask.right
        if torch.compiler.is_compiling():
            return sdpa_forward(q_THD, k_THD, v_THD, plan, left, right, options.scale), None
        return _loop(q_THD, k_THD, v_THD, plan, left, right, options.scale), None


def _loop(
    q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, plan: Tensor, left: int, right: int, scale: float
) -> Tensor:
    """One SDPA call a document; zeros at padding."""
    cu_seqlens, padded = plan.tolist()
    pieces = []
    for start, end, is_padding in zip(cu_seqlens, cu_seqlens[1:], padded, strict=False):
        if end > start:
            rows = slice(start, end)
            pieces.append(
                torch.zeros_like(q_THD[rows])
                if is_padding
                else _one_document(q_THD[rows], k_THD[rows], v_THD[rows], left, right, scale)
            )
    pieces.append(torch.zeros_like(q_THD[cu_seqlens[-1] :]))
    pieces.append(q_THD[:0])  # a row of nothing but padding has a gradient too: zeros
    return torch.cat(pieces)


def _one_document(q: Tensor, k: Tensor, v: Tensor, left: int, right: int, scale: float) -> Tensor:
    plainly_causal = right == 0 and (left == UNLIMITED or left >= q.shape[0] - 1)
    q, k, v = q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None]
    out = scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=None if plainly_causal else _seen(q.shape[2], left, right, q.device),
        is_causal=plainly_causal,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out[0].transpose(0, 1)


def _seen(length: int, left: int, right: int, device: torch.device) -> Tensor | None:
    """bool `[length, length]`: which keys each query of a document sees; None if all."""
    if left == UNLIMITED and right == UNLIMITED:
        return None
    tokens = torch.arange(length, device=device)
    ahead = tokens - tokens[:, None]
    seen = ahead <= (length if right == UNLIMITED else right)
    return seen if left == UNLIMITED else seen & (ahead >= -left)


@torch.library.custom_op("flexvarlen::sdpa_forward", mutates_args=())
def sdpa_forward(
    q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, plan: Tensor, left: int, right: int, scale: float
) -> Tensor:
    """The loop as one operator, for compiled graphs."""
    return _loop(q_THD, k_THD, v_THD, plan, left, right, scale).contiguous()


@sdpa_forward.register_fake
def _(
    q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, plan: Tensor, left: int, right: int, scale: float
) -> Tensor:
    return q_THD.new_empty(q_THD.shape)


@torch.library.custom_op("flexvarlen::sdpa_backward", mutates_args=())
def sdpa_backward(
    grad: Tensor,
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    plan: Tensor,
    left: int,
    right: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the loop, a document and a KV head at a time (no autograd in an operator)."""
    # zeros_like would keep the strides of a view; the fake implementation promises contiguous ones
    dq, dk, dv = (
        q_THD.new_zeros(q_THD.shape),
        k_THD.new_zeros(k_THD.shape),
        v_THD.new_zeros(v_THD.shape),
    )
    cu_seqlens, padded = plan.tolist()
    for start, end, is_padding in zip(cu_seqlens, cu_seqlens[1:], padded, strict=False):
        if end > start and not is_padding:
            rows = slice(start, end)
            pieces = _gradients(
                grad[rows], q_THD[rows], k_THD[rows], v_THD[rows], left, right, scale
            )
            dq[rows], dk[rows], dv[rows] = pieces
    return dq, dk, dv


def _gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, left: int, right: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of one document, from the probabilities, in at least fp32."""
    length, heads, _ = q.shape
    dtype = torch.promote_types(q.dtype, torch.float32)
    seen = _seen(length, left, right, q.device)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    repeats = heads // k.shape[1]
    for group in range(k.shape[1]):
        own = slice(group * repeats, (group + 1) * repeats)
        q_RLD, grad_RLD = (x[:, own].transpose(0, 1).to(dtype) for x in (q, grad))
        k_LD, v_LD = k[:, group].to(dtype), v[:, group].to(dtype)
        scores = q_RLD @ k_LD.T * scale
        probabilities = (
            scores if seen is None else scores.masked_fill(~seen, float("-inf"))
        ).softmax(-1)
        grad_probabilities = grad_RLD @ v_LD.T
        mean = (probabilities * grad_probabilities).sum(-1, keepdim=True)
        grad_scores = probabilities * (grad_probabilities - mean) * scale
        dq[:, own] = (grad_scores @ k_LD).transpose(0, 1).to(q.dtype)
        dk[:, group] = (grad_scores.transpose(1, 2) @ q_RLD).sum(0).to(k.dtype)
        dv[:, group] = (probabilities.transpose(1, 2) @ grad_RLD).sum(0).to(v.dtype)
    return dq, dk, dv


@sdpa_backward.register_fake
def _(
    grad: Tensor,
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    plan: Tensor,
    left: int,
    right: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return q_THD.new_empty(q_THD.shape), k_THD.new_empty(k_THD.shape), v_THD.new_empty(v_THD.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    q_THD, k_THD, v_THD, plan, *ctx.settings = inputs
    ctx.save_for_backward(q_THD, k_THD, v_THD, plan)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return *sdpa_backward(grad, *ctx.saved_tensors, *ctx.settings), None, None, None, None


sdpa_forward.register_autograd(_backward, setup_context=_save)

BACKEND = SdpaBackend()
