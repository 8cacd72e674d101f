"""fla's kernels as custom operators, which torch.compile does not break at.

fla (the packages `fla-core` and `flash-linear-attention`) disables torch.compile in its entry
points; what is called here are the forwards and backwards below them, of fla-core 0.6. Each takes
the boundaries and the chunks of `RecurrentDocuments`, so that nothing is read back.

Shapes: T = total_tokens; H, HV = heads of queries and keys, and of values; K, V = their head_dim;
C = channels; W = width of the convolution; q, k `[1, T, H, K]`, v `[1, T, HV, V]`.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from flexvarlen.recurrent.documents import CHUNK
from flexvarlen.recurrent.fla_on_hopper import avoid_wrong_kernel

INSTALL = "pip install 'flexvarlen[linear]'"


def why_not(x: Tensor) -> str | None:
    """Why fla cannot run on this tensor, or None."""
    if x.device.type != "cuda":
        return f"fla needs a GPU, got tensors on {x.device.type}"
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"fla computes in bfloat16, float16 or float32, got {x.dtype}"
    return _WHY_NOT_INSTALLED


def _why_not_installed() -> str | None:
    try:
        found = version("fla-core")
    except PackageNotFoundError:
        return f"fla is not installed ({INSTALL})"
    if not found.startswith("0.6."):
        return f"fla-core must be 0.6, got {found} ({INSTALL})"
    return None


_WHY_NOT_INSTALLED = _why_not_installed()  # asked once: importlib.metadata does not trace


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
        **_named(q_unit, k_unit, v),
        **_documents(cu_seqlens, chunks),
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
        **_named(q_unit, k_unit, v.contiguous()),
        **_documents(cu_seqlens, chunks),
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
def _(q, k, v, g, beta, cu_seqlens, chunks):  # type: ignore[no-untyped-def]
    inverse = k.new_empty(*v.shape[:3], CHUNK)
    units = [x for unit in (q, k) for x in (_like(unit), _like(unit[..., 0], torch.float32))]
    return [_like(v), _like(g, torch.float32), inverse, *units]


@_gated_delta_rule_backward.register_fake
def _(grad, v, beta, kept, cu_seqlens, chunks):  # type: ignore[no-untyped-def]
    g_sum, _, q_unit, _, k_unit, _ = kept
    return [*(_like(x) for x in (q_unit, k_unit, v)), _like(g_sum), _like(beta)]


# ---- Kimi's delta rule: a decay for each channel of the keys ----


@torch.library.custom_op("flexvarlen::kimi_delta_rule", mutates_args=())
def kimi_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor, chunks: Tensor
) -> list[Tensor]:
    """As `gated_delta_rule`, with g fp32 `[1, T, HV, K]`."""
    from fla.modules.norm.l2norm import l2norm_fwd
    from fla.ops.kda.chunk_fwd import chunk_kda_fwd

    q, k, v, g, beta = (x.contiguous() for x in (q, k, v, g, beta))
    q_unit, q_norm = l2norm_fwd(q)
    k_unit, k_norm = l2norm_fwd(k)
    out, _, g_sum, scores, inverse, *_ = chunk_kda_fwd(
        **_named(q_unit, k_unit, v),
        **_documents(cu_seqlens, chunks),
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
        **_named(q_unit, k_unit, v.contiguous()),
        **_documents(cu_seqlens, chunks),
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
    return [dq.to(v.dtype), dk.to(v.dtype), dv.to(v.dtype), dg.to(g_sum.dtype), dbeta.to(beta.dtype)]


@kimi_delta_rule.register_fake
def _(q, k, v, g, beta, cu_seqlens, chunks):  # type: ignore[no-untyped-def]
    squares = [k.new_empty(*v.shape[:3], CHUNK) for _ in range(2)]
    units = [x for unit in (q, k) for x in (_like(unit), _like(unit[..., 0], torch.float32))]
    return [_like(v), _like(g, torch.float32), *squares, *units]


@_kimi_delta_rule_backward.register_fake
def _(grad, v, beta, kept, cu_seqlens, chunks):  # type: ignore[no-untyped-def]
    g_sum, _, _, q_unit, _, k_unit, _ = kept
    return [*(_like(x) for x in (q_unit, k_unit, v)), _like(g_sum), _like(beta)]


def _keep_delta_rule(ctx: Any, inputs: tuple[Tensor, ...], output: list[Tensor]) -> None:
    _, _, v, g, beta, cu_seqlens, chunks = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.dtype_of_g = g.dtype
    ctx.save_for_backward(v, beta, cu_seqlens, chunks, *output[1:])


def _differentiate(operator: Any, backward: Any) -> None:
    def gradients(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
        v, beta, cu_seqlens, chunks, *kept = ctx.saved_tensors
        dq, dk, dv, dg, dbeta = backward(grads[0], v, beta, kept, cu_seqlens, chunks)
        return dq, dk, dv, dg.to(ctx.dtype_of_g), dbeta, None, None

    operator.register_autograd(gradients, setup_context=_keep_delta_rule)


_differentiate(gated_delta_rule, _gated_delta_rule_backward)
_differentiate(kimi_delta_rule, _kimi_delta_rule_backward)


# ---- the scan of Mamba-2: linear attention with a decay for each head ----


@torch.library.custom_op("flexvarlen::decayed_scan", mutates_args=())
def decayed_scan(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, cu_seqlens: Tensor, chunks: Tensor
) -> list[Tensor]:
    """`state = exp(g) * state + k v`, `output = q state`, from a state of zeros in each document.

    Args:
        q, k: `[1, T, H, K]` of as many heads as v.
        g: log of the decay, fp32 `[1, T, H]`.
        cu_seqlens, chunks: of `RecurrentDocuments`.

    Returns:
        The output `[1, T, H, V]`, then what the backward needs.

    fla reads the number of chunks back: one sync.
    """
    from fla.ops.simple_gla.chunk import chunk_simple_gla_fwd
    from fla.ops.utils import chunk_local_cumsum
    from fla.ops.utils.constant import RCP_LN2

    q, k, v, g = (x.contiguous() for x in (q, k, v, g))
    documents = _real_chunks(cu_seqlens, chunks)
    g_sum = chunk_local_cumsum(g, chunk_size=CHUNK, scale=RCP_LN2, **documents)
    out, _ = chunk_simple_gla_fwd(**_named(q, k, v), **documents, g=g_sum, scale=1.0)
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
    documents = _real_chunks(cu_seqlens, chunks)
    dq, dk, dv, dg, _ = chunk_simple_gla_bwd(
        **_named(q.contiguous(), k.contiguous(), v.contiguous()),
        **documents,
        g=g_sum,
        g_gamma=None,
        initial_state=None,
        do=grad.contiguous(),
        dht=None,
        scale=1.0,
    )
    dg = chunk_local_cumsum(dg, chunk_size=CHUNK, reverse=True, **documents)
    return [dq.to(v.dtype), dk.to(v.dtype), dv.to(v.dtype), dg]


@decayed_scan.register_fake
def _(q, k, v, g, cu_seqlens, chunks):  # type: ignore[no-untyped-def]
    return [_like(v), _like(g, torch.float32)]


@_decayed_scan_backward.register_fake
def _(grad, q, k, v, g_sum, cu_seqlens, chunks):  # type: ignore[no-untyped-def]
    return [_like(q), _like(k), _like(v), _like(g_sum)]


def _keep_scan(ctx: Any, inputs: tuple[Tensor, ...], output: list[Tensor]) -> None:
    q, k, v, g, cu_seqlens, chunks = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.dtype_of_g = g.dtype
    ctx.save_for_backward(q, k, v, output[1], cu_seqlens, chunks)


def _scan_gradients(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    dq, dk, dv, dg = _decayed_scan_backward(grads[0], *ctx.saved_tensors)
    return dq, dk, dv, dg.to(ctx.dtype_of_g), None, None


decayed_scan.register_autograd(_scan_gradients, setup_context=_keep_scan)


# ---- the short convolution ----


@torch.library.custom_op("flexvarlen::causal_convolution", mutates_args=())
def causal_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    cu_seqlens: Tensor,
    chunks: Tensor,
) -> Tensor:
    """A depthwise causal convolution over documents.

    Args:
        x: `[1, T, C]`.
        weight: `[C, W]`.
        bias: `[C]`.
        activation: "silu" or None.
        cu_seqlens, chunks: of `RecurrentDocuments`.
    """
    from fla.modules.causal_conv1d.ops import causal_conv1d_fwd

    out: Tensor
    out, _ = causal_conv1d_fwd(
        x=x.contiguous(),
        weight=weight.contiguous(),
        bias=bias,
        residual=None,
        activation=activation,
        **_documents(cu_seqlens, chunks),
    )
    return out


@torch.library.custom_op("flexvarlen::causal_convolution_backward", mutates_args=())
def _causal_convolution_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    cu_seqlens: Tensor,
    chunks: Tensor,
) -> list[Tensor]:
    from fla.modules.causal_conv1d.ops import causal_conv1d_bwd

    dx, dweight, dbias, *_ = causal_conv1d_bwd(
        x=x.contiguous(),
        dy=grad.contiguous(),
        dht=None,
        weight=weight.contiguous(),
        bias=bias,
        activation=activation,
        **_documents(cu_seqlens, chunks),
    )
    return [dx, dweight] if bias is None else [dx, dweight, dbias]


@causal_convolution.register_fake
def _(x, weight, bias, activation, cu_seqlens, chunks):  # type: ignore[no-untyped-def]
    return _like(x)


@_causal_convolution_backward.register_fake
def _(grad, x, weight, bias, activation, cu_seqlens, chunks):  # type: ignore[no-untyped-def]
    return [_like(y) for y in (x, weight, bias) if y is not None]


def _keep_convolution(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, activation, cu_seqlens, chunks = inputs
    ctx.activation = activation
    ctx.save_for_backward(x, weight, bias, cu_seqlens, chunks)


def _convolution_gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, weight, bias, cu_seqlens, chunks = ctx.saved_tensors
    found = _causal_convolution_backward(
        grad, x, weight, bias, ctx.activation, cu_seqlens, chunks
    )
    dbias = None if bias is None else found[2]
    return found[0], found[1], dbias, None, None, None


causal_convolution.register_autograd(_convolution_gradients, setup_context=_keep_convolution)


def _named(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
    return {"q": q, "k": k, "v": v}


def _documents(cu_seqlens: Tensor, chunks: Tensor) -> dict[str, Tensor]:
    return {"cu_seqlens": cu_seqlens, "chunk_indices": chunks}


def _real_chunks(cu_seqlens: Tensor, chunks: Tensor) -> dict[str, Tensor]:
    """Without the chunks of the empty slot, for which these kernels allocate no states."""
    from fla.ops.utils.index import prepare_chunk_offsets

    real = int(prepare_chunk_offsets(cu_seqlens, CHUNK)[-1])
    return _documents(cu_seqlens, chunks[:real])


def _like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
