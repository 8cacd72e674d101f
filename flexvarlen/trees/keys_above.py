"""Join the keys and values of a part of a tree with those above it, eager and in compiled graphs.

The operators of a graph find the part that runs by its number: see `layout/running_part.py`.

Shapes: K = keys above the part, padding before them included; T = tokens of the part; Hkv = heads
of keys, D = head_dim.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from flexvarlen.layout.boundaries import is_traced
from flexvarlen.layout.launch_sizes import NOT_CAPTURED
from flexvarlen.layout.running_part import running_part


class RunningPart(Protocol):
    """What the operators need of `flexvarlen.trees.part.TreePart`."""

    def join(
        self, layer: int, k: Tensor, v: Tensor, *, expects_backward: bool
    ) -> tuple[Tensor, Tensor]:
        """Keys and values `[K + T, Hkv, D]`: those above, then those of the part's tokens."""

    def split_gradients(self, layer: int, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients `[T, Hkv, D]` of the part's own keys, from those of all."""


def with_keys_above(
    k: Tensor, v: Tensor, number: Tensor, layer: int, keys_above: int
) -> tuple[Tensor, Tensor]:
    """Keys and values `[K + T, Hkv, D]` of a layer: padding, those above, and the part's own.

    Args:
        k, v: of the part's tokens, `[T, Hkv, D]`.
        number: of the part that runs, int64 `[]` on the host.
        layer: index of the layer.
        keys_above: K.

    Raises:
        RuntimeError: the part's loop has ended or gone on, or the layer runs a second time.

    Differentiable once; the gradients of the keys above go to the parts that have them. No sync;
    traces under `fullgraph=True`.
    """
    # A reentrant checkpoint runs its forward without gradients; the backward runs it again.
    expects_backward = not torch.is_grad_enabled() or k.requires_grad or v.requires_grad
    k, v = _WithKeysAbove.apply(k, v, number, layer, keys_above, expects_backward)  # type: ignore[no-untyped-call]
    return k, v


class _WithKeysAbove(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        k: Tensor,
        v: Tensor,
        number: Tensor,
        layer: int,
        keys_above: int,
        expects_backward: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(number)
        ctx.layer, ctx.keys_above = layer, keys_above
        if is_traced():
            k, v = _forward_operator(k, v, number, layer, keys_above, expects_backward)
            return k, v
        return _part(number).join(layer, k, v, expects_backward=expects_backward)

    @staticmethod
    def backward(ctx: Any, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (number,) = ctx.saved_tensors
        if is_traced():
            own = _backward_operator(dk, dv, number, ctx.layer, ctx.keys_above)
        else:
            own = _part(number).split_gradients(ctx.layer, dk, dv)
        return *own, None, None, None, None


def _part(number: Tensor) -> RunningPart:
    part: RunningPart = running_part(number)
    return part


@torch.library.custom_op("flexvarlen::keys_above", mutates_args=(), tags=NOT_CAPTURED)
def _forward_operator(
    k: Tensor, v: Tensor, number: Tensor, layer: int, keys_above: int, expects_backward: bool
) -> tuple[Tensor, Tensor]:
    joined = _part(number).join(layer, k, v, expects_backward=expects_backward)
    return _copies(joined) if keys_above == 0 else joined


@_forward_operator.register_fake
def _(
    k: Tensor, v: Tensor, number: Tensor, layer: int, keys_above: int, expects_backward: bool
) -> tuple[Tensor, Tensor]:
    k, v = (x.new_empty(keys_above + x.shape[0], *x.shape[1:]) for x in (k, v))
    return k, v


@torch.library.custom_op("flexvarlen::keys_above_backward", mutates_args=(), tags=NOT_CAPTURED)
def _backward_operator(
    dk: Tensor, dv: Tensor, number: Tensor, layer: int, keys_above: int
) -> tuple[Tensor, Tensor]:
    return _copies(_part(number).split_gradients(layer, dk, dv))


@_backward_operator.register_fake
def _(dk: Tensor, dv: Tensor, number: Tensor, layer: int, keys_above: int) -> tuple[Tensor, Tensor]:
    dk, dv = (x.new_empty(x.shape[0] - keys_above, *x.shape[1:]) for x in (dk, dv))
    return dk, dv


def _copies(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """An operator must not return views of its inputs."""
    first, second = (x.clone(memory_format=torch.contiguous_format) for x in pair)
    return first, second
