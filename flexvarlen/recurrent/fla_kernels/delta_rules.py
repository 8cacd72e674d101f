"""The gated delta rule (Qwen3.5, OLMo Hybrid), and Kimi's, with a decay for each channel.

Shapes: T = total_tokens; H, HV = heads of queries and keys, and of values; K, V = their head_dim;
q, k `[1, T, H, K]`, v `[1, T, HV, V]`.
"""

from __future__ import annotations

from functools import partial
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
    from fla.ops.gated_delta_rule.chunk import chunk_gated_delta_rule_fwd

    q, k, v, g, beta = (x.contiguous() for x in (q, k, v, g, beta))
    units = _normalized(q, k)
    g_sum, out, inverse, *_ = chunk_gated_delta_rule_fwd(
        q=units[0],
        k=units[2],
        v=v,
        **boundary_kwargs(cu_seqlens, chunks),
        g=g,
        beta=beta,
        scale=q.shape[-1] ** -0.5,
        initial_state=None,
        output_final_state=False,
    )
    return [out.to(v.dtype), g_sum, inverse, *units]


@torch.library.custom_op("flexvarlen::gated_delta_rule_backward", mutates_args=())
def _gated_delta_rule_backward(
    grad: Tensor, v: Tensor, beta: Tensor, kept: list[Tensor], cu_seqlens: Tensor, chunks: Tensor
) -> list[Tensor]:
    from fla.ops.gated_delta_rule.chunk import chunk_gated_delta_rule_bwd

    avoid_wrong_kernel()
    g_sum, inverse, *units = kept
    dq, dk, dv, dbeta, dg, *_ = chunk_gated_delta_rule_bwd(
        q=units[0],
        k=units[2],
        v=v.contiguous(),
        **boundary_kwargs(cu_seqlens, chunks),
        g=g_sum,
        beta=beta.contiguous(),
        A=inverse,
        scale=units[0].shape[-1] ** -0.5,
        initial_state=None,
        do=grad.contiguous(),
        dht=None,
    )
    return _gradients([dq, dk, dv, dg, dbeta], units, like_v=v, like_beta=beta)


# ---- Kimi's delta rule: a decay for each channel of the keys ----


@torch.library.custom_op("flexvarlen::kimi_delta_rule", mutates_args=())
def kimi_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor, chunks: Tensor
) -> list[Tensor]:
    """As `gated_delta_rule`, with g fp32 `[1, T, H, K]` and HV = H."""
    from fla.ops.kda.chunk_fwd import chunk_kda_fwd

    q, k, v, g, beta = (x.contiguous() for x in (q, k, v, g, beta))
    units = _normalized(q, k)
    out, _, g_sum, scores, inverse, *_ = chunk_kda_fwd(
        q=units[0],
        k=units[2],
        v=v,
        **boundary_kwargs(cu_seqlens, chunks),
        g=g,
        beta=beta,
        scale=q.shape[-1] ** -0.5,
        initial_state=None,
        output_final_state=False,
        chunk_size=CHUNK,
    )
    return [out.to(v.dtype), g_sum, scores, inverse, *units]


@torch.library.custom_op("flexvarlen::kimi_delta_rule_backward", mutates_args=())
def _kimi_delta_rule_backward(
    grad: Tensor, v: Tensor, beta: Tensor, kept: list[Tensor], cu_seqlens: Tensor, chunks: Tensor
) -> list[Tensor]:
    from fla.ops.kda.chunk_bwd import chunk_kda_bwd

    g_sum, scores, inverse, *units = kept
    dq, dk, dv, dbeta, dg, *_ = chunk_kda_bwd(
        q=units[0],
        k=units[2],
        v=v.contiguous(),
        **boundary_kwargs(cu_seqlens, chunks),
        g=g_sum,
        beta=beta.contiguous(),
        Aqk=scores,
        Akk=inverse,
        scale=units[0].shape[-1] ** -0.5,
        initial_state=None,
        do=grad.contiguous(),
        dht=None,
        chunk_size=CHUNK,
    )
    return _gradients([dq, dk, dv, dg, dbeta], units, like_v=v, like_beta=beta)


# ---- what both share ----


def _normalized(q: Tensor, k: Tensor) -> list[Tensor]:
    """q of length one and the inverse of its length, and those of k."""
    from fla.modules.norm.l2norm import l2norm_fwd

    return [*l2norm_fwd(q), *l2norm_fwd(k)]


def _gradients(
    grads: list[Tensor], units: list[Tensor], *, like_v: Tensor, like_beta: Tensor
) -> list[Tensor]:
    """dq, dk, dv, dg, dbeta of the inputs, from those by the normalized q and k."""
    from fla.modules.norm.l2norm import l2norm_bwd

    dq, dk, dv, dg, dbeta = grads
    dq, dk = l2norm_bwd(*units[:2], dq), l2norm_bwd(*units[2:], dk)
    dtype = like_v.dtype
    return [dq.to(dtype), dk.to(dtype), dv.to(dtype), dg.float(), dbeta.to(like_beta.dtype)]


def _fake_forward(squares: int, *inputs: Any) -> list[Tensor]:
    """Outputs of a forward that keeps this many matrices of 64 x 64 for each chunk."""
    q, k, v, g, *_ = inputs
    kept = [k.new_empty(*v.shape[:3], CHUNK) for _ in range(squares)]
    units = [x for unit in (q, k) for x in (like(unit), like(unit[..., 0], torch.float32))]
    return [like(v), like(g, torch.float32), *kept, *units]


def _fake_backward(*inputs: Any) -> list[Tensor]:
    _, v, beta, (g_sum, *_, q_unit, _, k_unit, _), *_ = inputs
    return [*(like(x) for x in (q_unit, k_unit, v)), like(g_sum), like(beta)]


def _keep_delta_rule(ctx: Any, inputs: tuple[Tensor, ...], output: list[Tensor]) -> None:
    _, _, v, _, beta, cu_seqlens, chunks = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(v, beta, cu_seqlens, chunks, *output[1:])


def _complete(operator: Any, backward: Any, squares: int) -> None:
    """Give an operator its backward, and both their fake outputs."""

    def gradients(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
        v, beta, cu_seqlens, chunks, *kept = ctx.saved_tensors
        dq, dk, dv, dg, dbeta = backward(grads[0], v, beta, kept, cu_seqlens, chunks)
        return dq, dk, dv, dg, dbeta, None, None

    operator.register_autograd(gradients, setup_context=_keep_delta_rule)
    operator.register_fake(partial(_fake_forward, squares))
    backward.register_fake(_fake_backward)


_complete(gated_delta_rule, _gated_delta_rule_backward, squares=1)
_complete(kimi_delta_rule, _kimi_delta_rule_backward, squares=2)
