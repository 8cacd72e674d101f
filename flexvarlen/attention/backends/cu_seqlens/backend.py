"""Base class of the cu_seqlens backends: plan, call and shared restrictions.

Shape legend: T = tokens of the query row, H = num_heads, D = head_dim, N = document slots.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flexvarlen.attention.backends.cu_seqlens.kernel import KERNELS, CallBoundaries, KernelSizes
from flexvarlen.attention.backends.cu_seqlens.levels import Levels
from flexvarlen.attention.backends.cu_seqlens.lse import lse_without_gradient
from flexvarlen.attention.backends.cu_seqlens.operator import attend
from flexvarlen.attention.call import AttentionCall
from flexvarlen.layout.boundaries import is_traced
from flexvarlen.mask.chunks import chunk_boundaries
from flexvarlen.mask.document_mask import DocumentMask


class Boundaries(NamedTuple):
    """The boundaries passed to a kernel, of documents or of their chunks.

    Attributes:
        cu_seqlens_q, cu_seqlens_k: int32 `[N + 1]`.
        bound_q, bound_k: upper bounds on document length.
        masked_T: queries before the last boundary whose output must be zero, bool `[T]`.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    bound_q: int
    bound_k: int
    masked_T: Tensor | None


class CuSeqlensBackend:
    """Base class of the cu_seqlens backends. Subclasses call the kernel and declare its limits."""

    name: str
    has_windows = True
    has_softcap = True
    launches_own_sizes = True
    """Whether to launch with the actual sizes of the row, which is faster than with the bounds."""

    def __init__(self) -> None:
        KERNELS[self.name] = self

    # ---- implemented by subclasses ----

    def why_missing(self, device: torch.device) -> str | None:
        """Return why the kernel cannot run on this machine, or None."""
        raise NotImplementedError

    def why_lacking(self, call: AttentionCall) -> str | None:
        """Return what this build of the kernel lacks for the call, or None."""
        return None

    def why_unsupported(self, call: AttentionCall) -> str | None:
        """Return why this particular kernel cannot serve the call, or None."""
        return None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, boundaries: CallBoundaries, call: AttentionCall
    ) -> tuple[Tensor, Tensor]:
        """As `CuSeqlensKernel`."""
        raise NotImplementedError

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        boundaries: CallBoundaries,
        call: AttentionCall,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `CuSeqlensKernel`."""
        raise NotImplementedError

    # ---- as a `Backend` ----

    def why_not(self, call: AttentionCall) -> str | None:
        """Require the kernel; refuse prefixes, and masks or features that it lacks."""
        return (
            self.why_missing(call.device)
            or self._why_not_mask(call)
            or self.why_lacking(call)
            or self.why_unsupported(call)
        )

    def _why_not_mask(self, call: AttentionCall) -> str | None:
        spec = call.spec
        if spec.tree and spec.is_limited:
            return f"{self.name} has no windows or chunks in trees; use backend='flex'."
        if spec.tree and call.batch_invariant:
            return f"{self.name} is not batch invariant with trees; pack each path as a document."
        if spec.prefix:
            return f"{self.name} has no prefixes; use backend='flex'."
        if spec.runs:
            return (
                f"{self.name} has no runs of tokens that see one another both ways, as those of an "
                "image do; use backend='flex'."
            )
        if spec.cross and spec.chunk:
            return f"{self.name} has no chunks with layout_k; use backend='flex'."
        if spec.top_left:
            return (
                f"{self.name} aligns the last query with the last key of layout_k, got "
                "align='top_left'; use backend='flex', pass align='bottom_right', or remove "
                "layout_k if each document has as many keys as queries."
            )
        if spec.has_window and not self.has_windows:
            return f"{self.name} has no sliding windows; use backend='flex'."
        if not self.has_softcap and call.softcap is not None:
            return f"{self.name} has no softcap; use backend='flex'."
        return None

    def plan(self, mask: DocumentMask, *, batch_invariant: bool = False) -> Boundaries | Levels:
        """Return the boundaries of documents, of chunks or of a tree's levels. No sync; traces."""
        layout, layout_k = mask.layout, mask.layout_k
        if layout_k.segments is not None:
            return Levels.of(layout_k.segments, layout_k.total_tokens - layout.total_tokens)
        cu_q, cu_k = layout.cu_seqlens, layout_k.cu_seqlens
        bound_q, bound_k = layout.max_seqlen_bound, layout_k.max_seqlen_bound
        if _is_chunked(mask):
            cu_q = cu_k = chunk_boundaries(cu_q, mask.spec.chunk, layout.total_tokens)
            bound_q = bound_k = mask.spec.chunk
        masked_T = layout.padding
        if layout_k is not layout and layout_k.padding is not None:
            lo, hi = mask.bounds()
            masked_T = lo >= hi
        return Boundaries(cu_q, cu_k, bound_q, bound_k, masked_T)

    def attend(
        self,
        q_THD: Tensor,
        k_THD: Tensor,
        v_THD: Tensor,
        sinks_H: Tensor | None,
        call: AttentionCall,
        mask: DocumentMask,
        plan: Boundaries | Levels,
    ) -> tuple[Tensor, Tensor | None]:
        """Call the kernel once for all documents; for trees, see `levels.py`."""
        compiling = torch.compiler.is_compiling()
        traced = is_traced()
        out_THD: Tensor
        lse_HT: Tensor | None
        masked_T = None if isinstance(plan, Levels) else plan.masked_T
        sizes = self._sizes(mask, plan, compiling=compiling)
        if _outlives_the_call(plan[0], compiling=compiling, traced=traced):
            sizes = sizes.of_any_row(plan[0].shape[-1] - 1)
        tensors = (q_THD, k_THD, v_THD, sinks_H)
        out_THD, lse_HT = attend(self.name, *tensors, *plan[:2], sizes, call, traced=traced)
        if masked_T is not None:
            out_THD = torch.where(masked_T[:, None, None], 0, out_THD)
        if not call.return_lse or lse_HT is None:
            return out_THD, None
        if torch.is_grad_enabled() and out_THD.requires_grad:
            lse_HT = lse_without_gradient(lse_HT, q_THD, k_THD, self.name)
        if masked_T is not None:
            lse_HT = torch.where(masked_T, float("-inf"), lse_HT)
        return out_THD, lse_HT

    def _sizes(
        self, mask: DocumentMask, plan: Boundaries | Levels, *, compiling: bool
    ) -> KernelSizes:
        """Return the sizes to launch the kernel with.

        Not part of the plan, because a compiled layer that takes the plan would specialize on them.
        """
        layout = mask.layout_k if isinstance(plan, Levels) else mask.layout
        bound_q = bound_k = layout.max_seqlen_bound
        if isinstance(plan, Boundaries):
            bound_q, bound_k = plan.bound_q, plan.bound_k
        documents, *longest, tail = layout.launch.read(compiling=compiling)
        longest_q, longest_k = longest[0], longest[-1]
        if isinstance(plan, Levels) and mask.spec.cross:
            longest_q = min(longest_q, mask.layout.total_tokens)
        elif mask.spec.cross:
            documents_k, longest_k, tail_k = mask.layout_k.launch.read(compiling=compiling)
            documents, tail = max(documents, documents_k), tail + tail_k
        if _is_chunked(mask) or not self.launches_own_sizes:
            documents, longest_q, longest_k = plan[0].shape[-1] - 1, bound_q, bound_k
        return KernelSizes(documents, longest_q, longest_k, bound_q, bound_k, tail)


def _is_chunked(mask: DocumentMask) -> bool:
    return 0 < mask.spec.chunk < mask.layout.max_seqlen_bound


def _outlives_the_call(x: Tensor, *, compiling: bool, traced: bool) -> bool:
    """Return whether a trace or capture bakes in the sizes and may later run on other documents."""
    if compiling:
        # Not is_exporting(): in torch 2.11, Dynamo evaluates it to True in every graph.
        return bool(getattr(torch.compiler, "_is_exporting_flag", True))
    # Inductor's CUDA graphs call the operator, not this function. So any capture seen here,
    # even one by another operator inside Inductor's graph, replays these sizes.
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        return True
    proxy = torch._C._TorchDispatchModeKey.PROXY
    return traced and torch._C._get_dispatch_mode(proxy) is not None
