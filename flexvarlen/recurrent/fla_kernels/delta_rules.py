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
from flexvarlen.recurrent.fla_kernels.hopper import avoid_wrong_kernel
from flexvarlen.recurrent.fla_kernels.levels import CONSTANTS, TABLES, Boundaries
from flexvarlen.recurrent.fla_kernels.outputs import fake_states, like
from flexvarlen.recurrent.fla_kernels.states import delta_state_gradients, delta_states

# ---- the gated delta rule ----


@torch.library.custom_op("flexvarlen::gated_delta_rule", mutates_args=())
def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
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
    """The gated delta rule over documents or trees, with L2-normalized queries and keys.

    Args:
        g: log of the decay, fp32 `[1, T, HV]`.
        beta: `[1, T, HV]`.
        cu_seqlens, chunk_indices, parents, levels, part, links, layer, expects_backward, group:
            `Boundaries`.

    Returns:
        The output `[1, T, HV, V]`, the states of `run_levels_forward`, and what the backward needs.
    """
    from fla.ops.common.chunk_o import chunk_fwd_o
    from fla.ops.gated_delta_rule.chunk_fwd import chunk_gated_delta_rule_fwd_intra

    tables = cu_seqlens, chunk_indices, parents, levels, part, links
    boundaries = Boundaries(*tables, layer, expects_backward, group)
    q, k, v, g, beta = (x.contiguous() for x in (q, k, v, g, beta))
    units = _normalized(q, k)
    g_sum = _sums_of_chunks(g, boundaries)
    given = {"k": units[2], "g": g_sum, **boundaries.kwargs()}
    w, u, inverse = chunk_gated_delta_rule_fwd_intra(v=v, beta=beta, **given)
    h, v_new, states = delta_states(units[2], w, u, {"g": g_sum}, boundaries)
    out = chunk_fwd_o(q=units[0], v=v_new, h=h, scale=q.shape[-1] ** -0.5, **given)
    return [out.to(v.dtype), states, g_sum, inverse, *units]


@torch.library.custom_op("flexvarlen::gated_delta_rule_backward", mutates_args=())
def _gated_delta_rule_backward(
    grad: Tensor,
    v: Tensor,
    beta: Tensor,
    kept: list[Tensor],
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
    from fla.ops.common.chunk_o import chunk_bwd_dqkwg, chunk_bwd_dv_local
    from fla.ops.gated_delta_rule.wy_fast import prepare_wy_repr_bwd, recompute_w_u_fwd

    avoid_wrong_kernel()
    tables = cu_seqlens, chunk_indices, parents, levels, part, links
    boundaries = Boundaries(*tables, layer, expects_backward, group)
    states, g_sum, inverse, *units = kept
    q, k, scale = units[0], units[2], units[0].shape[-1] ** -0.5
    v, beta, do = (x.contiguous() for x in (v, beta, grad))
    given = {"k": k, "g": g_sum, **boundaries.kwargs()}
    of_inverse = {"v": v, "beta": beta, "A": inverse, **given}
    w, u = recompute_w_u_fwd(**of_inverse)
    h, v_new, _ = delta_states(k, w, u, {"g": g_sum}, boundaries, states)
    dv = chunk_bwd_dv_local(q=q, do=do, scale=scale, **given)
    gates = {"g": g_sum}
    dh, dv = delta_state_gradients(q, k, w, do, dv, gates, scale, boundaries)
    of_states = {"w": w, "h": h, "dh": dh, "dv": dv}
    dq, dk, dw, dg = chunk_bwd_dqkwg(q=q, v=v_new, do=do, scale=scale, **of_states, **given)
    dk_more, dv, dbeta, dg_more = prepare_wy_repr_bwd(dw=dw, du=dv, **of_inverse)
    dg = _sums_of_chunks(dg + dg_more, boundaries, reverse=True)
    grads = [dq, dk + dk_more, dv, dg, dbeta]
    return _gradients(grads, units, like_v=v, like_beta=beta)


# ---- Kimi's delta rule: a decay for each channel of the keys ----


@torch.library.custom_op("flexvarlen::kimi_delta_rule", mutates_args=())
def kimi_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
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
    """As `gated_delta_rule`, with g fp32 `[1, T, H, K]` and HV = H."""
    from fla.ops.gla.chunk import chunk_gla_fwd_o_gk
    from fla.ops.kda.chunk_intra import chunk_kda_fwd_intra

    tables = cu_seqlens, chunk_indices, parents, levels, part, links
    boundaries = Boundaries(*tables, layer, expects_backward, group)
    q, k, v, g, beta = (x.contiguous() for x in (q, k, v, g, beta))
    units, scale = _normalized(q, k), q.shape[-1] ** -0.5
    g_sum = _sums_of_chunks(g, boundaries)
    of_units = {"q": units[0], "scale": scale, **boundaries.kwargs()}
    w, u, _, k_decayed, scores, inverse = chunk_kda_fwd_intra(
        k=units[2], v=v, gk=g_sum, beta=beta, disable_recompute=False, **of_units
    )
    h, v_new, states = delta_states(k_decayed, w, u, {"gk": g_sum}, boundaries)
    out = chunk_gla_fwd_o_gk(v=v_new, g=g_sum, A=scores, h=h, **of_units)
    return [out.to(v.dtype), states, g_sum, scores, inverse, *units]


@torch.library.custom_op("flexvarlen::kimi_delta_rule_backward", mutates_args=())
def _kimi_delta_rule_backward(
    grad: Tensor,
    v: Tensor,
    beta: Tensor,
    kept: list[Tensor],
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
    from fla.ops.kda.chunk_bwd import chunk_kda_bwd_dAv, chunk_kda_bwd_wy_dqkg_fused
    from fla.ops.kda.chunk_intra import chunk_kda_bwd_intra
    from fla.ops.kda.wy_fast import recompute_w_u_fwd

    tables = cu_seqlens, chunk_indices, parents, levels, part, links
    boundaries = Boundaries(*tables, layer, expects_backward, group)
    states, g_sum, scores, inverse, *units = kept
    q, k, scale = units[0], units[2], units[0].shape[-1] ** -0.5
    v, beta, do = (x.contiguous() for x in (v, beta, grad))
    given = {"q": q, "k": k, "beta": beta, **boundaries.kwargs()}
    gates = {"gk": g_sum}
    w, u, q_decayed, k_decayed = recompute_w_u_fwd(v=v, A=inverse, **gates, **given)
    h, v_new, _ = delta_states(k_decayed, w, u, gates, boundaries, states)
    no_beta = {name: x for name, x in given.items() if name != "beta"}
    dscores, dv = chunk_kda_bwd_dAv(v=v_new, do=do, A=scores, scale=scale, **no_beta)
    dh, dv = delta_state_gradients(q_decayed, k_decayed, w, do, dv, gates, scale, boundaries)
    of_states = {"v_new": v_new, "h": h, "dh": dh, "dv": dv}
    dq, dk, dv, dbeta, dg, dinverse = chunk_kda_bwd_wy_dqkg_fused(
        v=v, g=g_sum, A=inverse, do=do, scale=scale, **of_states, **given
    )
    so_far = {"dAqk": dscores, "dAkk": dinverse, "dq": dq, "dk": dk, "db": dbeta, "dg": dg}
    dq, dk, dbeta, dg = chunk_kda_bwd_intra(g=g_sum, **so_far, **given)
    dg = _sums_of_chunks(dg, boundaries, reverse=True)
    grads = [dq, dk, dv, dg, dbeta]
    return _gradients(grads, units, like_v=v, like_beta=beta)


# ---- what both share ----


def _sums_of_chunks(g: Tensor, boundaries: Boundaries, *, reverse: bool = False) -> Tensor:
    """Sum log2 of the decay in each chunk up to each token; or, in reverse, sum gradients."""
    from fla.ops.utils import chunk_local_cumsum
    from fla.ops.utils.constant import RCP_LN2

    scale = None if reverse else RCP_LN2
    found: Tensor = chunk_local_cumsum(
        g, chunk_size=CHUNK, scale=scale, reverse=reverse, **boundaries.kwargs()
    )
    return found


def _normalized(q: Tensor, k: Tensor) -> list[Tensor]:
    """q and k, each normalized to length one and followed by its inverse length."""
    from fla.modules.norm.l2norm import l2norm_fwd

    return [*l2norm_fwd(q), *l2norm_fwd(k)]


def _gradients(
    grads: list[Tensor], units: list[Tensor], *, like_v: Tensor, like_beta: Tensor
) -> list[Tensor]:
    """dq, dk, dv, dg, dbeta of the inputs, from the gradients of the normalized q and k."""
    from fla.modules.norm.l2norm import l2norm_bwd

    dq, dk, dv, dg, dbeta = grads
    dq, dk = l2norm_bwd(*units[:2], dq), l2norm_bwd(*units[2:], dk)
    dtype = like_v.dtype
    return [dq.to(dtype), dk.to(dtype), dv.to(dtype), dg.float(), dbeta.to(like_beta.dtype)]


def _fake_forward(squares: int, *inputs: Any) -> list[Tensor]:
    """Fake outputs of a forward that keeps this many matrices of 64 x 64 for each chunk."""
    q, k, v, g, _, *boundaries = inputs
    kept = [k.new_empty(*v.shape[:3], CHUNK) for _ in range(squares)]
    units = [x for unit in (q, k) for x in (like(unit), like(unit[..., 0], torch.float32))]
    states = fake_states(k, v, Boundaries(*boundaries))
    return [like(v), states, like(g, torch.float32), *kept, *units]


def _fake_backward(*inputs: Any) -> list[Tensor]:
    _, v, beta, (_, g_sum, *_, q_unit, _, k_unit, _), *_ = inputs
    return [*(like(x) for x in (q_unit, k_unit, v)), like(g_sum), like(beta)]


def _keep_delta_rule(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    _, _, v, _, beta, *tables = inputs[:-CONSTANTS]
    ctx.constants = inputs[-CONSTANTS:]
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(v, beta, *tables, *output[1:])


def _complete(operator: Any, backward: Any, squares: int) -> None:
    """Give an operator its backward, and both their fake outputs."""

    def gradients(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
        v, beta, *others = ctx.saved_tensors
        tables, kept = others[:TABLES], others[TABLES:]
        found = backward(grads[0], v, beta, kept, *tables, *ctx.constants)
        return *found, *[None] * len(Boundaries._fields)

    operator.register_autograd(gradients, setup_context=_keep_delta_rule)
    operator.register_fake(partial(_fake_forward, squares))
    backward.register_fake(_fake_backward)


def delta_rule_gradients(
    backward: Any, grad: Tensor, inputs: list[Tensor], outputs: list[Tensor], *boundaries: Any
) -> list[Tensor]:
    """Gradients of an operator's inputs, computed from its outputs, without autograd."""
    _, _, v, _, beta = inputs
    found: list[Tensor] = backward(grad, v, beta, outputs[1:], *boundaries)
    return found


gated_delta_rule_gradients = partial(delta_rule_gradients, _gated_delta_rule_backward)
kimi_delta_rule_gradients = partial(delta_rule_gradients, _kimi_delta_rule_backward)
_complete(gated_delta_rule, _gated_delta_rule_backward, squares=1)
_complete(kimi_delta_rule, _kimi_delta_rule_backward, squares=2)
