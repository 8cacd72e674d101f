"""The scan of Mamba-2, as linear attention with a decay for each head.

Shapes: T = total_tokens; G groups of heads, H heads; K = state size, V = head_dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexvarlen.recurrent.documents import CHUNK
from flexvarlen.recurrent.fla_kernels.arguments import like, real_chunks
from flexvarlen.recurrent.fla_kernels.hopper import avoid_wrong_kernel


@torch.library.custom_op("flexvarlen::decayed_scan", mutates_args=())
def decayed_scan(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, cu_seqlens: Tensor, chunks: Tensor
) -> list[Tensor]:
    """`state = exp(g) * state + k v`, `output = q state`, from a state of zeros in each document.

    Args:
        q, k: `[1, T, G, K]`, each for H / G heads one after another.
        v: `[1, T, H, V]`.
        g: log of the decay, fp32 `[1, T, H]`.
        cu_seqlens, chunks: of `RecurrentDocuments`.

    Returns:
        The output `[1, T, H, V]`, then what the backward needs.

    fla reads the number of chunks back: one sync.
    """
    from fla.ops.simple_gla.chunk import chunk_simple_gla_fwd
    from fla.ops.utils import chunk_local_cumsum
    from fla.ops.utils.constant import RCP_LN2

    q, k = (_expanded(x, v.shape[2]) for x in (q, k))
    v, g = v.contiguous(), g.contiguous()
    boundaries = real_chunks(cu_seqlens, chunks)
    g_sum = chunk_local_cumsum(g, chunk_size=CHUNK, scale=RCP_LN2, **boundaries)
    out, _ = chunk_simple_gla_fwd(q=q, k=k, v=v, **boundaries, g=g_sum, scale=1.0)
    return [out.to(v.dtype), g_sum]


@torch.library.custom_op("flexvarlen::decayed_scan_backward", mutates_args=())
def _decayed_scan_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g_sum: Tensor,
    cu_seqlens: Tensor,
    chunks: Tensor,
) -> list[Tensor]:
    from fla.ops.simple_gla.chunk import chunk_simple_gla_bwd
    from fla.ops.utils import chunk_local_cumsum

    avoid_wrong_kernel()
    boundaries = real_chunks(cu_seqlens, chunks)
    dq, dk, dv, dg, _ = chunk_simple_gla_bwd(
        q=_expanded(q, v.shape[2]),
        k=_expanded(k, v.shape[2]),
        v=v.contiguous(),
        **boundaries,
        g=g_sum,
        g_gamma=None,
        initial_state=None,
        do=grad.contiguous(),
        dht=None,
        scale=1.0,
    )
    dg = chunk_local_cumsum(dg, chunk_size=CHUNK, reverse=True, **boundaries)
    dq, dk = (dx.unflatten(2, (x.shape[2], -1)).sum(3) for dx, x in ((dq, q), (dk, k)))
    return [dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dg]


def _expanded(x: Tensor, heads: int) -> Tensor:
    """`[1, T, G, K]` as `[1, T, heads, K]`; the operators keep the smaller one."""
    return x.repeat_interleave(heads // x.shape[2], dim=2).contiguous()


@decayed_scan.register_fake
def _(*inputs: Any) -> list[Tensor]:
    _, _, v, g, *_ = inputs
    return [like(v), like(g, torch.float32)]


@_decayed_scan_backward.register_fake
def _(*inputs: Any) -> list[Tensor]:
    _, q, k, v, g_sum, *_ = inputs
    return [like(q), like(k), like(v), like(g_sum)]


def _keep_scan(ctx: Any, inputs: tuple[Tensor, ...], output: list[Tensor]) -> None:
    q, k, v, _, cu_seqlens, chunks = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, output[1], cu_seqlens, chunks)


def _scan_gradients(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    dq, dk, dv, dg = _decayed_scan_backward(grads[0], *ctx.saved_tensors)
    return dq, dk, dv, dg, None, None


decayed_scan.register_autograd(_scan_gradients, setup_context=_keep_scan)
