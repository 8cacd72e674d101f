"""The sizes that cu_seqlens kernels are launched with: the row's own, or upper bounds.

FlashAttention launches blocks for every slot up to the longest document, used or not, and its
backward can take twice as long with a power-of-two bound. So it gets the row's own sizes where
the host knows them.
"""

from __future__ import annotations

import sys
from types import FrameType

import torch
from torch import Tensor

SHORT_ROW = 2048
"""Rows of at most this many tokens are launched with the bounds: there, host time dominates."""

_SHIFT = 2**20  # Dynamo specializes on sizes 0 and 1, and on sizes that are equal


class LaunchSizes:
    """The sizes that kernels are launched with: number of documents, longest lengths, tail flag.

    In a compiled graph the sizes that vary between batches are dynamic from the start, so that
    other documents cause no recompilation: they are read from the shape of an empty tensor whose
    dimensions are marked dynamic. Dynamo reads them at every call, which takes ten microseconds.

    Args:
        documents: the number of documents, or of segments in a row of trees; None where only the
            device knows it.
        longest: (longest document,), or (longest tree, longest segment); None likewise.
        capacity, bound: the layout's `capacity` and `max_seqlen_bound`.
        total_tokens: T.
        may_have_tail: whether there may be tokens past the last boundary.
        device: the layout's device.

    Attributes:
        of_the_row: whether kernels are launched with the row's own sizes, not with the bounds.
    """

    def __init__(
        self,
        documents: int | None,
        longest: tuple[int, ...] | None,
        *,
        capacity: int,
        bound: int,
        total_tokens: int,
        may_have_tail: bool,
        device: torch.device,
    ) -> None:
        known = documents is not None and longest is not None
        self.of_the_row = known and total_tokens > SHORT_ROW
        if documents is None or longest is None or not self.of_the_row:
            documents, longest = capacity, (bound,) * len(longest or (bound,))
        documents = max(documents, 1)  # kernels reject an empty batch
        self._sizes = (documents, *longest, int(may_have_tail) if known else 1)
        self._shape: Tensor | None = None
        if known and not torch.compiler.is_compiling():
            varying = self._sizes if self.of_the_row else self._sizes[-1:]
            shape = (0, *(size + i * _SHIFT for i, size in enumerate(varying, 1)))
            strides = (0,) * len(shape)
            self._shape = torch.empty_strided(shape, strides, dtype=torch.bool, device=device)
            torch._dynamo.maybe_mark_dynamic(self._shape, list(range(1, len(shape))))

    def read(self, *, compiling: bool) -> tuple[int, ...]:
        """Return the number of documents, each of `longest`, and 1 if a tail must be zeroed."""
        if not compiling or self._shape is None:
            return self._sizes
        varying = [size - i * _SHIFT for i, size in enumerate(self._shape.shape[1:], 1)]
        return *self._sizes[: -len(varying)], *varying


NOT_CAPTURED = (torch.Tag.cudagraph_unsafe,)
"""Tags of an operator that reads a row's documents on the host: a CUDA graph would repeat them."""


def is_replayed(x: Tensor) -> bool:
    """Whether a call on x is captured into a CUDA graph that may be replayed on other documents.

    False for Inductor's own graphs (`mode="reduce-overhead"`): it records one per combination of
    the integers passed to our operators, these sizes included. Only the Python stack shows who is
    capturing.
    """
    if not x.is_cuda or not torch.cuda.is_current_stream_capturing():
        return False
    cudagraph_trees = sys.modules.get("torch._inductor.cudagraph_trees")
    node = getattr(cudagraph_trees, "CUDAGraphNode", None)
    recording = getattr(getattr(node, "_record", None), "__code__", None)
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is recording:
            return False
        frame = frame.f_back
    return True
