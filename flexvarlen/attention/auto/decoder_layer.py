"""Measure how long a decoder layer takes without its attention, on a similar layer.

Shape legend: T = tokens, H = num_heads, Hkv = num_kv_heads, D = head_dim, C = H*D.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from flexvarlen.attention.call import AttentionCall
from flexvarlen.measure import HostAndDevice, time_host_and_device

_MOST_WIDTH = 4096
_MOST_ELEMENTS = 4096 * _MOST_WIDTH
"""Maximum C and T·C of the layer that is run; beyond it, device time is scaled by C squared
and by T. With a backward, the layer uses about 1.7 GB in 16-bit dtypes and twice that in 32-bit;
for one token, half of that, for weights and their gradients."""

_BUSY_MS = 10.0
"""How long to keep the device busy before each timed layer: twice a layer's host time (H200)."""


class Layer(NamedTuple):
    """Approximate eager time of a decoder layer without its attention, in milliseconds."""

    host_ms: float
    device_ms: float

    def added_ms(self, host_ms: float, device_ms: float) -> float:
        """Return how much time a call with these times adds to the layer, if the host runs ahead.

        The slower of host and device counts: a kernel's host time matters only if the device would
        wait for it. The times of forward and backward are summed, as if the host did not wait for
        the device between them.
        """
        return max(self.host_ms + host_ms, self.device_ms + device_ms) - max(self)

    def added_by(self, timing: HostAndDevice) -> float:
        """Return `added_ms` of the median host and device times."""
        return self.added_ms(timing.host.ms_p50, timing.device.ms_p50)


NO_LAYER = Layer(0.0, 0.0)
"""Used when the time of the layer around a call is not known."""


def time_layer(call: AttentionCall, tokens: int) -> Layer:
    """Time a dense Llama layer whose hidden size is num_heads * head_dim. Syncs.

    Its MLP is three times as wide. Real layers differ: a hidden size other than H*D (half of it in
    Qwen3-0.6B) or experts change the device time, and norms of queries and keys the host time.

    Args:
        call: the kind of call: its heads, dtype and device, and whether a backward follows.
        tokens: number of tokens in the row.
    """
    layer = _DecoderLayer(call, tokens)
    times = partial(time_host_and_device, {"": layer}, device=call.device, warmup=2, repeats=10)
    timed = times(busy_ms=_BUSY_MS)[""]
    if timed.host.ms_p80 > _BUSY_MS:  # the device had to wait for the host
        timed = times(busy_ms=2 * timed.host.ms_p80)[""]
    width = call.num_heads * call.head_dim
    larger = tokens / layer.rows * (width / layer.width) ** 2
    return Layer(timed.host.ms_p50, timed.device.ms_p50 * larger)


class _DecoderLayer:
    """The operations of transformers' eager Llama layer, without modules and attention.

    A call runs it forward, and backward if the call needs it.
    """

    def __init__(self, call: AttentionCall, tokens: int) -> None:
        self.head_dim, self.needs_grad = call.head_dim, call.needs_grad
        heads = max(1, min(call.num_heads, _MOST_WIDTH // call.head_dim))
        kv_heads = max(1, call.num_kv_heads * heads // call.num_heads)
        kv_width, self.width = kv_heads * self.head_dim, heads * self.head_dim
        self.rows = rows = min(tokens, max(1, _MOST_ELEMENTS // self.width))

        def random(*shape: int, std: float = 1.0) -> Tensor:
            empty = torch.empty(shape, device=call.device, dtype=call.dtype)
            return empty.normal_(std=std)

        def weight(*shape: int) -> Tensor:
            return random(*shape, std=shape[-1] ** -0.5).requires_grad_(self.needs_grad)

        c, mlp = self.width, 3 * self.width
        self.hidden_1TC = random(1, rows, c).requires_grad_(self.needs_grad)
        self.cos_TD, self.sin_TD = random(rows, self.head_dim), random(rows, self.head_dim)
        self.norms = [weight(c), weight(c)]
        self.qkv = [weight(c, c), weight(kv_width, c), weight(kv_width, c)]
        self.out = weight(c, c)
        self.gate, self.up, self.down = weight(mlp, c), weight(mlp, c), weight(c, mlp)
        self.grads = [random(1, rows, width) for width in (c, kv_width, kv_width)]

    def leaves(self) -> Sequence[Tensor]:
        weights = (*self.norms, *self.qkv, self.out, self.gate, self.up, self.down)
        return (self.hidden_1TC, *weights)

    def __call__(self) -> None:
        outs = self.forward()
        if self.needs_grad:
            torch.autograd.grad(outs, self.leaves(), self.grads)

    def forward(self) -> list[Tensor]:
        """Return the output `[1, T, C]` and the unused keys and values `[1, T, Hkv*D]`."""
        normed = _rms_norm(self.hidden_1TC, self.norms[0])
        q, k, v = (linear(normed, weight) for weight in self.qkv)
        q, k = self.rotated(q), self.rotated(k)
        hidden = self.hidden_1TC + linear(q, self.out)
        normed = _rms_norm(hidden, self.norms[1])
        mlp = linear(silu(linear(normed, self.gate)) * linear(normed, self.up), self.down)
        return [hidden + mlp, k, v]

    def rotated(self, x: Tensor) -> Tensor:
        """Apply rotary embedding to `[1, T, heads * D]`, as transformers does."""
        x_1HTD = x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        half = self.head_dim // 2
        turned = torch.cat((-x_1HTD[..., half:], x_1HTD[..., :half]), dim=-1)
        out_1HTD: Tensor = x_1HTD * self.cos_TD + turned * self.sin_TD
        return out_1HTD.transpose(1, 2).flatten(2)


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Compute RMSNorm as transformers does: eight kernels in 16-bit dtypes."""
    wide = x.to(torch.float32)
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * normed.to(x.dtype)
