"""`fa2`: FlashAttention-2, from the package flash-attn or the Hub; imported on first use."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from flexvarlen.attention.backends.cu_seqlens.flash_attention import FlashAttentionBackend
from flexvarlen.attention.backends.cu_seqlens.kernel import (
    CallBoundaries,
    empty_gradients,
    one_split,
)
from flexvarlen.attention.call import AttentionCall


class FlashAttention2Backend(FlashAttentionBackend):
    """FlashAttention-2 over cu_seqlens."""

    name = "fa2"
    package = "the package flash-attn, version 2"
    install = "pip install flash-attn --no-build-isolation."
    hub_path = "flash_attn_interface"
    functions = ("_flash_attn_varlen_forward", "_flash_attn_varlen_backward")

    def installed(self, device: torch.device) -> Any:
        """Return `flash_attn.flash_attn_interface`, or why it cannot be imported."""
        # flash_attn alone is not enough: FA4 installs into the same folder.
        if find_spec("flash_attn_2_cuda") is None:
            return "flash-attn is not installed"
        try:
            from flash_attn import flash_attn_interface
        except ImportError as error:
            return f"flash-attn cannot be imported here ({error}), as it is built for another torch"
        return flash_attn_interface

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, boundaries: CallBoundaries, call: AttentionCall
    ) -> tuple[Tensor, Tensor]:
        """As `CuSeqlensKernel`."""
        out_THD, lse_HT, *_ = self.kernel(q.device).forward(
            q,
            k,
            v,
            *boundaries,
            0.0,
            call.scale,
            causal=call.spec.causal,
            window_size_left=call.spec.left,
            window_size_right=call.spec.right,
            softcap=call.softcap or 0.0,
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
        if call.batch_invariant:
            boundaries = one_split(boundaries, call.num_heads)
        grads = empty_gradients(q, k, v)
        self.kernel(q.device).backward(
            *(grad, q, k, v, out, lse),
            *grads,
            *boundaries,
            0.0,
            call.scale,
            call.spec.causal,
            call.spec.left,
            call.spec.right,
            call.softcap or 0.0,
            None,
            call.ordered_backward,
        )
        return grads


BACKEND = FlashAttention2Backend()
