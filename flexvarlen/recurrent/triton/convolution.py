"""The short depthwise convolution over documents and trees, forward and backward.

A program owns a block of tokens and channels. It reads the tokens before each on its path from a
table, `previous`; the backward reads the tokens behind it in the row, and those in other segments
from a list. Nothing is added atomically, so results do not depend on the order of programs.

Shapes: T tokens, C channels, W = width.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexvarlen.layout.triton.launcher import Launcher

TOKENS, CHANNELS = 16, 128
BLOCKS = 8
"""Blocks of tokens that a program of the backward takes, whose gradients of weights it adds up."""
PARTIAL_ROWS = 8
"""Rows of a program's gradients of weights and bias, a power of two above `WIDEST_CONVOLUTION`."""


@triton.jit
def _path_sums(
    x, weight, bias, previous, tokens, there, channels, real, C, W: tl.constexpr, BIAS: tl.constexpr
):
    """The convolution at these tokens before its activation, fp32 `[tokens, channels]`."""
    sums = tl.zeros([tokens.shape[0], channels.shape[0]], tl.float32)
    for back in tl.static_range(W):
        at = tokens.to(tl.int64)[:, None] * C + channels[None, :]
        values = tl.load(x + at, mask=there[:, None] & real[None, :], other=0).to(tl.float32)
        factor = tl.load(weight + channels * W + (W - 1 - back), mask=real, other=0)
        sums += values * factor.to(tl.float32)[None, :]
        if back + 1 < W:
            tokens = tl.load(previous + tokens, mask=there, other=-1)
            there = there & (tokens >= 0)
    if BIAS:
        sums += tl.load(bias + channels, mask=real, other=0).to(tl.float32)[None, :]
    return sums


@triton.jit
def _sum_gradients(
    x,
    weight,
    bias,
    grad,
    previous,
    tokens,
    there,
    channels,
    real,
    C,
    W: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
):
    """The gradients of `_path_sums`, from those of the output."""
    at = tokens.to(tl.int64)[:, None] * C + channels[None, :]
    grads = tl.load(grad + at, mask=there[:, None] & real[None, :], other=0).to(tl.float32)
    if SILU:
        sums = _path_sums(x, weight, bias, previous, tokens, there, channels, real, C, W, BIAS)
        gate = tl.sigmoid(sums)
        grads *= gate * (1 + sums * (1 - gate))
    return grads


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
    columns: tl.constexpr = (C + CHANNELS - 1) // CHANNELS
    program = tl.program_id(0)
    tokens = program // columns * TOKENS + tl.arange(0, TOKENS)
    channels = program % columns * CHANNELS + tl.arange(0, CHANNELS)
    there, real = tokens < T, channels < C
    sums = _path_sums(x, weight, bias, previous, tokens, there, channels, real, C, W, BIAS)
    if SILU:
        sums *= tl.sigmoid(sums)
    at = tokens.to(tl.int64)[:, None] * C + channels[None, :]
    tl.store(out + at, sums, mask=there[:, None] & real[None, :])


@triton.jit(do_not_specialize=["T"])
def _backward(
    x,
    weight,
    bias,
    grad,
    previous,
    next_starts,
    next_tokens,
    dx,
    partial,
    T,
    C: tl.constexpr,
    W: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    TREES: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
):
    columns: tl.constexpr = (C + CHANNELS - 1) // CHANNELS
    program = tl.program_id(0)
    channels = program % columns * CHANNELS + tl.arange(0, CHANNELS)
    real = channels < C
    rows = tl.arange(0, ROWS)
    of_weights = tl.zeros([ROWS, CHANNELS], tl.float32)
    for block in range(BLOCKS):
        tokens = (program // columns * BLOCKS + block) * TOKENS + tl.arange(0, TOKENS)
        there = tokens < T
        gradients = tl.zeros([TOKENS, CHANNELS], tl.float32)
        # The tokens behind it, as long as each follows the one before it.
        linked = there
        for ahead in tl.static_range(W):
            later = tokens + ahead
            if ahead > 0:
                before = tl.load(previous + later, mask=linked & (later < T), other=-1)
                linked = linked & (before == later - 1) & (later < T)
            found = _sum_gradients(
                x, weight, bias, grad, previous, later, linked, channels, real, C, W, BIAS, SILU
            )
            factor = tl.load(weight + channels * W + (W - 1 - ahead), mask=real, other=0)
            gradients += found * factor.to(tl.float32)[None, :]
            if ahead == 0:
                of_weights += tl.where(rows[:, None] == W, tl.sum(found, 0)[None, :], 0)
                earlier, present = tokens, there
                for back in tl.static_range(W):
                    at = earlier.to(tl.int64)[:, None] * C + channels[None, :]
                    values = tl.load(x + at, mask=present[:, None] & real[None, :], other=0)
                    summed = tl.sum(found * values.to(tl.float32), 0)
                    of_weights += tl.where(rows[:, None] == W - 1 - back, summed[None, :], 0)
                    earlier = tl.load(previous + earlier, mask=present, other=-1)
                    present = present & (earlier >= 0)
        if TREES:  # those in other segments
            start = tl.load(next_starts + tokens, mask=there, other=0)
            count = tl.load(next_starts + tokens + 1, mask=there, other=0) - start
            for i in range(tl.max(count, 0)):
                code = tl.load(next_tokens + start + i, mask=i < count, other=0)
                distance = code % 4
                listed = (i < count) & (distance < W)
                of_sums = _sum_gradients(
                    x,
                    weight,
                    bias,
                    grad,
                    previous,
                    code // 4,
                    listed,
                    channels,
                    real,
                    C,
                    W,
                    BIAS,
                    SILU,
                )
                column = channels[None, :] * W + (W - 1 - distance)[:, None]
                share = tl.load(weight + column, mask=listed[:, None] & real[None, :], other=0)
                gradients += of_sums * share.to(tl.float32)
        at = tokens.to(tl.int64)[:, None] * C + channels[None, :]
        tl.store(dx + at, gradients, mask=there[:, None] & real[None, :])
    at = (program // columns * ROWS + rows)[:, None] * C + channels[None, :]
    tl.store(partial + at, of_weights, mask=real[None, :])


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, previous: Tensor) -> Tensor:
    """The output `[T, C]`; arguments as in `causal_convolution`, contiguous."""
    tokens, channels = x.shape
    out = torch.empty_like(x)
    if x.numel():
        programs = triton.cdiv(tokens, TOKENS) * triton.cdiv(channels, CHANNELS)
        launch = _launcher(
            _forward, _dtypes(x, weight, bias), C=channels, W=weight.shape[1], SILU=silu
        )
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
    width, dx = weight.shape[1], torch.empty_like(x)
    groups = triton.cdiv(tokens, TOKENS * BLOCKS)
    partial = x.new_empty(groups, PARTIAL_ROWS, channels, dtype=torch.float32)
    if x.numel():
        launch = _launcher(
            _backward,
            _dtypes(x, weight, bias),
            C=channels,
            W=width,
            SILU=silu,
            TREES=next_starts is not None,
            BLOCKS=BLOCKS,
            ROWS=PARTIAL_ROWS,
        )
        inputs = [x, weight, bias, grad, previous, next_starts, next_tokens]
        launch(groups * triton.cdiv(channels, CHANNELS), inputs, [dx, partial], [tokens])
    summed = partial.sum(0)
    return dx, summed[:width].t().contiguous(), summed[width]


def _dtypes(*tensors: Tensor | None) -> tuple[torch.dtype | None, ...]:
    return tuple(None if x is None else x.dtype for x in tensors)


@cache
def _launcher(kernel: Any, dtypes: tuple[torch.dtype | None, ...], **constants: Any) -> Launcher:
    """The launcher for tensors of these dtypes: x, weight, bias."""
    sizes = {"TOKENS": TOKENS, "CHANNELS": CHANNELS, "BIAS": dtypes[2] is not None}
    return Launcher(kernel, constants | sizes)
