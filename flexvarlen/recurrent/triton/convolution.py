"""The short depthwise convolution over documents and trees, forward and backward.

A program owns a block of tokens and channels. It finds the tokens before each on its path in a
table, `previous`. The backward first writes the gradients of the sums before the activation; each
token then adds up those of the tokens behind it in the row, and of the listed ones in other
segments. Nothing is added atomically, so results do not depend on the order of programs.

Shapes: T tokens, C channels, W = width, at most 4: the weights of the tokens 0 to 3 back are those
of the columns W - 1 to 0, and zeros.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexvarlen.layout.triton.launcher import Launcher

TOKENS, CHANNELS = 8, 256
"""Sizes of a block, in the forward and in the gradients of x: the fastest of ten on an H100."""
SUMMED_TOKENS, SUMMED_CHANNELS, SUMMED_BLOCKS, SUMMED_WARPS = 4, 128, 32, 1
"""Of a block in the gradients of sums, and the blocks and warps of a program: the fastest of 15 on
an H100, by far. A thread holds all tokens of its channels, so it adds up the gradients of their
weights alone."""
ROWS = 5
"""Rows of a program's result: the gradients of the weights of 0 to 3 back, and of the bias."""


@triton.jit
def _values(x, tokens, there, channels, real, C):
    """`[tokens, channels]` of x in fp32, zeros where there are none."""
    at = tokens.to(tl.int64)[:, None] * C + channels[None, :]
    return tl.load(x + at, mask=there[:, None] & real[None, :], other=0).to(tl.float32)


@triton.jit
def _weights(weight, back, channels, real, W: tl.constexpr):
    """`[channels]`: the weight of the token `back` back, in fp32."""
    factor = tl.load(weight + channels * W + (W - 1 - back), mask=real & (back < W), other=0)
    return factor.to(tl.float32)


@triton.jit
def _path(x, previous, tokens, there, channels, real, C):
    """x at each token and at the three before it on its path."""
    tokens_1 = tl.load(previous + tokens, mask=there, other=-1)
    tokens_2 = tl.load(previous + tokens_1, mask=tokens_1 >= 0, other=-1)
    tokens_3 = tl.load(previous + tokens_2, mask=tokens_2 >= 0, other=-1)
    return (
        _values(x, tokens, there, channels, real, C),
        _values(x, tokens_1, tokens_1 >= 0, channels, real, C),
        _values(x, tokens_2, tokens_2 >= 0, channels, real, C),
        _values(x, tokens_3, tokens_3 >= 0, channels, real, C),
    )


@triton.jit
def _sums(x_0, x_1, x_2, x_3, weight, bias, channels, real, W: tl.constexpr, BIAS: tl.constexpr):
    """The convolution before its activation, of what `_path` gives."""
    sums = x_0 * _weights(weight, 0, channels, real, W)[None, :]
    sums += x_1 * _weights(weight, 1, channels, real, W)[None, :]
    sums += x_2 * _weights(weight, 2, channels, real, W)[None, :]
    sums += x_3 * _weights(weight, 3, channels, real, W)[None, :]
    if BIAS:
        sums += tl.load(bias + channels, mask=real, other=0).to(tl.float32)[None, :]
    return sums


@triton.jit
def _block(T, C, first, TOKENS: tl.constexpr, CHANNELS: tl.constexpr):
    """The tokens and channels of a block, and which of them there are."""
    columns = tl.cdiv(C, CHANNELS)
    tokens = first * TOKENS + tl.arange(0, TOKENS)
    channels = tl.program_id(0) % columns * CHANNELS + tl.arange(0, CHANNELS)
    return tokens, tokens < T, channels, channels < C


@triton.jit(do_not_specialize=["T"])
def _forward(
    x,
    weight,
    bias,
    previous,
    out,
    T,
    C: tl.constexpr,
    W: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    row = tl.program_id(0) // tl.cdiv(C, CHANNELS)
    tokens, there, channels, real = _block(T, C, row, TOKENS, CHANNELS)
    x_0, x_1, x_2, x_3 = _path(x, previous, tokens, there, channels, real, C)
    sums = _sums(x_0, x_1, x_2, x_3, weight, bias, channels, real, W, BIAS)
    if SILU:
        sums *= tl.sigmoid(sums)
    at = tokens.to(tl.int64)[:, None] * C + channels[None, :]
    tl.store(out + at, sums, mask=there[:, None] & real[None, :])


@triton.jit(do_not_specialize=["T"])
def _gradients_of_sums(
    x,
    weight,
    bias,
    previous,
    grad,
    of_sums,
    partial,
    T,
    C: tl.constexpr,
    W: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Gradients of the sums, and for each program of the weights and the bias."""
    row = tl.program_id(0) // tl.cdiv(C, CHANNELS)
    weight_0 = tl.zeros([CHANNELS], tl.float32)
    weight_1, weight_2, weight_3, of_bias = weight_0, weight_0, weight_0, weight_0
    for block in range(BLOCKS):
        tokens, there, channels, real = _block(T, C, row * BLOCKS + block, TOKENS, CHANNELS)
        x_0, x_1, x_2, x_3 = _path(x, previous, tokens, there, channels, real, C)
        found = _values(grad, tokens, there, channels, real, C)
        if SILU:
            sums = _sums(x_0, x_1, x_2, x_3, weight, bias, channels, real, W, BIAS)
            gate = tl.sigmoid(sums)
            found *= gate * (1 + sums * (1 - gate))
            at = tokens.to(tl.int64)[:, None] * C + channels[None, :]
            tl.store(of_sums + at, found, mask=there[:, None] & real[None, :])
        weight_0 += tl.sum(found * x_0, 0)
        weight_1 += tl.sum(found * x_1, 0)
        weight_2 += tl.sum(found * x_2, 0)
        weight_3 += tl.sum(found * x_3, 0)
        of_bias += tl.sum(found, 0)
    _, _, channels, real = _block(T, C, row, TOKENS, CHANNELS)
    at = partial + row.to(tl.int64) * ROWS * C + channels
    tl.store(at, weight_0, mask=real)
    tl.store(at + C, weight_1, mask=real)
    tl.store(at + 2 * C, weight_2, mask=real)
    tl.store(at + 3 * C, weight_3, mask=real)
    tl.store(at + 4 * C, of_bias, mask=real)


@triton.jit(do_not_specialize=["T"])
def _gradients_of_x(
    of_sums,
    weight,
    previous,
    next_starts,
    next_tokens,
    dx,
    T,
    C: tl.constexpr,
    W: tl.constexpr,
    TREES: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    row = tl.program_id(0) // tl.cdiv(C, CHANNELS)
    tokens, there, channels, real = _block(T, C, row, TOKENS, CHANNELS)
    gradients = _values(of_sums, tokens, there, channels, real, C)
    gradients *= _weights(weight, 0, channels, real, W)[None, :]
    linked = there
    for ahead in tl.static_range(1, W):  # the tokens behind it, as long as each follows the last
        later = tokens + ahead
        linked = linked & (later < T)
        linked = linked & (tl.load(previous + later, mask=linked, other=-1) == later - 1)
        found = _values(of_sums, later, linked, channels, real, C)
        gradients += found * _weights(weight, ahead, channels, real, W)[None, :]
    if TREES:  # those in other segments
        start = tl.load(next_starts + tokens, mask=there, other=0)
        count = tl.load(next_starts + tokens + 1, mask=there, other=0) - start
        for i in range(tl.max(count, 0)):
            code = tl.load(next_tokens + start + i, mask=i < count, other=0)
            distance = code % 4
            listed = (i < count) & (distance < W)
            column = channels[None, :] * W + (W - 1 - distance)[:, None]
            share = tl.load(weight + column, mask=listed[:, None] & real[None, :], other=0)
            found_there = _values(of_sums, code // 4, listed, channels, real, C)
            gradients += found_there * share.to(tl.float32)
    at = tokens.to(tl.int64)[:, None] * C + channels[None, :]
    tl.store(dx + at, gradients, mask=there[:, None] & real[None, :])


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, previous: Tensor) -> Tensor:
    """The output `[T, C]`; arguments as in `causal_convolution`, contiguous."""
    tokens, channels = x.shape
    out = torch.empty_like(x)
    if x.numel():
        given: dict[str, Any] = {"C": channels, "W": weight.shape[1], "BIAS": bias is not None}
        sizes = {"TOKENS": TOKENS, "CHANNELS": CHANNELS}
        launch = _launcher(_forward, _dtypes(x, weight, bias), **given, SILU=silu, **sizes)
        programs = triton.cdiv(tokens, TOKENS) * triton.cdiv(channels, CHANNELS)
        launch(programs, [x, weight, bias, previous], [out], [tokens])
    return out


def backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    silu: bool,
    previous: Tensor,
    next_starts: Tensor | None,
    next_tokens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias, the last two in fp32."""
    tokens, channels = x.shape
    width, dtypes = weight.shape[1], _dtypes(x, weight, bias)
    if not x.numel():
        empty = weight.new_zeros(channels, width + 1, dtype=torch.float32)
        return torch.empty_like(x), empty[:, :width].contiguous(), empty[:, width]
    sizes = {"TOKENS": SUMMED_TOKENS, "CHANNELS": SUMMED_CHANNELS, "BLOCKS": SUMMED_BLOCKS}
    launch = _launcher(
        _gradients_of_sums,
        dtypes,
        C=channels,
        W=width,
        BIAS=bias is not None,
        SILU=silu,
        ROWS=ROWS,
        num_warps=SUMMED_WARPS,
        **sizes,
    )
    groups = triton.cdiv(tokens, SUMMED_TOKENS * SUMMED_BLOCKS)
    partial = x.new_empty(groups, ROWS, channels, dtype=torch.float32)
    of_sums = torch.empty_like(x) if silu else grad
    programs = groups * triton.cdiv(channels, SUMMED_CHANNELS)
    launch(programs, [x, weight, bias, previous, grad], [of_sums, partial], [tokens])
    sizes = {"TOKENS": TOKENS, "CHANNELS": CHANNELS, "TREES": next_starts is not None}
    launch = _launcher(_gradients_of_x, dtypes[:2], C=channels, W=width, **sizes)
    dx = torch.empty_like(x)
    programs = triton.cdiv(tokens, TOKENS) * triton.cdiv(channels, CHANNELS)
    launch(programs, [of_sums, weight, previous, next_starts, next_tokens], [dx], [tokens])
    summed = partial.sum(0)
    return dx, summed[:width].flip(0).t().contiguous(), summed[4]


def _dtypes(*tensors: Tensor | None) -> tuple[torch.dtype | None, ...]:
    return tuple(None if x is None else x.dtype for x in tensors)


@cache
def _launcher(kernel: Any, dtypes: tuple[torch.dtype | None, ...], **constants: Any) -> Launcher:
    """The launcher for tensors of these dtypes."""
    return Launcher(kernel, constants)
