"""`varlen`: the variable-length flash attention inside torch, under `varlen_attn`.

The ATen operator is called itself, so that the flash kernel is what runs: `varlen_attn` of torch
2.14 and later may pick cuDNN on Hopper. `torch.nn.attention.activate_flash_attention_impl` changes
the kernel behind that operator.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexvarlen.backends import cu_seqlens_op
from flexvarlen.backends.cu_seqlens_op import Settings
from flexvarlen.backends.protocol import AttentionOptions, AttentionRequest
from flexvarlen.bounds import UNLIMITED
from flexvarlen.mask import DocumentMask

MAX_HEAD_DIM = 256


def flash_kernel_refusal(name: str, request: AttentionRequest) -> str | None:
    """What the FlashAttention-2 kernels, torch's and the package's, cannot do alike."""
    if request.device.type != "cuda":
        return f"{name} needs a CUDA GPU, got {request.device.type}; use backend='sdpa' there."
    if request.dtype not in (torch.bfloat16, torch.float16):
        return (
            f"{name} needs bfloat16 or float16, got {request.dtype}; convert the model or use "
            "backend='flex'."
        )
    if request.head_dim % 8 or request.head_dim > MAX_HEAD_DIM:
        return (
            f"{name} needs head_dim a multiple of 8 and at most {MAX_HEAD_DIM}, got "
            f"{request.head_dim}; use backend='flex'."
        )
    if request.sinks:
        return f"{name} has no attention sinks; use backend='flex'."
    if request.mask.chunk or request.mask.prefix:
        return f"{name} has neither chunks nor prefixes; use backend='flex'."
    if request.mask.cross:
        return f"{name} takes no layout_k yet; use backend='flex'."
    if torch.cuda.get_device_capability(request.device) < (8, 0):
        return (
            f"{name} needs compute capability 8.0 (Ampere) or newer; use backend='flex' or 'sdpa'."
        )
    if request.batch_invariant:
        return f"{name} does not promise batch invariance; use backend='sdpa'."
    return None


class VarlenBackend:
    """torch's own flash kernel over cu_seqlens."""

    name = "varlen"

    def why_not(self, request: AttentionRequest) -> str | None:
        """As FlashAttention-2; no softcap; deterministic only as torch is as a whole."""
        if not hasattr(torch.ops.aten, "_flash_attention_forward"):
            return "varlen needs a torch built with flash attention; install a CUDA build of torch."
        reason = flash_kernel_refusal(self.name, request)
        if reason is None and request.softcap is not None:
            return "varlen has no softcap; use backend='flex' or 'fa2'."
        if (
            reason is None
            and request.deterministic
            and not torch.are_deterministic_algorithms_enabled()
        ):
            return (
                "varlen is deterministic only under torch.use_deterministic_algorithms(True); call "
                "it, or use 'fa2'."
            )
        return reason

    def plan(self, mask: DocumentMask) -> None:
        """Nothing: the kernel reads cu_seqlens."""

    def attend(
        self,
        q_THD: Tensor,
        k_THD: Tensor,
        v_THD: Tensor,
        mask: DocumentMask,
        plan: None,
        options: AttentionOptions,
    ) -> tuple[Tensor, Tensor | None]:
        """One call for all documents."""
        return cu_seqlens_op.attend(self.name, q_THD, k_THD, v_THD, mask, options)


class _VarlenKernel:
    def forward(
        self, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, cu_seqlens: Tensor, settings: Settings
    ) -> tuple[Tensor, Tensor]:
        out_THD, lse_HT, *_ = torch.ops.aten._flash_attention_forward(
            q_THD,
            k_THD,
            v_THD,
            cu_seqlens,
            cu_seqlens,
            settings.max_seqlen,
            settings.max_seqlen,
            0.0,
            settings.right == 0 and settings.left == UNLIMITED,
            False,
            scale=settings.scale,
            window_size_left=settings.left,
            window_size_right=settings.right,
        )
        return out_THD, lse_HT

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
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            grad_THD,
            q_THD,
            k_THD,
            v_THD,
            out_THD,
            lse_HT,
            cu_seqlens,
            cu_seqlens,
            settings.max_seqlen,
            settings.max_seqlen,
            0.0,
            settings.right == 0 and settings.left == UNLIMITED,
            torch.zeros(
                2, dtype=torch.uint64, device=q_THD.device
            ),  # dropout's random state, of which there is none
            torch.empty(0, device=q_THD.device),
            scale=settings.scale,
            window_size_left=settings.left,
            window_size_right=settings.right,
        )
        return dq, dk, dv


cu_seqlens_op.KERNELS["varlen"] = _VarlenKernel()
BACKEND = VarlenBackend()
