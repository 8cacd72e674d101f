"""What the backends over cu_seqlens share: their plan, their call and what all of them refuse.

Shape legend: T = tokens of the query row, H = num_heads, D = head_dim, N = document slots.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flexvarlen.attention.backends.cu_seqlens.kernel import KERNELS, CuSeqlensKernel, Numbers
from flexvarlen.attention.backends.cu_seqlens.lse_without_gradient import lse_without_gradient
from flexvarlen.attention.backends.cu_seqlens.operator import attend
from flexvarlen.attention.call import AttentionOptions, AttentionRequest
from flexvarlen.mask.chunks import chunk_boundaries
from flexvarlen.mask.document_mask import DocumentMask

HALF = (torch.bfloat16, torch.float16)


class Boundaries(NamedTuple):
    """What a kernel is told of a mask: its documents, or the chunks they fall into.

    Attributes:
        cu_seqlens_q, cu_seqlens_k: int32 `[N + 1]`.
        bound_q, bound_k: no document ever has more tokens.
        dead_T: queries whose output is zero though they lie before the last boundary, bool `[T]`.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    bound_q: int
    bound_k: int
    dead_T: Tensor | None


class CuSeqlensBackend:
    """A kernel over cu_seqlens. A subclass says what it needs and lacks.

    Args:
        kernel: the forward and the backward.
    """

    name: str
    head_dims: tuple[int, int]
    """The head dimension must be a multiple of the first and at most the second."""
    has_windows = True
    has_softcap = True
    launches_own_sizes = True
    """Whether it may be launched for the row's own documents: its time grows with the bounds."""

    def __init__(self, kernel: CuSeqlensKernel) -> None:
        KERNELS[self.name] = kernel

    def why_missing(self, device: torch.device) -> str | None:
        """Why the kernel cannot run on this machine at all, or None."""
        raise NotImplementedError

    def why_not_this(self, request: AttentionRequest) -> str | None:
        """What this kernel alone lacks for the request, or None."""
        return None

    def why_not(self, request: AttentionRequest) -> str | None:
        """Needs its package and GPU, half precision and a head_dim it has; no prefix."""
        if request.device.type != "cuda":
            return f"{self.name} needs a CUDA GPU, got {request.device.type}; use backend='sdpa'."
        return (
            self.why_missing(request.device)
            or self._why_not_shape(request)
            or self._why_not_mask(request)
            or self.why_not_this(request)
        )

    def _why_not_shape(self, request: AttentionRequest) -> str | None:
        if request.dtype not in HALF:
            return (
                f"{self.name} needs bfloat16 or float16, got {request.dtype}; convert the model or "
                "use backend='flex'."
            )
        multiple, most = self.head_dims
        if request.head_dim % multiple or not 0 < request.head_dim <= most:
            return (
                f"{self.name} needs head_dim a multiple of {multiple} and at most {most}, got "
                f"{request.head_dim}; use backend='flex'."
            )
        return None

    def _why_not_mask(self, request: AttentionRequest) -> str | None:
        mask = request.mask
        if mask.prefix:
            return f"{self.name} has no prefixes; use backend='flex'."
        if mask.cross and mask.chunk:
            return f"{self.name} has no chunks with layout_k; use backend='flex'."
        if mask.top_left and (mask.left, mask.right) != (-1, -1):
            return (
                f"{self.name} aligns documents with their keys at the bottom right; pass "
                "align='bottom_right' or use backend='flex'."
            )
        if not self.has_windows and (mask.left, mask.right) not in ((-1, 0), (-1, -1)):
            return f"{self.name} has no sliding windows; use backend='flex'."
        if not self.has_softcap and request.softcap is not None:
            return f"{self.name} has no softcap; use backend='flex'."
        return None

    def plan(self, mask: DocumentMask, *, batch_invariant: bool = False) -> Boundaries:
        """The boundaries of the documents, or, with chunks, of the chunks. No sync; traces."""
        layout, layout_k = mask.layout, mask.layout_k
        cu_q, cu_k = layout.cu_seqlens, layout_k.cu_seqlens
        bound_q, bound_k = layout.max_seqlen_bound, layout_k.max_seqlen_bound
        if _is_chunked(mask):
            cu_q = cu_k = chunk_boundaries(cu_q, mask.spec.chunk, layout.total_tokens)
            bound_q = bound_k = mask.spec.chunk
        dead_T = layout.padding
        if layout_k is not layout and layout_k.padding is not None:
            lo, hi = mask.bounds()
            dead_T = lo >= hi
        return Boundaries(cu_q, cu_k, bound_q, bound_k, dead_T)

    def attend(
        self,
        q_THD: Tensor,
        k_THD: Tensor,
        v_THD: Tensor,
        mask: DocumentMask,
        plan: Boundaries,
        options: AttentionOptions,
    ) -> tuple[Tensor, Tensor | None]:
        """One call for all documents."""
        spec = mask.spec
        documents, longest_q, longest_k, tail = self._launch_sizes(mask, plan)
        numbers = Numbers(
            documents,
            longest_q,
            longest_k,
            plan.bound_q,
            plan.bound_k,
            spec.left,
            spec.right,
            options.scale,
            options.softcap or 0.0,
            options.deterministic or options.batch_invariant,
            options.batch_invariant,
            tail,
            options.return_lse,
        )
        boundaries = (plan.cu_seqlens_q, plan.cu_seqlens_k)
        out_THD, lse_HT = attend(
            self.name, q_THD, k_THD, v_THD, options.sinks_H, *boundaries, numbers
        )
        if plan.dead_T is not None:
            out_THD = torch.where(plan.dead_T[:, None, None], 0, out_THD)
        if not options.return_lse or lse_HT is None:
            return out_THD, None
        if torch.is_grad_enabled() and out_THD.requires_grad:
            lse_HT = lse_without_gradient(lse_HT, q_THD, k_THD, self.name)
        if plan.dead_T is not None:
            lse_HT = torch.where(plan.dead_T, float("-inf"), lse_HT)
        return out_THD, lse_HT

    def _launch_sizes(self, mask: DocumentMask, plan: Boundaries) -> tuple[int, int, int, int]:
        """Documents, tokens of the longest and of its keys, and tail to launch for.

        Not in the plan: a compiled layer that is handed it would take its numbers for constants.
        """
        slots = plan.cu_seqlens_q.shape[0] - 1
        if _outlives_the_call(plan.cu_seqlens_q):
            return slots, plan.bound_q, plan.bound_k, 1
        documents, longest_q, tail = mask.layout.launch.read()
        longest_k = longest_q
        if mask.spec.cross:
            documents_k, longest_k, tail_k = mask.layout_k.launch.read()
            documents, tail = max(documents, documents_k), tail + tail_k
        if _is_chunked(mask) or not self.launches_own_sizes:
            return slots, plan.bound_q, plan.bound_k, tail
        return documents, longest_q, longest_k, tail


def _is_chunked(mask: DocumentMask) -> bool:
    return 0 < mask.spec.chunk < mask.layout.max_seqlen_bound


def _outlives_the_call(x: Tensor) -> bool:
    """Whether what is traced, or captured, keeps numbers and is run on other documents later."""
    if torch.compiler.is_compiling():
        # Not is_exporting(): Dynamo of torch 2.11 takes it for True in every graph.
        return bool(getattr(torch.compiler, "_is_exporting_flag", True))
    # Inductor's own CUDA graphs call the operator, not this; so whoever captures here, another
    # operator inside inductor's graph too, replays these very numbers.
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        return True
    proxy = torch._C._TorchDispatchModeKey.PROXY
    return (
        torch._C._len_torch_dispatch_stack() > 0 and torch._C._get_dispatch_mode(proxy) is not None
    )
