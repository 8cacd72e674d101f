"""`TreeStep`: keys, values, states and gradients that the parts of a tree share, for one pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Of = tuple[int, str]
"""A layer, and what of it: "keys" for keys and values; states of recurrent layers."""
Tensors = tuple[Tensor, ...]

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

    A segment's tensors live from its first pass to its own backward, and so do their gradients,
    which its descendants add up, in at least fp32.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[Of, int], Tensors] = {}
        self._gradients: dict[tuple[Of, int], Tensors] = {}
        self._awaited: set[Of] = set()
        self._ran: set[Of] = set()

    def keep(self, of: Of, segment: int, *tensors: Tensor) -> None:
        """Keep copies of what a segment leaves for those below."""
        self._kept[of, segment] = tuple(x.detach().clone() for x in tensors)

    def has(self, segment: int) -> bool:
        """Whether any layer has kept something of the segment."""
        return any(at[1] == segment for at in self._kept)

    def kept(self, of: Of, segment: int) -> Tensors:
        """What was kept of a segment."""
        return self._kept[of, segment]

    def drop(self, segments: Sequence[int]) -> None:
        """Forget what no part needs any more."""
        gone = set(segments)
        self._kept = {at: x for at, x in self._kept.items() if at[1] not in gone}

    def send(self, of: Of, segment: int, *gradients: Tensor) -> None:
        """Add gradients of what a segment above has kept."""
        wide = [x.to(torch.promote_types(x.dtype, torch.float32)) for x in gradients]
        found = self._gradients.get((of, segment))
        if found is None:  # copies: an engine may reuse the memory of a gradient
            self._gradients[of, segment] = tuple(x.clone() for x in wide)
        else:
            for mine, more in zip(found, wide, strict=True):
                mine.add_(more)

    def receive(self, of: Of, segment: int) -> Tensors:
        """The gradients from below a segment, once; empty if there are none."""
        return self._gradients.pop((of, segment), ())

    # ---- that no backward is missing ----

    def await_backward(self, of: Of) -> None:
        """Note that a layer ran whose backward must come."""
        self._awaited.add(of)

    def ran_backward(self, of: Of) -> None:
        """Note a layer's backward.

        Raises:
            RuntimeError: it is the second of a part.
        """
        if of in self._ran:
            raise RuntimeError(TWICE.format(layer=of[0]))
        self._ran.add(of)

    def finish_part(self) -> None:
        """Begin the next part.

        Raises:
            RuntimeError: a layer's backward did not run.
        """
        missing = {layer for layer, _ in self._awaited - self._ran}
        self._awaited, self._ran = set(), set()
        if missing:
            raise RuntimeError(SKIPPED.format(layers=len(missing)))
