"""Linear layers, norms and embeddings in pieces of one shape: batch invariant, backward included.

A matrix product's kernel, and so its bits, depends on its shape. Here each document is cut into
equal pieces from its own start, the last filled up with zeros, and the module is called on one
piece at a time: whatever else is in the row, a document meets the same kernels with the same
numbers. The parameters' gradients are summed over pieces in order, in at least fp32; a document
without a cotangent adds exact zeros.

Shape legend: T = tokens of the row, P = pieces, C = tokens of a piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from flexvarlen.drift.model.serial import (
    check_covered,
    embeddings_of,
    matmuls_of,
    norms_of,
    own_forwards,
    token_dim,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PIECE_TOKENS = 128  # enough for a matrix product to be worth its launch, and a kernel's own tile
GPU_PIECE_TOKENS = 512  # each piece's backward sums gradients of all parameters in fp32


@dataclass(frozen=True)
class Pieces:
    """Where the tokens of a row stand in its pieces.

    Attributes:
        tokens: C.
        source: int64 `[P * C]`, which token of the row is here; T where none is.
        place: int64 `[T]`, where each token is.
    """

    tokens: int
    source: Tensor
    place: Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device, tokens: int = PIECE_TOKENS) -> Pieces:
        """Pieces of documents that follow one another.

        >>> Pieces.of([3, 1], torch.device("cpu"), tokens=2).source.tolist()
        [0, 1, 2, 4, 3, 4]
        """
        total, source, start = sum(lengths), [], 0
        for length in lengths:
            room = -(-length // tokens) * tokens
            source += [*range(start, start + length), *[total] * (room - length)]
            start += length
        placed = torch.tensor(source, device=device)
        return cls(tokens, placed, torch.nonzero(placed < total)[:, 0])

    def enter(self, x_T: Tensor) -> Sequence[Tensor]:
        """`[C, ...]` each, of `[T, ...]`: contiguous, one behind the other."""
        filled = torch.cat([x_T, x_T.new_zeros(1, *x_T.shape[1:])])
        pieces: Sequence[Tensor] = filled.index_select(0, self.source).split(self.tokens)
        return pieces

    def leave(self, pieces: Sequence[Tensor]) -> Tensor:
        """`[T, ...]`, of the pieces."""
        return torch.cat(list(pieces)).index_select(0, self.place)


@contextmanager
def fixed_shapes(
    model: PreTrainedModel, lengths: Sequence[int], tokens: int = PIECE_TOKENS
) -> Iterator[None]:
    """All linear layers, norms and embeddings in pieces, eagerly, for the length of a block.

    Attention is left to `patch_model(..., batch_invariant=True)`.

    Args:
        model: one row of such documents is all it may be called on.
        lengths: tokens of each document; no padding.
        tokens: of a piece.

    Raises:
        NotImplementedError: the model has parameters in other modules (experts).
    """
    check_covered(model)
    pieces = Pieces.of(lengths, model.device, tokens)
    modules = [*matmuls_of(model), *norms_of(model), *embeddings_of(model)]
    with own_forwards([(m, _in_pieces(m, m.forward, pieces)) for m in modules]):
        yield


def _in_pieces(
    module: nn.Module, forward: Callable[..., Any], pieces: Pieces
) -> Callable[[Tensor], Tensor]:
    parameters = list(module.parameters(recurse=False))

    def in_pieces(x: Tensor) -> Tensor:
        dim = token_dim(x, len(pieces.place))
        x_T = x[0] if dim else x
        out: Tensor = _InPieces.apply(x_T, forward, pieces, *parameters)  # type: ignore[no-untyped-call]
        return out[None] if dim else out

    return in_pieces


class _InPieces(torch.autograd.Function):
    """A module's forward piece by piece; each piece keeps a graph of its own for the backward."""

    @staticmethod
    def forward(
        ctx: Any, x_T: Tensor, call: Callable[[Tensor], Tensor], pieces: Pieces, *parameters: Tensor
    ) -> Tensor:
        """The module on each piece, `[1, C, ...]`."""
        ctx.pieces, ctx.parameters = pieces, parameters
        ctx.graphs = []
        trains = any(ctx.needs_input_grad)
        outs = []
        for piece in pieces.enter(x_T):
            leaf = piece.detach()[None]
            if ctx.needs_input_grad[0]:
                leaf.requires_grad_()
            with torch.set_grad_enabled(trains):
                out = call(leaf)
            if trains:
                ctx.graphs.append((leaf, out))
            outs.append(out.detach()[0])
        return pieces.leave(outs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Piece by piece; the parameters' gradients in one order, cast once."""
        wants_x, _, _, *wants = ctx.needs_input_grad
        parameters = [p for p, wanted in zip(ctx.parameters, wants, strict=True) if wanted]
        sums = [
            torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32))
            for p in parameters
        ]
        of_x = []
        for (leaf, out), grad in zip(ctx.graphs, ctx.pieces.enter(grads[0]), strict=True):
            inputs = [leaf, *parameters] if wants_x else parameters
            # kept: gradients of several documents are asked for, one after another
            found = list(torch.autograd.grad(out, inputs, grad[None], retain_graph=True))
            if wants_x:
                of_x.append(found.pop(0)[0])
            for total, one in zip(sums, found, strict=True):
                total += one
        made = iter(total.to(p.dtype) for total, p in zip(sums, parameters, strict=True))
        of_parameters = [next(made) if wanted else None for wanted in wants]
        return ctx.pieces.leave(of_x) if wants_x else None, None, None, *of_parameters
