"""`TokenMap`: how tokens enter another order, and leave it again.

Shapes: B rows of S tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


class TokenMap(Protocol):
    """Another order of tokens. Differentiable; no sync; traces under `fullgraph=True`."""

    def enter(self, x: Tensor) -> Tensor:
        """x `[B, S, ...]` in the order of the map."""

    def leave(self, x: Tensor) -> Tensor:
        """What `enter` has changed, `[B, S, ...]` again."""


class SameOrder:
    """Tokens that stay where they are."""

    def enter(self, x: Tensor) -> Tensor:
        return x

    def leave(self, x: Tensor) -> Tensor:
        return x


@dataclass(frozen=True, eq=False)
class Permutation:
    """The tokens of a row in another order; both sides are `[B, S, ...]`.

    Attributes:
        order: int64 `[B·S]`, the tokens of the row in the order of the map.
        inverse: int64 `[B·S]`.
    """

    order: Tensor
    inverse: Tensor

    def enter(self, x: Tensor) -> Tensor:
        return _permuted(x, self.order, self.inverse)

    def leave(self, x: Tensor) -> Tensor:
        return _permuted(x, self.inverse, self.order)


def _permuted(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    found: Tensor = _Permuted.apply(x, order, inverse)  # type: ignore[no-untyped-call]
    return found


class _Permuted(torch.autograd.Function):
    """x `[B, S, ...]` with its B·S tokens in another order.

    The gradient of a permutation is the inverse permutation; that of an index would be added up
    token by token, in any order.
    """

    @staticmethod
    def forward(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        return x.flatten(0, 1)[order].view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grad.flatten(0, 1)[inverse].view_as(grad), None, None


@dataclass(frozen=True, eq=False)
class Padding:
    """The real tokens of a padded batch as one packed row `[1, T, ...]`.

    Attributes:
        offsets: int64 `[T]`, where each token of the packed row is in the flattened batch. Spare
            tokens at the end of the packed row, which belong to no document, have B·S.
        batch, row_tokens: B and S.
    """

    offsets: Tensor
    batch: int
    row_tokens: int

    def enter(self, x: Tensor) -> Tensor:
        """The real tokens of x `[B, S, ...]`, or of `[1, S, ...]` that all rows share.

        Spare tokens get 0 if x holds integers, such as ids, of which the last one may stand for a
        part of an image; else a value of the batch.
        """
        flat = x.expand(self.batch, *x.shape[1:]).flatten(0, 1)
        if not x.is_floating_point():  # a copy of embeddings would be large
            flat = torch.cat([flat, flat.new_zeros(1, *flat.shape[1:])])
        return flat.index_select(0, self.offsets.clamp(max=len(flat) - 1))[None]

    def leave(self, x: Tensor, padding: float = 0) -> Tensor:
        """The packed x `[1, T, ...]` as `[B, S, ...]`.

        Args:
            padding: the value at padding.
        """
        slots = self.batch * self.row_tokens  # one more takes the spare tokens
        empty = x.new_full((slots + 1, *x.shape[2:]), padding)
        filled = empty.index_copy(0, self.offsets, x[0])[:slots]
        return filled.view(self.batch, self.row_tokens, *x.shape[2:])


@dataclass(frozen=True, eq=False)
class SharedPadding(Padding):
    """As `Padding`, for rows that share tokens; a shared token has its offset in one of them.

    Attributes:
        packed_index: int64 `[B·S]`, for each token of the flattened batch its index in the packed
            row.
        real: bool `[B·S]`, whether it is real.
    """

    packed_index: Tensor
    real: Tensor

    def leave(self, x: Tensor, padding: float = 0) -> Tensor:
        """As of `Padding`. The gradients of a token that rows share add up, in fp32 or wider."""
        wide = torch.promote_types(x.dtype, torch.float32) if x.is_floating_point() else x.dtype
        filled = x[0].to(wide)[self.packed_index].to(x.dtype)
        is_padding = (~self.real).view(-1, *[1] * (x.ndim - 2))
        filled = filled.masked_fill(is_padding, padding)
        return filled.view(self.batch, self.row_tokens, *x.shape[2:])
