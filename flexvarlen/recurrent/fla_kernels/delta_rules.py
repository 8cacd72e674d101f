"""The gated delta rule (Qwen3.5, OLMo Hybrid), and Kimi's, with a decay for each channel.

Shapes: T = total_tokens; H, HV = heads of queries and keys, and of values; K, V = their head_dim;
q, k `[1, T, H, K]`, v `[1, T, HV, V]`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexvarlen.recurrent.documents import CHUNK
from flexvarlen.recurrent.fla_kernels.arguments import boundary_kwargs, like
from flexvarlen.recurrent.fla_kernels.hopper import avoid_wrong_kernel

# ---- the gated delta rule ----


@torch.library.custom_op("flexvarlen::gated_delta_rule", mutates_args=())
def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor, chunks: Tensor
) -> list[Tensor]:
    """The gated delta rule over documents, with L2-normalized queries and keys.

    Args:
        g: log of the decay, fp32 `[1, T, HV]`.
        beta: `[1, T, HV]`.
        cu_seqlens, chunks: of `RecurrentDocuments`.

    Returns:
        The output `[1, T, HV, V]`, then what the backward needs.
    """
    from fla.modules.norm.l2norm import l2norm_fwd
    from fla.ops.gated_delta_rule.chunk import chunk_gated_delta_rule_fwd

    q, k, v, g, beta = (x.contiguous() for x in (q, k, v, g, beta))
    q_unit, q_norm = l2norm_fwd(q)
    k_unit, k_norm = l2norm_fwd(k)
    g_sum, out, inverse, *_ = chunk_gated_delta_rule_fwd(
        q=q_unit,
        k=k_unit,
        v=v,
        **boundary_kwargs(cu_seqlens, chunks),
        g=g,
        beta=beta,
        scale=q.shape[-1] ** -0.5,
        initial_state=None,
        output_final_state=False,
    )
    return [out.to(v.dtype), g_sum, inverse, q_unit, q_norm, k_unit, k_norm]


@torch.library.custom_op("flexvarlen::gated_delta_rule_backward", mutates_args=())
def _gated_delta_rule_backward(
    grad: Tensor, v: Tensor, beta: Tensor, kept: list[Tensor], cu_seqlens: Tensor, chunks: Tensor
) -> list[Tensor]:
    from fla.modules.norm.l2norm import l2norm_bwd
    from fla.ops.gated_delta_rule.chunk import chunk_gated_delta_rule_bwd

    avoid_wrong_kernel()
    g_sum, inverse, q_unit, q_norm, k_unit, k_norm = kept
    dq, dk, dv, dbeta, dg, *_ = chunk_gated_delta_rule_bwd(
        q=q_unit,
        k=k_unit,
        v=v.contiguous(),
        **boundary_kwargs(cu_seqlens, chunks),
        g=g_sum,
        beta=beta.contiguous(),
        A=inverse,
        scale=q_unit.shape[-1] ** -0.5,
        initial_state=None,
        do=grad.contiguous(),
        dht=None,
    )
    dq, dk = l2norm_bwd(q_unit, q_norm, dq), l2norm_bwd(k_unit, k_norm, dk)
    return [dq.to(v.dtype), dk.to(v.dtype), dv.to(v.dtype), dg, dbeta.to(beta.dtype)]


@gated_delta_rule.register_fake
def _(*inputs: Any) -> list[Tensor]:
    q, k, v, g, *_ = inputs
    inverse = k.new_empty(*v.shape[:3], CHUNK)
    units = [x for unit in (q, k) for x in (like(unit), like(unit[..., 0], torch.float32))]
    return [like(v), like(g, torch.float32), inverse, *units]


@_gated_delta_rule_backward.register_fake
def _(*inputs: Any) -> list[Tensor]:
    _, v, beta, kept, *_ = inputs
    g_sum, _, q_unit, _, k_unit, _ = kept
    return [*(like(x) for x in (q_unit, k_unit, v)), like(g_sum), like(beta)]


# ---- Kimi's delta rule: a decay for each channel of the keys ----


@torch.library.custom_op("flexvarlen::kimi_delta_rule", mutates_args=())
def kimi_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor, chunks: Tensor
) -> list[Tensor]:
    """As `gated_delta_rule`, with g fp32 `[1, T, H, K]` and HV = H."""
    from fla.modules.norm.l2norm import l2norm_fwd
    from fla.ops.kda.chunk_fwd import chunk_kda_fwd

    q, k, v, g, beta = (x.contiguous() for x in (q, k, v, g, beta))
    q_unit, q_norm = l2norm_fwd(q)
    k_unit, k_norm = l2norm_fwd(k)
    out, _, g_sum, scores, inverse, *_ = chunk_kda_fwd(
        q=q_unit,
        k=k_unit,
        v=v,
        **boundary_kwargs(cu_seqlens, chunks),
        g=g,
        beta=beta,
        scale=q.shape[-1] ** -0.5,
        initial_state=None,
        output_final_state=False,
        chunk_size=CHUNK,
    )
    return [out.to(v.dtype), g_sum, scores, inverse, q_unit, q_norm, k_unit, k_norm]


@torch.library.custom_op("flexvarlen::kimi_delta_rule_backward", mutates_args=())
def _kimi_delta_rule_backward(
    grad: Tensor, v: Tensor, beta: Tensor, kept: list[Tensor], cu_seqlens: Tensor, chunks: Tensor
) -> list[Tensor]:
    from fla.modules.norm.l2norm import l2norm_bwd
    from fla.ops.kda.chunk_bwd import chunk_kda_bwd

    g_sum, scores, inverse, q_unit, q_norm, k_unit, k_norm = kept
    dq, dk, dv, dbeta, dg, *_ = chunk_kda_bwd(
        q=q_unit,
        k=k_unit,
        v=v.contiguous(),
        **boundary_kwargs(cu_seqlens, chunks),
        g=g_sum,
        beta=beta.contiguous(),
        Aqk=scores,
        Akk=inverse,
        scale=q_unit.shape[-1] ** -0.5,
        initial_state=None,
        do=grad.contiguous(),
        dht=None,
        chunk_size=CHUNK,
    )
    dq, dk = l2norm_bwd(q_unit, q_norm, dq), l2norm_bwd(k_unit, k_norm, dk)
    return [
        dq.to(v.dtype),
        dk.to(v.dtype),
        dv.to(v.dtype),
        dg.to(g_sum.dtype),
        dbeta.to(beta.dtype),
    ]


@kimi_delta_rule.register_fake
def _(*inputs: Any) -> list[Tensor]:
    q, k, v, g, *_ = inputs
    squares = [k.new_empty(*v.shape[:3], CHUNK) for _ in range(2)]
    units = [x for unit in (q, k) for x in (like(unit), like(unit[..., 0], torch.float32))]
    return [like(v), like(g, torch.float32), *squares, *units]


@_kimi_delta_rule_backward.register_fake
def _(*inputs: Any) -> list[Tensor]:
    _, v, beta, kept, *_ = inputs
    g_sum, _, _, q_unit, _, k_unit, _ = kept
    return [*(like(x) for x in (q_unit, k_unit, v)), like(g_sum), like(beta)]


def _keep_delta_rule(ctx: Any, inputs: tuple[Tensor, ...], output: list[Tensor]) -> None:
    _, _, v, _, beta, cu_seqlens, chunks = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(v, beta, cu_seqlens, chunks, *output[1:])


def _differentiate(operator: Any, backward: Any) -> None:
    def gradients(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
        v, beta, cu_seqlens, chunks, *kept = ctx.saved_tensors
        dq, dk, dv, dg, dbeta = backward(grads[0], v, beta, kept, cu_seqlens, chunks)
        return dq, dk, dv, dg, dbeta, None, None

    operator.register_autograd(gradients, setup_context=_keep_delta_rule)


_differentiate(gated_delta_rule, _gated_delta_rule_backward)
_differentiate(kimi_delta_rule, _kimi_delta_rule_backward)
