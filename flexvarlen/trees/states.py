"""`PartStates`: keys, values, states and gradients that parts of a tree pass to one another."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

LayerState = tuple[int, str]
"""A layer, and what of it: "keys" for keys and values; states of recurrent layers."""
Tensors = tuple[Tensor, ...]

MISSING_BACKWARD = (
    "each part of a tree must run backward before the next one, got the next part while {layers} "
    "layers of the last have run no backward; call loss.backward() on each, or run the loop under "
    "torch.no_grad()."
)
SECOND_BACKWARD = (
    "a part of a tree must run backward once, got a second backward of layer {layer}; sum the "
    "losses of a part before backward()."
)


class PartStates:
    """Of one loop over the parts, never of a model.

    A segment's tensors live from its pass without gradients to its own backward, and so do their
    gradients, which the segments below add up, in at least fp32.

    Attributes:
        was_read: whether a layer has asked the current part for its keys or states.
    """

    def __init__(self) -> None:
        self.was_read = False
        self._stored: dict[tuple[LayerState, int], Tensors] = {}
        self._gradients: dict[tuple[LayerState, int], Tensors] = {}
        self._awaited: set[LayerState] = set()
        self._ran: set[LayerState] = set()

    def store(self, key: LayerState, segment: int, *tensors: Tensor) -> None:
        """Store copies of what the segments below one need of it."""
        self._stored[key, segment] = tuple(x.detach().clone() for x in tensors)

    def stored(self, key: LayerState, segment: int) -> Tensors:
        """What was stored of a segment."""
        return self._stored[key, segment]

    def discard(self, segments: Sequence[int]) -> None:
        """Forget what no part needs any more."""
        gone = set(segments)
        self._stored = {at: x for at, x in self._stored.items() if at[1] not in gone}

    def add_gradients(self, key: LayerState, segment: int, *gradients: Tensor) -> None:
        """Add gradients of what was stored of a segment."""
        wide = [x.to(torch.promote_types(x.dtype, torch.float32)) for x in gradients]
        found = self._gradients.get((key, segment))
        if found is None:  # copies: an engine may reuse the memory of a gradient
            self._gradients[key, segment] = tuple(x.clone() for x in wide)
        else:
            for total, gradient in zip(found, wide, strict=True):
                total.add_(gradient)

    def pop_gradients(self, key: LayerState, segment: int) -> Tensors:
        """Their sum, once; empty if there are none."""
        return self._gradients.pop((key, segment), ())

    # ---- that no backward is missing ----

    def await_backward(self, key: LayerState) -> None:
        """Note that a layer ran whose backward must come."""
        self._awaited.add(key)

    def ran_backward(self, key: LayerState) -> None:
        """Note a layer's backward.

        Raises:
            RuntimeError: it is the second of a part.
        """
        if key in self._ran:
            raise RuntimeError(SECOND_BACKWARD.format(layer=key[0]))
        self._ran.add(key)

    def finish_part(self) -> None:
        """Begin the next part.

        Raises:
            RuntimeError: a layer's backward did not run.
        """
        missing = {layer for layer, _ in self._awaited - self._ran}
        self._awaited, self._ran = set(), set()
        if missing:
            raise RuntimeError(MISSING_BACKWARD.format(layers=len(missing)))
