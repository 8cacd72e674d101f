"""`varlen` and `cudnn`: the variable-length kernels inside torch, under `varlen_attn`.

The ATen operators are called themselves, so that the kernel is the one that is named: `varlen_attn`
of torch 2.14 and later may pick cuDNN on Hopper. `torch.nn.attention.activate_flash_attention_impl`
changes the kernel behind `varlen`; `flexvarlen.environment.environment` records which it is.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from flexvarlen.backends.cu_seqlens_backend import CuSeqlensBackend
from flexvarlen.backends.cu_seqlens_kernel import KernelCall
from flexvarlen.backends.fa2 import ampere_refusal, one_split
from flexvarlen.backends.fa3 import order_refusal
from flexvarlen.backends.fa4 import gradient_refusal
from flexvarlen.backends.protocol import AttentionRequest
from flexvarlen.environment import flash_attention_impl

SWITCH = "torch.use_deterministic_algorithms(True)"


class VarlenBackend(CuSeqlensBackend):
    """torch's own flash kernel over cu_seqlens."""

    name = "varlen"
    head_dims = (8, 256)
    has_softcap = False

    def why_missing(self, device: torch.device) -> str | None:
        """Needs a CUDA build of torch and an Ampere GPU."""
        if not hasattr(torch.ops.aten, "_flash_attention_forward"):
            return "varlen needs a torch built with flash attention; install a CUDA build of torch."
        return ampere_refusal(self.name, device)

    def why_not_this(self, request: AttentionRequest) -> str | None:
        """A backward in one order only as torch has it as a whole; what the kernel behind lacks."""
        if not request.needs_grad:
            return None
        if request.past_int32:
            return (
                "varlen gives wrong gradients for queries of 2**31 elements or more (tokens x "
                "heads x head_dim); pack shorter rows, or use backend='fa3', 'fa2' or 'flex'."
            )
        ordered = request.deterministic or request.batch_invariant
        behind = flash_attention_impl()
        if behind == "FA4" and (lacks := gradient_refusal(self.name, request)) is not None:
            return lacks
        if behind == "FA3" and ordered and (lacks := order_refusal(self.name, request)) is not None:
            return lacks
        if ordered and not torch.are_deterministic_algorithms_enabled():
            return (
                f"varlen is deterministic only under {SWITCH}; call it, or use backend='fa3', "
                "'fa2' or 'flex'."
            )
        return None


@cache
def _one_split() -> dict[str, Any]:
    """`num_splits=1` where torch has it: the sum over keys in one piece, in any batch."""
    schema = torch.ops.aten._flash_attention_forward.default._schema
    return {"num_splits": 1} if any(a.name == "num_splits" for a in schema.arguments) else {}


class _VarlenKernel:
    def forward(self, call: KernelCall) -> tuple[Tensor, Tensor]:
        out_THD, lse_HT, *_ = torch.ops.aten._flash_attention_forward.default(
            call.q_THD,
            call.k_THD,
            call.v_THD,
            call.cu_seqlens_q,
            call.cu_seqlens_k,
            call.max_seqlen_q,
            call.max_seqlen_k,
            0.0,
            _plainly_causal(call),
            False,
            scale=call.scale,
            window_size_left=call.left,
            window_size_right=call.right,
            **(_one_split() if call.batch_invariant else {}),
        )
        return out_THD, lse_HT

    def backward(
        self, call: KernelCall, grad_THD: Tensor, out_THD: Tensor, lse_HT: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        if call.deterministic and not torch.are_deterministic_algorithms_enabled():
            raise RuntimeError(
                f"varlen was asked for a deterministic backward, and {SWITCH} no longer holds; "
                "leave it on until the backward has run."
            )
        if call.batch_invariant:
            call = one_split(call)
        dq, dk, dv = torch.ops.aten._flash_attention_backward.default(
            grad_THD,
            call.q_THD,
            call.k_THD,
            call.v_THD,
            out_THD,
            lse_HT,
            call.cu_seqlens_q,
            call.cu_seqlens_k,
            call.max_seqlen_q,
            call.max_seqlen_k,
            0.0,
            _plainly_causal(call),
            torch.zeros(
                2, dtype=torch.uint64, device=call.q_THD.device
            ),  # dropout's random state, of which there is none
            torch.empty(0, device=call.q_THD.device),
            scale=call.scale,
            window_size_left=call.left,
            window_size_right=call.right,
        )
        return dq, dk, dv


def _plainly_causal(call: KernelCall) -> bool:
    return call.right == 0 and call.left < 0


class CudnnBackend(CuSeqlensBackend):
    """cuDNN's kernel over cu_seqlens, as torch has it: forward only."""

    name = "cudnn"
    head_dims = (8, 128)
    launches_own_sizes = False  # cuDNN builds and keeps a plan for each size
    has_windows = False
    has_softcap = False

    def why_missing(self, device: torch.device) -> str | None:
        """Needs a CUDA build of torch with cuDNN, and an Ampere GPU."""
        if not torch.backends.cudnn.is_available() or not hasattr(
            torch.ops.aten, "_cudnn_attention_forward"
        ):
            return "cudnn needs a torch built with cuDNN; install a CUDA build of torch."
        return ampere_refusal(self.name, device)

    def why_not_this(self, request: AttentionRequest) -> str | None:
        """No backward, and no promise."""
        if request.needs_grad:
            return (
                "cudnn is forward only here: its packed backward gives NaN in torch 2.11; use "
                "backend='varlen', or torch.no_grad()."
            )
        if request.past_int32:
            return (
                "cudnn gives wrong outputs for queries of 2**31 elements or more (tokens x heads x "
                "head_dim); pack shorter rows, or use backend='fa3', 'fa2' or 'flex'."
            )
        if request.mask.cross or request.mask.chunk:
            return "cudnn has neither layout_k nor chunks; use backend='varlen' or 'flex'."
        if request.batch_invariant:
            return "cudnn does not promise batch invariance; use backend='varlen' or 'fa3'."
        return None


class _CudnnKernel:
    def forward(self, call: KernelCall) -> tuple[Tensor, Tensor]:
        out_THD, lse_TH1, *_ = torch.ops.aten._cudnn_attention_forward.default(
            call.q_THD,
            call.k_THD,
            call.v_THD,
            None,
            call.cu_seqlens_q,
            call.cu_seqlens_k,
            call.max_seqlen_q,
            call.max_seqlen_k,
            True,
            0.0,
            call.causal,
            False,
            scale=call.scale,
        )
        return out_THD, lse_TH1[..., 0].T

    def backward(
        self, call: KernelCall, grad_THD: Tensor, out_THD: Tensor, lse_HT: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        raise NotImplementedError("cudnn is forward only; use backend='varlen'.")


BACKEND = VarlenBackend(_VarlenKernel())
CUDNN = CudnnBackend(_CudnnKernel())
