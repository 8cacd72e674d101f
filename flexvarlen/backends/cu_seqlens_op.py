"""One traceable operator for every kernel that takes cu_seqlens: torch's varlen, FlashAttention.

A kernel module registers two functions here. Eagerly a plain autograd.Function calls them (three
times cheaper than an operator); inside a compiled graph they are
`torch.ops.flexvarlen.cu_seqlens_forward` and `_backward`, with fake implementations, so that
`fullgraph=True` holds.

These kernels leave the rows past the last boundary unwritten, in the output and in all gradients:
garbage there reaches weight gradients, so it is zeroed here.

Shape legend: T = total_tokens, H = num_heads, Hkv = num_kv_heads, D = head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from flexvarlen.backends.protocol import AttentionOptions
from flexvarlen.mask import DocumentMask


@dataclass(frozen=True)
class Settings:
    """Everything but tensors that a kernel is told; `left`, `right` are FlashAttention's window."""

    max_seqlen: int
    left: int
    right: int
    scale: float
    softcap: float
    deterministic: bool


class CuSeqlensKernel(Protocol):
    """A forward and a backward over cu_seqlens, int32 `[N + 1]`."""

    def forward(
        self, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, cu_seqlens: Tensor, settings: Settings
    ) -> tuple[Tensor, Tensor]:
        """Output `[T, H, D]` and LSE fp32 `[H, T]`."""
        ...

    def backward(
        self,
        grad_THD: Tensor,
        q_THD: Tensor,
        k_THD: Tensor,
        v_THD: Tensor,
        out_THD: Tensor,
        lse_HT: Tensor,
        cu_seqlens: Tensor,
        settings: Settings,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v."""
        ...


KERNELS: dict[str, CuSeqlensKernel] = {}


def attend(
    kernel: str,
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    mask: DocumentMask,
    options: AttentionOptions,
) -> tuple[Tensor, Tensor | None]:
    """Attention of a packed row by a registered kernel; differentiable, but for the LSE."""
    layout = mask.layout
    compiling = torch.compiler.is_compiling()
    # Always inside a compiled graph, where a guard on whether there is padding would recompile, and
    # in a captured one, which may be replayed on other documents.
    may_have_tail = (
        compiling or layout.has_padding is not False or torch.cuda.is_current_stream_capturing()
    )
    call: Any = cu_seqlens_forward if compiling else _EagerAttention.apply
    out_THD, lse_HT = call(
        q_THD,
        k_THD,
        v_THD,
        layout.cu_seqlens,
        max(layout.max_seqlen_bound, 2),  # at 1 FA2 takes its decoding path, one token a document
        kernel,
        mask.spec.left,
        mask.spec.right,
        options.scale,
        options.softcap or 0.0,
        options.deterministic,
        may_have_tail,
    )
    if layout.padding is not None:
        out_THD = torch.where(layout.padding[:, None, None], 0, out_THD)
    if not options.return_lse:
        return out_THD, None
    if layout.padding is not None:
        lse_HT = torch.where(layout.padding, float("-inf"), lse_HT)
    return out_THD, lse_HT


def _zero_tail(cu_seqlens: Tensor, *tensors: Tensor) -> None:
    """Zero the rows from the last boundary on, in place, without reading the boundary back."""
    from flexvarlen.kernels.zero_tail import zero_tail_

    for x in tensors:
        zero_tail_(x, cu_seqlens)


def _forward(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    kernel: str,
    left: int,
    right: int,
    scale: float,
    softcap: float,
    deterministic: bool,
    may_have_tail: bool,
) -> tuple[Tensor, Tensor]:
    settings = Settings(max_seqlen, left, right, scale, softcap, deterministic)
    out_THD, lse_HT = KERNELS[kernel].forward(q_THD, k_THD, v_THD, cu_seqlens, settings)
    out_THD, lse_HT = out_THD.contiguous(), lse_HT.contiguous()
    if may_have_tail:
        _zero_tail(cu_seqlens, out_THD)
        tokens = torch.arange(out_THD.shape[0], device=out_THD.device, dtype=torch.int32)
        lse_HT.masked_fill_(tokens >= cu_seqlens[-1], float("-inf"))
    return out_THD, lse_HT


def _backward(
    grad_THD: Tensor,
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    out_THD: Tensor,
    lse_HT: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    kernel: str,
    left: int,
    right: int,
    scale: float,
    softcap: float,
    deterministic: bool,
    may_have_tail: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    settings = Settings(max_seqlen, left, right, scale, softcap, deterministic)
    grads = KERNELS[kernel].backward(
        grad_THD.contiguous(), q_THD, k_THD, v_THD, out_THD, lse_HT, cu_seqlens, settings
    )
    dq, dk, dv = (x.contiguous() for x in grads)
    if may_have_tail:
        _zero_tail(cu_seqlens, dq, dk, dv)
    return dq, dk, dv


cu_seqlens_forward = torch.library.custom_op(
    "flexvarlen::cu_seqlens_forward", _forward, mutates_args=()
)
cu_seqlens_backward = torch.library.custom_op(
    "flexvarlen::cu_seqlens_backward", _backward, mutates_args=()
)


@cu_seqlens_forward.register_fake
def _(q_THD: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    tokens, heads, _ = q_THD.shape
    return q_THD.new_empty(q_THD.shape), q_THD.new_empty((heads, tokens), dtype=torch.float32)


@cu_seqlens_backward.register_fake
def _(
    grad_THD: Tensor, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return q_THD.new_empty(q_THD.shape), k_THD.new_empty(k_THD.shape), v_THD.new_empty(v_THD.shape)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q_THD, k_THD, v_THD, cu_seqlens, *ctx.settings = inputs
    out_THD, lse_HT = output
    ctx.save_for_backward(q_THD, k_THD, v_THD, out_THD, lse_HT, cu_seqlens)
    ctx.mark_non_differentiable(lse_HT)


def _differentiate(backward: Any, ctx: Any, grad_THD: Tensor) -> tuple[Tensor | None, ...]:
    q_THD, k_THD, v_THD, out_THD, lse_HT, cu_seqlens = ctx.saved_tensors
    grads = backward(grad_THD, q_THD, k_THD, v_THD, out_THD, lse_HT, cu_seqlens, *ctx.settings)
    return *grads, None, *(None for _ in ctx.settings)


def _traced_backward(
    ctx: Any, grad_THD: Tensor, grad_lse: Tensor | None
) -> tuple[Tensor | None, ...]:
    return _differentiate(cu_seqlens_backward, ctx, grad_THD)


cu_seqlens_forward.register_autograd(_traced_backward, setup_context=_save_for_backward)


class _EagerAttention(torch.autograd.Function):
    """The same forward and backward, called plainly."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor]:
        return _forward(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        _save_for_backward(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, grad_THD: Tensor, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        return _differentiate(_backward, ctx, grad_THD)
