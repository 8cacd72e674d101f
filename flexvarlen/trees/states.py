"""`PartStates`: keys, values, states and gradients that parts of a tree pass to one another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flexvarlen.layout.running_part import ENDED, begin_part, end_part

LayerState = tuple[int, str]
"""A layer, and what it stores: "keys" for keys and values, else the name of a recurrent state."""
Tensors = tuple[Tensor, ...]

SECOND_FORWARD = (
    "a part of a tree must run once, in a model whose layers have indices of their own and at most "
    "one convolution and one scan each, got a second forward of layer {layer}; run another model, "
    "or this one without adapters, in a loop of its own over shared.parts(model, max_tokens)."
)
OTHER_DTYPE = (
    "all parts of a tree must run in one dtype, got keys or states in {dtype} below some in "
    "{above}; put the whole loop over the parts inside autocast."
)
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
    """What the parts of one loop have stored; each loop has its own.

    A segment's tensors live from its pass without gradients to its own backward, and so do their
    gradients, which the segments below add up, in at least fp32.

    Attributes:
        was_read: whether a layer has asked the current part for its keys or states.
    """

    def __init__(self) -> None:
        self.was_read = False
        self._stored: dict[tuple[LayerState, int], Tensors] = {}
        self._gradients: dict[tuple[LayerState, int], Tensors] = {}
        self._entered: set[LayerState] = set()
        self._awaited: set[LayerState] = set()
        self._ran: set[LayerState] = set()
        self._part: Any = None

    def store(self, key: LayerState, segment: int, *tensors: Tensor) -> None:
        """Store copies of what the segments below one need of it."""
        self._stored[key, segment] = tuple(x.detach().clone() for x in tensors)

    def stored(self, key: LayerState, segment: int, dtype: torch.dtype | None = None) -> Tensors:
        """What was stored of a segment.

        Raises:
            RuntimeError: nothing, as the loop has ended.
            ValueError: it has another dtype than the one given.
        """
        found = self._stored.get((key, segment))
        if found is None:
            raise RuntimeError(ENDED)
        if dtype is not None and found[0].dtype != dtype:
            raise ValueError(OTHER_DTYPE.format(dtype=dtype, above=found[0].dtype))
        return found

    def discard(self, segments: Sequence[int]) -> None:
        """Forget what no part needs any more."""
        gone = set(segments)
        self._stored = {at: x for at, x in self._stored.items() if at[1] not in gone}

    def clear(self) -> None:
        """Forget everything: a part that the caller still holds refers to this object."""
        self._stored, self._gradients = {}, {}
        self._end_part()

    def add_gradients(self, key: LayerState, segment: int, *gradients: Tensor) -> None:
        """Add gradients of what was stored of a segment, or of its last tokens."""
        if (key, segment) not in self._gradients:
            self._gradients[key, segment] = tuple(
                torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
                for x in self.stored(key, segment)
            )
        for total, gradient in zip(self._gradients[key, segment], gradients, strict=True):
            total[len(total) - len(gradient) :].add_(gradient)

    def pop_gradients(self, key: LayerState, segment: int) -> Tensors:
        """Remove and return the sum of these gradients; empty if there are none."""
        return self._gradients.pop((key, segment), ())

    # ---- that each part runs forward and backward once ----

    def enter(self, key: LayerState, *, expects_backward: bool) -> None:
        """Note the forward of a layer on the current part.

        Args:
            key: of the layer.
            expects_backward: whether its backward must come.

        Raises:
            RuntimeError: it is the second, and not a checkpoint's recomputation in a backward.
        """
        self.was_read = True
        if key in self._entered and torch._C._current_graph_task_id() == -1:
            raise RuntimeError(SECOND_FORWARD.format(layer=key[0]))
        self._entered.add(key)
        if expects_backward:
            self._awaited.add(key)

    def begin_part(self, part: Any) -> None:
        """Begin the forward of a `TreePart`."""
        self.was_read = False
        self._entered, self._awaited, self._ran = set(), set(), set()
        self._end_part()
        self._part = part
        begin_part(part)

    def _end_part(self) -> None:
        if self._part is not None:
            end_part(self._part)
        self._part = None

    def ran_backward(self, key: LayerState) -> None:
        """Note a layer's backward.

        Raises:
            RuntimeError: it is the second of a part.
        """
        if key in self._ran:
            raise RuntimeError(SECOND_BACKWARD.format(layer=key[0]))
        self._ran.add(key)

    def finish_part(self, segments: Sequence[int]) -> None:
        """Check the part that ran last.

        Args:
            segments: those of it that other parts continue.

        Raises:
            RuntimeError: a layer's backward did not run.
        """
        left = {key for key, segment in self._gradients if segment in segments}
        missing = {layer for layer, _ in (self._awaited - self._ran) | left}
        if missing:
            raise RuntimeError(MISSING_BACKWARD.format(layers=len(missing)))
