"""What recurrent layers pass from part to part of a tree that runs in parts.

The convolution needs the last tokens of the path above the part, and the scan the state at its end;
both get gradients back. The convolution and fla's kernels find the part that runs by its number,
inside of operators, so that one compiled graph serves all parts. Scans in plain torch call
`load_state` and `store_states`.

Shapes: T = tokens of the part, C channels, REACH = the widest convolution's kernel size - 1; HV =
heads of values; K, V = head_dim of keys and of values.

Imports torch, never transformers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from flexvarlen.layout.launch_sizes import NOT_CAPTURED
from flexvarlen.layout.running_part import expects_backward, running_part

REACH = 3
"""Tokens before a rank or a part that a convolution may read."""
SCAN = "scan"
"""The name of a scan's state, `[HV, K, V]`, whatever kernel computes it."""


class ContinuedSlot(Protocol):
    """A segment that other parts continue."""

    slot: int  # its index in the order of recurrent layers


class PartOfTree(Protocol):
    """What recurrent layers ask of a part of a tree: `flexvarlen.trees.part.TreePart`."""

    number: Tensor
    continued: Sequence[ContinuedSlot]

    def load_state(
        self,
        layer: int,
        name: str,
        *,
        dtype: torch.dtype | None = None,
        expects_backward: bool = False,
        in_backward: bool = False,
    ) -> Tensor | None:
        """The state at the end of the path above the part; None at a root.

        Args:
            dtype: that the state must have, if any.
            expects_backward: whether the layer's backward must run.
            in_backward: whether this is the backward, which needs the state again.
        """

    def store_states(self, layer: int, name: str, states: Iterable[Tensor]) -> None:
        """Store the states of the `continued` segments, if other parts are to continue them."""

    def pop_gradients(self, layer: int, name: str) -> Sequence[Tensor | None]:
        """The gradients of these states, from other parts; None where there is none."""

    def add_gradient(self, layer: int, name: str, gradient: Tensor) -> None:
        """Add a gradient of the state above the part, of which there may be none."""


class Carry(NamedTuple):
    """What one call of a layer on a part of a tree needs to load and store states.

    Attributes:
        part: of the tree.
        layer: index of the layer.
    """

    part: PartOfTree
    layer: int


# ---- the tokens before ----

_CONVOLUTION = "convolution"


def prepend_path(x_TC: Tensor, last_tokens: Tensor, carry: Carry) -> Tensor:
    """`[REACH + T, C]`: the last tokens of the path above the part, or zeros at a root; x.

    Args:
        x_TC: inputs of the convolution, `[T, C]`.
        last_tokens: as in `RecurrentDocuments`.

    No sync; traces.
    """
    number, expects = carry.part.number, expects_backward([x_TC])
    found: Tensor = _prepend_path(x_TC, last_tokens, number, carry.layer, expects)
    return found


@torch.library.custom_op("flexvarlen::prepend_path", mutates_args=(), tags=NOT_CAPTURED)
def _prepend_path(
    x_TC: Tensor, last_tokens: Tensor, number: Tensor, layer: int, expects_backward: bool
) -> Tensor:
    part: PartOfTree = running_part(number)
    above = part.load_state(
        layer, _CONVOLUTION, dtype=x_TC.dtype, expects_backward=expects_backward
    )
    before = x_TC.new_zeros(REACH, x_TC.shape[1]) if above is None else above
    out = torch.cat([before, x_TC])
    tails = (last_tokens[each.slot] for each in part.continued)
    states = (out[index.clamp(min=0)].masked_fill(index[:, None] < 0, 0) for index in tails)
    part.store_states(layer, _CONVOLUTION, states)
    return out


@torch.library.custom_op("flexvarlen::prepend_path_backward", mutates_args=(), tags=NOT_CAPTURED)
def _prepend_path_backward(grad: Tensor, last_tokens: Tensor, number: Tensor, layer: int) -> Tensor:
    part: PartOfTree = running_part(number)
    wide = torch.promote_types(grad.dtype, torch.float32)  # segments can share their last tokens
    total = grad.to(wide if part.continued else grad.dtype, copy=True)
    for each, x in zip(part.continued, part.pop_gradients(layer, _CONVOLUTION), strict=True):
        if x is not None:  # each token is in an index once; what is added for the others is 0
            index = last_tokens[each.slot]
            total.index_add_(0, index.clamp(min=0), x.masked_fill(index[:, None] < 0, 0).to(wide))
    part.add_gradient(layer, _CONVOLUTION, total[:REACH])
    return total[REACH:].to(grad.dtype, copy=True)


@_prepend_path.register_fake
def _(x_TC: Tensor, *_: Any) -> Tensor:
    return x_TC.new_empty(REACH + x_TC.shape[0], x_TC.shape[1])


@_prepend_path_backward.register_fake
def _(grad: Tensor, *_: Any) -> Tensor:
    return grad.new_empty(grad.shape[0] - REACH, grad.shape[1])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *tables, ctx.layer, _ = inputs
    ctx.save_for_backward(*tables)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return _prepend_path_backward(grad, *ctx.saved_tensors, ctx.layer), *[None] * 4


_prepend_path.register_autograd(_gradients, setup_context=_keep)


# ---- a state, for scans in plain torch ----


def load_state(carry: Carry, sources: Sequence[Tensor]) -> Tensor | None:
    """The state `[1, HV, K, V]` at the end of the path above the part; None at a root.

    Args:
        sources: inputs of the scan; the state requires a gradient if one of them does.
    """
    expects = expects_backward(sources)
    state = carry.part.load_state(carry.layer, SCAN, expects_backward=expects)
    if state is None:
        return None
    found: Tensor = _LoadState.apply(carry, state, *sources)  # type: ignore[no-untyped-call]
    return found


def store_states(carry: Carry, out: Tensor, states: Sequence[Tensor]) -> Tensor:
    """The output of a scan, unchanged; `states` are those of the `continued` segments."""
    carry.part.store_states(carry.layer, SCAN, [x[0] for x in states])
    found: Tensor = _StoreStates.apply(carry, out, *states)  # type: ignore[no-untyped-call]
    return found


class _LoadState(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, carry: Carry, state: Tensor, *sources: Tensor) -> Tensor:
        ctx.carry = carry
        return state[None]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:  # type: ignore[override]
        ctx.carry.part.add_gradient(ctx.carry.layer, SCAN, grad[0])
        return (None,) * len(ctx.needs_input_grad)


class _StoreStates(torch.autograd.Function):
    """In the backward the states get the gradients that the parts below have stored."""

    @staticmethod
    def forward(ctx: Any, carry: Carry, out: Tensor, *states: Tensor) -> Tensor:
        ctx.carry, ctx.dtypes = carry, [x.dtype for x in states]
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        found = ctx.carry.part.pop_gradients(ctx.carry.layer, SCAN)
        of_states = (
            None if x is None else x[None].to(dtype)
            for x, dtype in zip(found, ctx.dtypes, strict=True)
        )
        return None, grad, *of_states
