"""Call a cu_seqlens kernel, zero the tokens past the last boundary and apply attention sinks.

FlashAttention 2, 3 and 4 and torch's built-in kernels differ only in argument names. This module
adds two things to each of them:

- It zeroes the tokens past the last boundary, which they leave unwritten in the output and in all
  gradients, because garbage there would reach weight gradients.
- It applies attention sinks. A sink scales the output by `sigmoid(lse - sink)`. The backward
  kernels make probabilities from the LSE and their gradient from the output, so they are exact if
  given the output and LSE that include the sink.

Shape legend: T, Tk = tokens of the query and the key row, H = num_heads, Hkv = num_kv_heads,
D = head_dim, N = document slots.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from flexvarlen.attention.backends.sinks import finite_sinks, share_without_sink
from flexvarlen.attention.call import AttentionCall

MIN_BOUND = 2  # with max_seqlen 1 FA2 uses its decoding path, which fails on empty slots


class KernelSizes(NamedTuple):
    """The sizes with which a kernel is launched.

    Attributes:
        documents: number of slots in use.
        longest_q, longest_k: length of the longest document and of the longest key document.
        bound_q, bound_k: upper bounds on these for any row.
        tail: 1 if there may be tokens past the last boundary, else 0.
    """

    documents: int
    longest_q: int
    longest_k: int
    bound_q: int
    bound_k: int
    tail: int

    def of_any_row(self, slots: int) -> KernelSizes:
        """Return the sizes for a call that may be replayed on other rows."""
        return KernelSizes(slots, self.bound_q, self.bound_k, self.bound_q, self.bound_k, 1)


class CallBoundaries(NamedTuple):
    """The boundaries passed to a kernel: cu_seqlens int32 `[N + 1]`, and the maximum lengths."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int


class CuSeqlensKernel(Protocol):
    """A forward and a backward over cu_seqlens; q `[T, H, D]`, k and v `[Tk, Hkv, D]`."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, boundaries: CallBoundaries, call: AttentionCall
    ) -> tuple[Tensor, Tensor]:
        """Return the output `[T, H, D]` and the LSE, fp32 `[H, T]`."""
        ...

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
        """Return the gradients of q, k and v."""
        ...


KERNELS: dict[str, CuSeqlensKernel] = {}
"""The kernels by backend name; custom operators take the name as an argument."""


def forward(
    kernel: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks_H: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    sizes: KernelSizes,
    call: AttentionCall,
) -> tuple[Tensor, Tensor]:
    """Return output and LSE, with tokens past the last boundary zeroed and sinks in the output."""
    boundaries = _boundaries(cu_seqlens_q, cu_seqlens_k, sizes, call)
    out_THD, lse_HT = KERNELS[kernel].forward(q, k, v, boundaries, call)
    if not out_THD.is_contiguous():
        out_THD = out_THD.contiguous()
    if not lse_HT.is_contiguous():
        lse_HT = lse_HT.contiguous()
    may_have_tail = sizes.tail > 0 or _is_first(q)
    if sinks_H is not None or call.return_lse:
        # FA2 returns +inf for a query that sees no key.
        lse_HT.masked_fill_(lse_HT == float("inf"), float("-inf"))
        if may_have_tail:
            lse_HT.masked_fill_(_tail(out_THD, cu_seqlens_q), float("-inf"))
    if sinks_H is not None:
        out_THD.mul_(share_without_sink(lse_HT, sinks_H))
    if may_have_tail:
        _zero_tail(cu_seqlens_q, out_THD)
    return out_THD, lse_HT


def backward(
    kernel: str,
    grad_THD: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks_H: Tensor | None,
    out_THD: Tensor,
    lse_HT: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    sizes: KernelSizes,
    call: AttentionCall,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of q, k, v and the sinks."""
    boundaries = _boundaries(cu_seqlens_q, cu_seqlens_k, sizes, call)
    if not grad_THD.is_contiguous():
        grad_THD = grad_THD.contiguous()
    dsinks_H = None
    if sinks_H is not None:
        lse_HT, dsinks_H = include_sinks(sinks_H, grad_THD, out_THD, lse_HT, cu_seqlens_q, sizes)
    grads = KERNELS[kernel].backward(grad_THD, q, k, v, out_THD, lse_HT, boundaries, call)
    dq, dk, dv = (x if x.is_contiguous() else x.contiguous() for x in grads)
    if sizes.tail > 0:
        _zero_tail(cu_seqlens_q, dq)
        _zero_tail(cu_seqlens_k, dk, dv)
    return dq, dk, dv, dsinks_H


def include_sinks(
    sinks_H: Tensor,
    grad_THD: Tensor,
    out_THD: Tensor,
    lse_HT: Tensor,
    cu_seqlens_q: Tensor,
    sizes: KernelSizes,
) -> tuple[Tensor, Tensor]:
    """Return the LSE with the sinks, for a backward without them, and their gradient.

    `grad_THD` is contiguous.
    """
    sinks_H1 = finite_sinks(sinks_H)
    lse_HT = torch.logaddexp(lse_HT, sinks_H1)
    grad_dot_out_HT = _row_dot(grad_THD, out_THD)
    if sizes.tail > 0:  # in the tail the output is 0, but grad_output can be anything
        grad_dot_out_HT.masked_fill_(_tail(out_THD, cu_seqlens_q), 0)
    # A sink is an extra key with probability exp(sink - lse) and a value of 0.
    dsinks_H = -((sinks_H1 - lse_HT).exp() * grad_dot_out_HT).sum(1).to(sinks_H.dtype)
    return lse_HT, dsinks_H


def empty_gradients(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate contiguous tensors for dq, dk and dv."""
    form = torch.contiguous_format
    return (
        torch.empty_like(q, memory_format=form),
        torch.empty_like(k, memory_format=form),
        torch.empty_like(v, memory_format=form),
    )


def one_split(boundaries: CallBoundaries, heads: int) -> CallBoundaries:
    """Append empty documents so that FA2 sums dq in a fixed order.

    FlashAttention-2's deterministic backward splits the sum over keys into
    ceil(multiprocessors / (documents x heads)) parts: one, if there are enough documents.
    """
    cu_q, cu_k, *longest = boundaries
    processors = torch.cuda.get_device_properties(cu_q.device).multi_processor_count
    slots = -(-processors // heads)
    cu_q, cu_k = (
        torch.cat([cu, cu[-1:].expand(max(0, slots + 1 - cu.shape[0]))]) for cu in (cu_q, cu_k)
    )
    return CallBoundaries(cu_q, cu_k, *longest)


def _boundaries(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, sizes: KernelSizes, call: AttentionCall
) -> CallBoundaries:
    """Return the boundaries of the slots in use and the maximum lengths, for the kernels."""
    ends, longest_q, longest_k = sizes.documents + 1, sizes.longest_q, sizes.longest_k
    if ends < cu_seqlens_q.shape[0]:
        cu_seqlens_q, cu_seqlens_k = cu_seqlens_q[:ends], cu_seqlens_k[:ends]
    if call.batch_invariant:
        # Kernels ignore a window that is wider than the longest document, which changes their order
        # of summation.
        longest_q = max(longest_q, call.spec.right + 2)
        longest_k = max(longest_k, call.spec.left + 2)
    longest_q = MIN_BOUND if longest_q < MIN_BOUND else longest_q
    longest_k = MIN_BOUND if longest_k < MIN_BOUND else longest_k
    return CallBoundaries(cu_seqlens_q, cu_seqlens_k, longest_q, longest_k)


_seen: set[tuple[torch.dtype, torch.device]] = set()


def _is_first(x: Tensor) -> bool:
    """Return whether the tail kernel has not been launched yet for this dtype and device.

    A kernel is loaded at its first launch, which must not happen during CUDA graph capture.
    """
    kind = (x.dtype, x.device)
    if kind in _seen:
        return False
    _seen.add(kind)
    return True


def _zero_tail(cu_seqlens: Tensor, *tensors: Tensor) -> None:
    """Zero the tokens past the last boundary in place, without a sync."""
    if cu_seqlens.device.type == "cpu":
        for x in tensors:
            x[int(cu_seqlens[-1]) :] = 0
        return
    from flexvarlen.attention.backends.cu_seqlens.triton.zero_tail import zero_tail_

    for x in tensors:
        zero_tail_(x, cu_seqlens)


def _tail(x_THD: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return which rows lie past the last boundary, bool `[T]`."""
    tokens = torch.arange(x_THD.shape[0], device=x_THD.device, dtype=torch.int32)
    return tokens >= cu_seqlens[-1]


def _row_dot(a_THD: Tensor, b_THD: Tensor) -> Tensor:
    """Return `(a * b).sum(-1).T` in fp32, `[H, T]`."""
    if a_THD.device.type == "cpu":
        return (a_THD.float() * b_THD.float()).sum(-1).T.contiguous()
    from flexvarlen.attention.backends.cu_seqlens.triton.row_dot import row_dot

    return row_dot(a_THD, b_THD)
