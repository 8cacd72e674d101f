"""The short depthwise convolution, in Triton on a GPU and in plain torch elsewhere.

Shapes: T = total_tokens; C channels; W = width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from flexvarlen.layout.boundaries import HAS_TRITON
from flexvarlen.recurrent.adjacent_ranks import prepend_tokens
from flexvarlen.recurrent.documents import WIDEST_CONVOLUTION, RecurrentDocuments
from flexvarlen.recurrent.tree_parts import REACH, prepend_path


def causal_convolution(
    x_TC: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, documents: RecurrentDocuments
) -> Tensor:
    """Convolve each token with itself and earlier tokens of its document, or of its path.

    Args:
        x_TC: `[T, C]`.
        weight: `[C, W]`, the last column for the token itself.
        bias: `[C]`.
        silu: whether SiLU follows.

    Returns:
        `[T, C]` in the dtype of x.

    Forward and backward are deterministic. No sync; traces.

    Raises:
        NotImplementedError: the row is split over ranks, or part of a tree, and W is more than 4.
    """
    is_split = documents.over_ranks or documents.carry is not None
    if is_split and weight.shape[1] > WIDEST_CONVOLUTION:
        raise NotImplementedError(
            "a convolution over ranks, or on parts of a tree, must have a width of at most "
            f"{WIDEST_CONVOLUTION}, got {weight.shape[1]}; give each rank whole rows and trees."
        )
    if documents.carry is not None:
        x_TC = prepend_path(x_TC, documents.last_tokens, documents.carry)
    elif documents.links is not None:
        x_TC = prepend_tokens(x_TC, documents.links, documents.group)
    else:
        return _convolution(x_TC, weight, bias, silu, documents)
    return _convolution(x_TC, weight, bias, silu, documents)[REACH:]


def _convolution(
    x_TC: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, documents: RecurrentDocuments
) -> Tensor:
    narrow = weight.shape[1] <= WIDEST_CONVOLUTION
    if x_TC.is_cuda and HAS_TRITON and narrow and x_TC.dtype != torch.float64:
        starts, codes = documents.next_tokens or (None, None)
        out: Tensor = _operator(x_TC, weight, bias, silu, documents.previous, starts, codes)
        return out
    return _in_torch(x_TC, weight, bias, silu, documents.previous)


def _in_torch(
    given_TC: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, previous: Tensor
) -> Tensor:
    dtype = torch.promote_types(weight.dtype, torch.float32)  # as F.conv1d sums
    x_TC, weight = given_TC.to(dtype), weight.to(dtype)
    out, before = x_TC * weight[:, -1], previous
    for back in range(2, weight.shape[1] + 1):
        there, index = before >= 0, before.clamp(min=0).long()
        # embedding, as the gradient of x_TC[index] is summed in any order
        out = out + F.embedding(index, x_TC).masked_fill(~there[:, None], 0) * weight[:, -back]
        before = previous[index]  # -1 if there is no earlier token
    out = out if bias is None else out + bias
    return (F.silu(out) if silu else out).to(given_TC.dtype)


# ---- the operator ----


@torch.library.custom_op("flexvarlen::causal_convolution", mutates_args=())
def _operator(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    silu: bool,
    previous: Tensor,
    next_starts: Tensor | None,
    next_codes: Tensor | None,
) -> Tensor:
    from flexvarlen.recurrent.triton.convolution import forward

    return forward(x.contiguous(), weight.contiguous(), bias, silu, previous)


@torch.library.custom_op("flexvarlen::causal_convolution_backward", mutates_args=())
def _backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    silu: bool,
    previous: Tensor,
    next_starts: Tensor | None,
    next_codes: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    from flexvarlen.recurrent.triton.convolution import backward

    given = (silu, previous, next_starts, next_codes)
    dx, dweight, dbias = backward(
        grad.contiguous(), x.contiguous(), weight.contiguous(), bias, *given
    )
    return dx, dweight.to(weight.dtype), dbias.to(weight.dtype)


@_operator.register_fake
def _(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


@_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape), weight.new_empty(weight.shape[0])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, ctx.silu, *tables = inputs
    ctx.save_for_backward(x, weight, bias, *tables)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, weight, bias, *tables = ctx.saved_tensors
    dx, dweight, dbias = _backward(grad, x, weight, bias, ctx.silu, *tables)
    return dx, dweight, None if bias is None else dbias, None, None, None, None


_operator.register_autograd(_gradients, setup_context=_keep)
