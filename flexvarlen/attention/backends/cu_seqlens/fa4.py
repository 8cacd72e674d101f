"""`fa4`: FlashAttention-4, `flash_attn.cute`. Optional: imported on first use."""

from __future__ import annotations

import torch
from torch import Tensor

from flexvarlen.attention.backends.cu_seqlens.backend import CuSeqlensBackend
from flexvarlen.attention.backends.cu_seqlens.kernel import CallBoundaries
from flexvarlen.attention.backends.fa4_package import is_hopper, package_refusal
from flexvarlen.attention.backends.limits import fa4_gradient_refusal
from flexvarlen.attention.call import AttentionCall


class FlashAttention4Backend(CuSeqlensBackend):
    """FlashAttention-4 over cu_seqlens."""

    name = "fa4"
    head_dims = (8, 256)

    def why_missing(self, device: torch.device) -> str | None:
        """Require the package and a Hopper or Blackwell GPU."""
        return package_refusal(self.name, device)

    def why_unsupported(self, call: AttentionCall) -> str | None:
        """Refuse head dims that the GPU does not support; gradients need a multiple of 32."""
        fits_blackwell = call.head_dim <= 128 or call.head_dim == 256
        if not fits_blackwell and not is_hopper(call.device):
            return (
                "fa4 needs head_dim of at most 128, or 256, on Blackwell, got "
                f"{call.head_dim}; use backend='flex'."
            )
        if call.batch_invariant and call.head_dim == 256 and not is_hopper(call.device):
            return (
                "fa4 chooses kernels by the number of documents for head_dim 256 on Blackwell, and "
                "is not batch invariant there; use backend='fa2'."
            )
        return fa4_gradient_refusal(self.name, call)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, boundaries: CallBoundaries, call: AttentionCall
    ) -> tuple[Tensor, Tensor]:
        """As `CuSeqlensKernel`."""
        from flash_attn.cute.interface import _flash_attn_fwd

        out_THD, lse_HT, *_ = _flash_attn_fwd(
            q,
            k,
            v,
            **boundaries._asdict(),
            softmax_scale=call.scale,
            causal=call.spec.right == 0,
            softcap=call.softcap,
            window_size_left=_side(call.spec.left),
            window_size_right=_side(call.spec.right),
            num_splits=1,  # more splits are for decoding, and break batch invariance
            return_lse=True,
        )
        return out_THD, lse_HT

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
        from flash_attn.cute.interface import _flash_attn_bwd

        dq, dk, dv = _flash_attn_bwd(
            *(q, k, v, out, grad, lse),
            call.scale,
            call.spec.right == 0,
            call.softcap or 0.0,
            window_size_left=_side(call.spec.left),
            window_size_right=_side(call.spec.right),
            **boundaries._asdict(),
            deterministic=call.ordered_backward,
        )
        return dq, dk, dv


def _side(keys: int) -> int | None:
    """Convert one side of a window to FA4's convention (None for no limit)."""
    return None if keys < 0 else keys


BACKEND = FlashAttention4Backend()
