"""Attention of equally long documents without packing, as its users call it.

Standard attention, transformers' eager attention, SDPA and the fixed-length functions of the
kernels' packages.

Shapes: T = tokens of the row, B = documents, S = tokens of each, H = num_heads, D = head_dim.
"""

from __future__ import annotations

import importlib
import inspect
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from flexvarlen.attention.backends.registry import BACKENDS
from flexvarlen.bench.attention.inputs import Inputs, Prepare, Prepared
from flexvarlen.bench.attention.raw_kernels import compiled_flex, first_of
from flexvarlen.bench.attention.rectangle import HeadsFirst, Rectangle, future_of, heads_first
from flexvarlen.bench.attention.sdpa_ways import FORCED, sdpa
from flexvarlen.equivalence.variants import Unsupported

__all__ = [
    "FIXED",
    "FORCED",
    "PACKED",
    "PACKED_ON_CPU",
    "eager",
    "fixed_flex",
    "fixed_packaged",
    "sdpa",
    "standard",
]


def _equally_long(inputs: Inputs) -> None:
    if len(set(inputs.lengths)) > 1:
        raise Unsupported("a fixed-length call takes documents of one length only")


def standard(inputs: Inputs, needs_grad: bool) -> Prepared:
    """Matmul, softmax, matmul in the inputs' dtype; all scores `[B, H, S, S]` are held at once.

    What papers call standard attention: queries scaled, the future masked in place. `eager` is
    another: its softmax is in fp32, its mask is added out of place.
    """
    _equally_long(inputs)
    views = heads_first(inputs, needs_grad)
    scale = inputs.q.shape[2] ** -0.5
    future = future_of(inputs.longest, inputs.q.device) if inputs.causal else None

    def forward() -> Tensor:
        q, k, v = views.leaves
        scores = (q * scale) @ k.mT
        if future is not None:
            scores.masked_fill_(future, float("-inf"))
        out: Tensor = scores.softmax(-1) @ v
        return out

    return views.prepared(forward)


def eager(inputs: Inputs, needs_grad: bool) -> Prepared:
    """Transformers' own: `eager_attention_forward` of Llama, as its layers call it.

    Scores in the inputs' dtype, their softmax in fp32, K and V repeated for grouped queries; a
    causal mask is added to the scores, without one there is none.
    """
    from transformers.models.llama.modeling_llama import eager_attention_forward

    _equally_long(inputs)
    views = heads_first(inputs, needs_grad)
    # What the function reads of the layer that calls it.
    layer = SimpleNamespace(
        num_key_value_groups=inputs.q.shape[1] // inputs.k.shape[1], training=needs_grad
    )
    scale = inputs.q.shape[2] ** -0.5
    mask = _additive_mask(views.rectangle, inputs.q) if inputs.causal else None

    def forward() -> Tensor:
        q, k, v = views.leaves
        out_BSHD: Tensor
        out_BSHD, _ = eager_attention_forward(layer, q, k, v, mask, scaling=scale, dropout=0.0)
        return out_BSHD.transpose(1, 2)

    return views.prepared(forward)


def _additive_mask(rectangle: Rectangle, q: Tensor) -> Tensor:
    """`[B, 1, S, S]` in q's dtype: its lowest value on keys after the query, else 0.

    As transformers makes it, once a forward of the model: its layers share it.
    """
    future = future_of(rectangle.longest, q.device)
    added = q.new_zeros(future.shape).masked_fill_(future, torch.finfo(q.dtype).min)
    return added.repeat(len(rectangle.lengths), 1, 1, 1)


def fixed_packaged(module: str, inputs: Inputs, needs_grad: bool) -> Prepared:
    """`flash_attn_func` of a FlashAttention package, on `[B, S, H, D]`."""
    function = importlib.import_module(module).flash_attn_func
    _equally_long(inputs)
    if not inputs.q.is_cuda:
        raise Unsupported(f"{module} needs CUDA")
    if "causal" not in inspect.signature(function).parameters:
        raise Unsupported(f"flash_attn_func of {module} takes no `causal`")
    rectangle = Rectangle.of(inputs.lengths, inputs.q.device)
    leaves = [
        rectangle.pad(x).detach().requires_grad_(needs_grad) for x in (inputs.q, inputs.k, inputs.v)
    ]
    return Prepared(
        lambda: first_of(function(*leaves, causal=inputs.causal)),
        leaves,
        rectangle.pad(inputs.cotangent),
        rectangle.gather,
    )


def fixed_flex(inputs: Inputs, needs_grad: bool) -> Prepared:
    """Compiled flex_attention for one shape, under torch's causal BlockMask or none."""
    _equally_long(inputs)
    on_cpu = not inputs.q.is_cuda
    if on_cpu and needs_grad:
        raise Unsupported("flex_attention has no backward on the CPU")
    views = heads_first(inputs, needs_grad)
    if on_cpu:  # the C++ template takes no views
        leaves = [x.contiguous() for x in views.leaves]
        views = HeadsFirst(views.rectangle, leaves, views.cotangent)
    tokens = inputs.longest
    mask = None
    if inputs.causal:
        mask = create_block_mask(_causal, None, None, tokens, tokens, device=inputs.q.device)
    # The last one makes every shape its own static kernel.
    kind = ("fixed", inputs.causal, str(inputs.q.dtype), *views.leaves[0].shape)
    call = compiled_flex(kind)
    return views.prepared(lambda: call(*views.leaves, block_mask=mask))


def _causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q >= kv


FIXED: dict[str, Prepare] = {
    "standard": standard,
    "eager": eager,
    "sdpa:default": sdpa,
    "fixed:fa2": partial(fixed_packaged, "flash_attn"),
    "fixed:fa3": partial(fixed_packaged, "flash_attn_interface"),
    "fixed:fa4": partial(fixed_packaged, "flash_attn.cute"),
    "fixed:flex": fixed_flex,
}
"""Attention of equally long documents without packing, as users call it, by variant."""

_DENSE = "reference"  # scores of all tokens of the row at once
PACKED = tuple(name for name in BACKENDS if name != _DENSE)
PACKED_ON_CPU = ("sdpa", _DENSE)
"""Backends of `packed_attention` that suites of padded attention stand beside."""
