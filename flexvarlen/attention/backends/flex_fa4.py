"""`flex_fa4`: FlexAttention with `BACKEND="FLASH"`, which is FlashAttention-4 under a BlockMask."""

from __future__ import annotations

import torch

from flexvarlen.attention.backends.cu_seqlens.backend import HALF
from flexvarlen.attention.backends.cu_seqlens.fa4 import cute_refusal
from flexvarlen.attention.backends.flex import FlexBackend
from flexvarlen.attention.call import AttentionRequest

HEAD_DIMS = (32, 64, 96, 128)
"""Measured on an H200: above 128 its blocks are not ours, below 32 and between these its gradients
are wrong by their own size (see `fa4`)."""


class FlexFlashBackend(FlexBackend):
    """FlexAttention on FlashAttention-4's kernels."""

    name = "flex_fa4"
    kernel = "FLASH"

    def why_not(self, request: AttentionRequest) -> str | None:
        """As flex; needs FlashAttention-4; has no LSE, no promise and few head dimensions."""
        if request.device.type != "cuda":
            return f"flex_fa4 needs a CUDA GPU, got {request.device.type}; use backend='sdpa'."
        missing = cute_refusal(self.name, request.device)
        if missing is not None:
            return missing
        if request.dtype not in HALF:
            return (
                f"flex_fa4 needs bfloat16 or float16, got {request.dtype}; convert the model or "
                "use backend='flex'."
            )
        if request.head_dim not in HEAD_DIMS:
            return (
                f"flex_fa4 needs head_dim one of {', '.join(map(str, HEAD_DIMS))}, got "
                f"{request.head_dim}; use backend='flex'."
            )
        if request.sinks or request.return_lse:
            return (
                "flex_fa4 has no LSE to rely on, and so no sinks (torch 2.11 and 2.12 give it off "
                "by ln 2); use backend='flex' or 'fa4'."
            )
        if request.needs_grad and torch.are_deterministic_algorithms_enabled():
            return (
                "flex_fa4 has no backward under torch.use_deterministic_algorithms(True); use "
                "backend='fa4' or 'flex'."
            )
        if request.deterministic or request.batch_invariant:
            return (
                "flex_fa4 promises neither determinism nor batch invariance; use backend='flex' "
                "or 'fa4'."
            )
        return super().why_not(request)


BACKEND = FlexFlashBackend()
