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

from flexvarlen.attention.backends.cu_seqlens.backend import CuSeqlensBackend
from flexvarlen.attention.backends.cu_seqlens.fa2 import ampere_refusal, one_split
from flexvarlen.attention.backends.cu_seqlens.fa3 import order_refusal
from flexvarlen.attention.backends.cu_seqlens.fa4 import gradient_refusal
from flexvarlen.attention.backends.cu_seqlens.kernel import KernelCall
from flexvarlen.attention.call import AttentionRequest
from flexvarlen.env import flash_attention_impl

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


BACKEND = VarlenBackend(_VarlenKernel())
