"""The documents of a row as a rectangle: one a line, zeros behind each.

As users hold them who do not pack. The rectangle stands ready, as it does in a padded model:
nothing is packed or padded in a timed call.

Shapes: T = tokens of the row, B = documents, S = tokens of a line, H = num_heads, D = head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flexvarlen.bench.attention.inputs import Inputs, Prepared


@dataclass(frozen=True)
class Rectangle:
    """Where the documents of a packed row stand in `B` lines of `longest` tokens.

    Attributes:
        lengths: tokens of each document.
        longest: S, at least the longest document's.
        places: int64 `[T]`, each token's place among the B · S; None where none is padding.
    """

    lengths: Sequence[int]
    longest: int
    places: Tensor | None

    @classmethod
    def of(
        cls, lengths: Sequence[int], device: torch.device, longest: int | None = None
    ) -> Rectangle:
        """The rectangle of these documents, as wide as the longest or as `longest` tokens.

        Raises:
            ValueError: a document is longer than the lines.
        """
        width = max(lengths) if longest is None else longest
        if width < max(lengths):
            raise ValueError(
                f"longest must be at least the longest document's {max(lengths)} tokens, got "
                f"{width}; raise it."
            )
        if min(lengths) == width:
            return cls(lengths, width, None)
        lines = [
            torch.arange(length, device=device) + line * width
            for line, length in enumerate(lengths)
        ]
        return cls(lengths, width, torch.cat(lines))

    def pad(self, x: Tensor) -> Tensor:
        """`[T, ...]` as `[B, S, ...]`: a copy with zeros behind, or a view where none is needed."""
        shape = (len(self.lengths), self.longest, *x.shape[1:])
        if self.places is None:
            return x.view(shape)
        padded = x.new_zeros((shape[0] * shape[1], *x.shape[1:]))
        return padded.index_copy_(0, self.places, x).view(shape)

    def gather(self, x: Tensor) -> Tensor:
        """The real tokens of `[B, S, ...]`, as `[T, ...]`."""
        flat = x.reshape(-1, *x.shape[2:])
        return flat if self.places is None else flat[self.places]

    def real(self, device: torch.device) -> Tensor:
        """bool `[B, S]`: True on tokens of a document."""
        lengths = torch.tensor(self.lengths, device=device)
        return torch.arange(self.longest, device=device) < lengths[:, None]


def future_of(tokens: int, device: torch.device) -> Tensor:
    """bool `[tokens, tokens]`: True on keys after the query."""
    return torch.ones(tokens, tokens, dtype=torch.bool, device=device).triu(1)


@dataclass(frozen=True)
class HeadsFirst:
    """The inputs as `[B, H, S, D]`, views of `[B, S, H, D]`, as a model's projections give them.

    Attributes:
        leaves: of q, k and v.
        cotangent: of the output, zeros behind the documents.
    """

    rectangle: Rectangle
    leaves: list[Tensor]
    cotangent: Tensor

    def prepared(self, forward: Callable[[], Tensor]) -> Prepared:
        """A call on the leaves, whose output is `[B, H, S, D]`."""

        def as_THD(x_BHSD: Tensor) -> Tensor:
            return self.rectangle.gather(x_BHSD.transpose(1, 2))

        return Prepared(forward, self.leaves, self.cotangent, as_THD)


def heads_first(inputs: Inputs, needs_grad: bool, width: int | None = None) -> HeadsFirst:
    """The inputs in lines of the longest document's tokens, or of `width`.

    Raises:
        ValueError: a document is longer than that.
    """
    rectangle = Rectangle.of(inputs.lengths, inputs.q.device, width)
    leaves = [
        rectangle.pad(x).transpose(1, 2).detach().requires_grad_(needs_grad)
        for x in (inputs.q, inputs.k, inputs.v)
    ]
    return HeadsFirst(rectangle, leaves, rectangle.pad(inputs.cotangent).transpose(1, 2))
