"""`TreeStep`: keys, values and gradients that the parts of a tree share, for one pass over it.

Shapes: L = tokens of a segment, Hkv = num_kv_heads, D = head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

At = tuple[int, int]
"""A layer and a segment."""
Pair = tuple[Tensor, Tensor]
"""Of keys and of values, `[L, Hkv, D]` each."""

SKIPPED = (
    "each part of a tree must run backward before the next one, as it hands on the gradients of "
    "the parts below it, got the next part without the backward of {layers} layers of the last; "
    "call loss.backward() in the loop, or run the loop under torch.no_grad()."
)
TWICE = (
    "a part of a tree must run backward once, got a second backward of layer {layer}; sum the "
    "losses of a part before backward()."
)


class TreeStep:
    """What parts leave for one another; it belongs to a loop over them, never to a model.

    A segment's keys and values live from its first pass to its own backward, and so do their
    gradients, which its descendants add up, in at least fp32.
    """

    def __init__(self) -> None:
        self._kept: dict[At, Pair] = {}
        self._gradients: dict[At, Pair] = {}
        self._awaited: set[int] = set()
        self._ran: set[int] = set()

    # ---- keys and values ----

    def keep(self, layer: int, segment: int, k: Tensor, v: Tensor) -> None:
        """Keep copies of a segment's keys and values."""
        self._kept[layer, segment] = k.detach().clone(), v.detach().clone()

    def has(self, segment: int) -> bool:
        """Whether any layer has kept the segment."""
        return any(at[1] == segment for at in self._kept)

    def above(self, layer: int, path: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
        """Keys and values of the segments of a path, in order."""
        pairs = [self._kept[layer, segment] for segment in path]
        return [k for k, _ in pairs], [v for _, v in pairs]

    def drop(self, segments: Sequence[int]) -> None:
        """Forget keys and values that no part needs any more."""
        gone = set(segments)
        self._kept = {at: pair for at, pair in self._kept.items() if at[1] not in gone}

    # ---- gradients ----

    def send(self, layer: int, segment: int, dk: Tensor, dv: Tensor) -> None:
        """Add gradients for a segment above."""
        wide = [x.to(torch.promote_types(x.dtype, torch.float32)) for x in (dk, dv)]
        found = self._gradients.get((layer, segment))
        if found is None:  # copies: an engine may reuse the memory of a gradient
            self._gradients[layer, segment] = wide[0].clone(), wide[1].clone()
        else:
            found[0].add_(wide[0])
            found[1].add_(wide[1])

    def receive(self, layer: int, segment: int) -> Pair | None:
        """The gradients from below a segment, once."""
        return self._gradients.pop((layer, segment), None)

    # ---- that no backward is missing ----

    def await_backward(self, layer: int) -> None:
        """A layer ran whose backward must come."""
        self._awaited.add(layer)

    def ran_backward(self, layer: int) -> None:
        """Note a layer's backward.

        Raises:
            RuntimeError: it is the second of a part.
        """
        if layer in self._ran:
            raise RuntimeError(TWICE.format(layer=layer))
        self._ran.add(layer)

    def finish_part(self) -> None:
        """Begin the next part.

        Raises:
            RuntimeError: a layer's backward did not run.
        """
        missing = self._awaited - self._ran
        self._awaited, self._ran = set(), set()
        if missing:
            raise RuntimeError(SKIPPED.format(layers=len(missing)))
