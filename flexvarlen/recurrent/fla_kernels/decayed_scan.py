"""The scan of Mamba-2, as linear attention with a decay for each head.

Shapes: T = total_tokens; G groups of heads, H heads; K = state size, V = head_dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexvarlen.recurrent.documents import CHUNK
from flexvarlen.recurrent.fla_kernels.hopper import avoid_wrong_kernel
from flexvarlen.recurrent.fla_kernels.levels import CONSTANTS, Boundaries
from flexvarlen.recurrent.fla_kernels.outputs import fake_states, like
from flexvarlen.recurrent.fla_kernels.states import decayed_state_gradients, decayed_states


@torch.library.custom_op("flexvarlen::decayed_scan", mutates_args=())
def decayed_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    cu_seqlens: Tensor,
    chunk_indices: Tensor,
    parents: Tensor | None,
    levels: Tensor | None,
    part: Tensor | None,
    links: Tensor | None,
    layer: int,
    expects_backward: bool,
    group: str,
) -> list[Tensor]:
    """`state = exp(g) * state + k v`, `output = q state`, from zeros or the state of the parent.

    Args:
        q, k: `[1, T, G, K]`, each for H / G heads one after another.
        v: `[1, T, H, V]`.
        g: log of the decay, fp32 `[1, T, H]`.
        cu_seqlens, chunk_indices, parents, levels, part, links, layer, expects_backward, group:
            `Boundaries`.

    Returns:
        The output `[1, T, H, V]`, the states of `run_levels_forward`, and what the backward needs.
    """
    from fla.ops.common.chunk_o import chunk_fwd_o
    from fla.ops.utils import chunk_local_cumsum
    from fla.ops.utils.constant import RCP_LN2

    tables = cu_seqlens, chunk_indices, parents, levels, part, links
    boundaries = Boundaries(*tables, layer, expects_backward, group)
    q, k = (_expanded(x, v.shape[2]) for x in (q, k))
    v, g, others = v.contiguous(), g.contiguous(), boundaries.kwargs()
    g_sum = chunk_local_cumsum(g, chunk_size=CHUNK, scale=RCP_LN2, **others)
    h, states = decayed_states(k, v, g_sum, boundaries, k.dtype)
    out = chunk_fwd_o(q=q, k=k, v=v, g=g_sum, h=h, scale=1.0, **others)
    return [out.to(v.dtype), states, g_sum]


@torch.library.custom_op("flexvarlen::decayed_scan_backward", mutates_args=())
def _decayed_scan_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    states: Tensor,
    g_sum: Tensor,
    cu_seqlens: Tensor,
    chunk_indices: Tensor,
    parents: Tensor | None,
    levels: Tensor | None,
    part: Tensor | None,
    links: Tensor | None,
    layer: int,
    expects_backward: bool,
    group: str,
) -> list[Tensor]:
    from fla.ops.common.chunk_o import chunk_bwd_dqkwg, chunk_bwd_dv
    from fla.ops.utils import chunk_local_cumsum

    avoid_wrong_kernel()
    tables = cu_seqlens, chunk_indices, parents, levels, part, links
    boundaries = Boundaries(*tables, layer, expects_backward, group)
    q_all, k_all = (_expanded(x, v.shape[2]) for x in (q, k))
    v, do, others = v.contiguous(), grad.contiguous(), boundaries.kwargs()
    h, _ = decayed_states(k_all, v, g_sum, boundaries, torch.float32, states)
    dh = decayed_state_gradients(q_all, do, g_sum, boundaries, torch.float32)
    given = {"q": q_all, "k": k_all, "g": g_sum, "do": do, "dh": dh, "scale": 1.0, **others}
    dq, dk, _, dg = chunk_bwd_dqkwg(v=v, h=h, **given)
    dv = chunk_bwd_dv(**given)
    dg = chunk_local_cumsum(dg, chunk_size=CHUNK, reverse=True, **others)
    dq, dk = (dx.unflatten(2, (x.shape[2], -1)).sum(3) for dx, x in ((dq, q), (dk, k)))
    return [dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dg]


def _expanded(x: Tensor, heads: int) -> Tensor:
    """`[1, T, G, K]` as `[1, T, heads, K]`; the operators keep the smaller one."""
    return x.repeat_interleave(heads // x.shape[2], dim=2).contiguous()


@decayed_scan.register_fake
def _(*inputs: Any) -> list[Tensor]:
    _, k, v, g, *boundaries = inputs
    states = fake_states(k, v, Boundaries(*boundaries))
    return [like(v), states, like(g, torch.float32)]


@_decayed_scan_backward.register_fake
def _(*inputs: Any) -> list[Tensor]:
    _, q, k, v, _, g_sum, *_ = inputs
    return [like(q), like(k), like(v), like(g_sum)]


def _keep_scan(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    q, k, v, _, *tables = inputs[:-CONSTANTS]
    ctx.constants = inputs[-CONSTANTS:]
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(q, k, v, *output[1:], *tables)


def _scan_gradients(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    found = _decayed_scan_backward(grads[0], *ctx.saved_tensors, *ctx.constants)
    return *found, *[None] * len(Boundaries._fields)


decayed_scan.register_autograd(_scan_gradients, setup_context=_keep_scan)


def decayed_scan_gradients(
    grad: Tensor, inputs: list[Tensor], outputs: list[Tensor], *boundaries: Any
) -> list[Tensor]:
    """Gradients of the operator's inputs, computed from its outputs, without autograd."""
    kept = *inputs[:3], *outputs[1:]
    found: list[Tensor] = _decayed_scan_backward(grad, *kept, *boundaries)
    return found
