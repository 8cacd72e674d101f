"""What kernels over cu_seqlens are launched for: the documents of the row, or of any row.

FlashAttention launches blocks for each slot up to the longest document, used or not, and its
backward takes up to twice as long for a bound that is a power of two. So it is told what the row
holds, where the host knows it.
"""

from __future__ import annotations

import sys
from types import FrameType

import torch
from torch import Tensor

SHORT_ROW = 2048
"""Rows of at most so many tokens are launched for their bounds: their time is the host's."""

_SHIFT = 2**20  # Dynamo makes graphs of their own for sizes 0 and 1, and for equal ones


class LaunchSizes:
    """Documents, longest document and tail of a row, as kernels are told them.

    In a compiled graph those that differ between documents are numbers that vary from the start,
    so that other documents recompile nothing: there they are read off the shape of an empty tensor
    that is marked for it. Dynamo reads each anew in every call, for ten microseconds.

    Args:
        documents, longest: of the row; None where only the device knows.
        capacity, bound: of any row.
        total_tokens: T.
        may_have_tail: whether rows may lie past the last boundary.
        fixed: whether they are to be those of any row.
        device: of the row.

    Attributes:
        own: whether kernels are launched for the row's own documents, not for any.
    """

    def __init__(
        self,
        documents: int | None,
        longest: int | None,
        *,
        capacity: int,
        bound: int,
        total_tokens: int,
        may_have_tail: bool,
        fixed: bool,
        device: torch.device,
    ) -> None:
        fixed = fixed or documents is None or longest is None
        self.own = not fixed and total_tokens > SHORT_ROW
        if documents is None or longest is None or not self.own:
            documents, longest = capacity, bound
        documents = max(documents, 1)  # kernels refuse a batch of none
        self._sizes = (documents, longest, 1 if fixed else int(may_have_tail))
        self._shape: Tensor | None = None
        if not fixed and not torch.compiler.is_compiling():
            varying = self._sizes if self.own else self._sizes[2:]
            shape = (0, *(size + i * _SHIFT for i, size in enumerate(varying, 1)))
            strides = (0,) * len(shape)
            self._shape = torch.empty_strided(shape, strides, dtype=torch.bool, device=device)
            torch._dynamo.maybe_mark_dynamic(self._shape, list(range(1, len(shape))))

    def read(self, *, compiling: bool) -> tuple[int, int, int]:
        """Documents, tokens of the longest one, and 0 if no tail has to be zeroed, else 1."""
        if not compiling or self._shape is None:
            return self._sizes
        if not self.own:
            return *self._sizes[:2], self._shape.shape[1] - _SHIFT
        _, documents, longest, tail = self._shape.shape
        return documents - _SHIFT, longest - 2 * _SHIFT, tail - 3 * _SHIFT


def is_replayed(x: Tensor) -> bool:
    """Whether a call on x is captured into a CUDA graph that may be replayed on other documents.

    Not in inductor's own graphs (`mode="reduce-overhead"`): it records one for each combination of
    the numbers that it hands our operators, these sizes among them. Nothing else tells who captures
    than the Python frames that the call came through.
    """
    if not x.is_cuda or not torch.cuda.is_current_stream_capturing():
        return False
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    node = getattr(trees, "CUDAGraphNode", None)
    recording = getattr(getattr(node, "_record", None), "__code__", None)
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is recording:
            return False
        frame = frame.f_back
    return True
