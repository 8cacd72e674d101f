"""What kernels over cu_seqlens are told, and what they all need done around them.

A kernel module registers a forward and a backward in `KERNELS`; torch's varlen and every
FlashAttention are such. Two things no kernel does itself are done here, for all of them:

- The rows past the last boundary, which they leave unwritten in the output and in all gradients,
  are zeroed: garbage there reaches weight gradients.
- Attention sinks. A sink adds `exp(sink)` to a row's sum of exponentials: the output shrinks by
  `sigmoid(lse - sink)`. The backward kernels make probabilities from the LSE and their gradient
  from the output, so they are exact if they are told the output and the LSE with the sink in them.

Shape legend: T, Tk = tokens of the query and the key row, H = num_heads, Hkv = num_kv_heads,
D = head_dim, N = document slots.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from flexvarlen.layout.launch_sizes import is_replayed

LEAST_SINK = -1e30  # as good as -inf, which minus itself is NaN where a query sees no key
MIN_BOUND = 2  # at a longest document of 1 FA2 takes its decoding path, which fails on empty slots


class Numbers(NamedTuple):
    """The arguments of attention that are no tensors.

    Attributes:
        documents: how many slots are used.
        longest_q, longest_k: no document, and no document's keys, have more tokens.
        bound_q, bound_k: none ever has: what a CUDA graph that a user captures is made for, and for
            all slots.
        left, right: FlashAttention's window, keys on each side; -1 for no limit.
        scale: factor on the scores.
        softcap: as in `packed_attention`, 0 for none.
        deterministic, batch_invariant: promises.
        tail: 0 if no row lies past the last boundary.
        with_lse: whether the LSE is asked for.
    """

    documents: int
    longest_q: int
    longest_k: int
    bound_q: int
    bound_k: int
    left: int
    right: int
    scale: float
    softcap: float
    deterministic: bool
    batch_invariant: bool
    tail: int
    with_lse: bool


class KernelCall(NamedTuple):
    """What a kernel is told: q `[T, H, D]`, k and v `[Tk, Hkv, D]`, cu_seqlens int32 `[N + 1]`.

    The numbers as in `Numbers`.
    """

    q_THD: Tensor
    k_THD: Tensor
    v_THD: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    left: int
    right: int
    scale: float
    softcap: float
    deterministic: bool
    batch_invariant: bool

    @property
    def causal(self) -> bool:
        """Whether no key after the query is seen."""
        return self.right == 0

    def empty_gradients(self) -> tuple[Tensor, Tensor, Tensor]:
        """Contiguous tensors for dq, dk and dv."""
        q, k, v = self.q_THD, self.k_THD, self.v_THD
        form = torch.contiguous_format
        return (
            torch.empty_like(q, memory_format=form),
            torch.empty_like(k, memory_format=form),
            torch.empty_like(v, memory_format=form),
        )


class CuSeqlensKernel(Protocol):
    """A forward and a backward over cu_seqlens."""

    def forward(self, call: KernelCall) -> tuple[Tensor, Tensor]:
        """Output `[T, H, D]` and LSE fp32 `[H, T]`."""
        ...

    def backward(
        self, call: KernelCall, grad_THD: Tensor, out_THD: Tensor, lse_HT: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v."""
        ...


KERNELS: dict[str, CuSeqlensKernel] = {}


def kernel_forward(
    kernel: str,
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    sinks_H: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    numbers: Numbers,
) -> tuple[Tensor, Tensor]:
    """Output and LSE of a registered kernel, tails zeroed and sinks counted."""
    replayed = is_replayed(q_THD)
    call = _kernel_call(replayed, q_THD, k_THD, v_THD, cu_seqlens_q, cu_seqlens_k, numbers)
    may_have_tail = numbers.tail > 0 or replayed or _is_first(q_THD)
    out_THD, lse_HT = KERNELS[kernel].forward(call)
    if not out_THD.is_contiguous():
        out_THD = out_THD.contiguous()
    if not lse_HT.is_contiguous():
        lse_HT = lse_HT.contiguous()
    if sinks_H is not None or numbers.with_lse:
        # FA2 gives a query that sees no key +inf.
        lse_HT.masked_fill_(lse_HT == float("inf"), float("-inf"))
        if may_have_tail:
            lse_HT.masked_fill_(_tail(out_THD, cu_seqlens_q), float("-inf"))
    if sinks_H is not None:
        out_THD.mul_(torch.sigmoid(lse_HT - _finite(sinks_H)[:, None]).T[..., None])
    if may_have_tail:
        _zero_tail(cu_seqlens_q, out_THD)
    return out_THD, lse_HT


def kernel_backward(
    kernel: str,
    grad_THD: Tensor,
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    sinks_H: Tensor | None,
    out_THD: Tensor,
    lse_HT: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    numbers: Numbers,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and the sinks; these empty without sinks."""
    replayed = is_replayed(q_THD)
    call = _kernel_call(replayed, q_THD, k_THD, v_THD, cu_seqlens_q, cu_seqlens_k, numbers)
    may_have_tail = numbers.tail > 0 or replayed
    if not grad_THD.is_contiguous():
        grad_THD = grad_THD.contiguous()
    if sinks_H is None:
        dsinks_H = q_THD.new_empty(0)
    else:
        lse_HT = torch.logaddexp(lse_HT, _finite(sinks_H)[:, None])
        grad_dot_out_HT = _row_dot(grad_THD, out_THD)
        if may_have_tail:  # where the output is 0, and the incoming gradient anything
            grad_dot_out_HT.masked_fill_(_tail(q_THD, cu_seqlens_q), 0)
        # The sink is a key of its own with probability exp(sink - lse) and a value of 0.
        probability_HT = (_finite(sinks_H)[:, None] - lse_HT).exp()
        dsinks_H = -(probability_HT * grad_dot_out_HT).sum(1).to(sinks_H.dtype)
    grads = KERNELS[kernel].backward(call, grad_THD, out_THD, lse_HT)
    dq, dk, dv = (x if x.is_contiguous() else x.contiguous() for x in grads)
    if may_have_tail:
        _zero_tail(cu_seqlens_q, dq)
        _zero_tail(cu_seqlens_k, dk, dv)
    return dq, dk, dv, dsinks_H


def _kernel_call(
    replayed: bool,
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    numbers: Numbers,
) -> KernelCall:
    """What the kernel is told: of its documents alone, or of any, in a graph that is replayed."""
    ends, longest_q, longest_k = numbers.documents + 1, numbers.longest_q, numbers.longest_k
    if replayed:
        longest_q, longest_k = numbers.bound_q, numbers.bound_k
    elif ends < cu_seqlens_q.shape[0]:
        cu_seqlens_q, cu_seqlens_k = cu_seqlens_q[:ends], cu_seqlens_k[:ends]
    if numbers.batch_invariant:
        # Kernels take a window that no document fills for none, by the longest document, and sum
        # in other pieces then.
        longest_q = max(longest_q, numbers.right + 2)
        longest_k = max(longest_k, numbers.left + 2)
    return KernelCall(
        q_THD,
        k_THD,
        v_THD,
        cu_seqlens_q,
        cu_seqlens_k,
        MIN_BOUND if longest_q < MIN_BOUND else longest_q,
        MIN_BOUND if longest_k < MIN_BOUND else longest_k,
        numbers.left,
        numbers.right,
        numbers.scale,
        numbers.softcap,
        numbers.deterministic,
        numbers.batch_invariant,
    )


_seen: set[tuple[torch.dtype, torch.device]] = set()


def _is_first(x: Tensor) -> bool:
    """Whether tails of this kind were never zeroed: a kernel loads at its first launch.

    A captured CUDA graph may force that launch, after a warm-up without padding, and may not load.
    """
    kind = (x.dtype, x.device)
    if kind in _seen:
        return False
    _seen.add(kind)
    return True


def _zero_tail(cu_seqlens: Tensor, *tensors: Tensor) -> None:
    """Zero the rows from the last boundary on, in place, without reading the boundary back."""
    if cu_seqlens.device.type == "cpu":
        for x in tensors:
            x[int(cu_seqlens[-1]) :] = 0
        return
    from flexvarlen.attention.backends.cu_seqlens.triton.zero_tail import zero_tail_

    for x in tensors:
        zero_tail_(x, cu_seqlens)


def _tail(x_THD: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Which rows lie past the last boundary, bool `[T]`."""
    tokens = torch.arange(x_THD.shape[0], device=x_THD.device, dtype=torch.int32)
    return tokens >= cu_seqlens[-1]


def _finite(sinks_H: Tensor) -> Tensor:
    return sinks_H.float().clamp(min=LEAST_SINK)


def _row_dot(a_THD: Tensor, b_THD: Tensor) -> Tensor:
    """`(a * b).sum(-1)` in fp32, `[H, T]`."""
    if a_THD.device.type == "cpu":
        return (a_THD.float() * b_THD.float()).sum(-1).T.contiguous()
    from flexvarlen.attention.backends.cu_seqlens.triton.row_dot import row_dot

    return row_dot(a_THD, b_THD)
