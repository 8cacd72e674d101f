"""The short depthwise convolution.

Shapes: T = total_tokens; C channels; W = width of the convolution.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexvarlen.recurrent.documents import CHUNK
from flexvarlen.recurrent.fla_kernels.arguments import boundary_kwargs, like


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
        chunk_size=CHUNK,
        **boundary_kwargs(cu_seqlens, chunks),
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
        chunk_size=CHUNK,
        **boundary_kwargs(cu_seqlens, chunks),
    )
    return [dx, dweight] if bias is None else [dx, dweight, dbias]


@causal_convolution.register_fake
def _(*inputs: Any) -> Tensor:
    x, *_ = inputs
    return like(x)


@_causal_convolution_backward.register_fake
def _(*inputs: Any) -> list[Tensor]:
    _, x, weight, bias, *_ = inputs
    return [like(y) for y in (x, weight, bias) if y is not None]


def _keep_convolution(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, activation, cu_seqlens, chunks = inputs
    ctx.activation = activation
    ctx.save_for_backward(x, weight, bias, cu_seqlens, chunks)


def _convolution_gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, weight, bias, cu_seqlens, chunks = ctx.saved_tensors
    found = _causal_convolution_backward(grad, x, weight, bias, ctx.activation, cu_seqlens, chunks)
    dbias = None if bias is None else found[2]
    return found[0], found[1], dbias, None, None, None


causal_convolution.register_autograd(_convolution_gradients, setup_context=_keep_convolution)
