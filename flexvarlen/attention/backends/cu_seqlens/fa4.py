"""`fa4`: FlashAttention-4, from the package flash-attn-4 or the Hub; imported on first use."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from flexvarlen.attention.backends.cu_seqlens import hub
from flexvarlen.attention.backends.cu_seqlens.flash_attention import FlashAttentionBackend
from flexvarlen.attention.backends.cu_seqlens.kernel import CallBoundaries
from flexvarlen.attention.backends.fa4_package import INTERFACE, importing, package_problem
from flexvarlen.attention.backends.machines import machine_of
from flexvarlen.attention.call import AttentionCall


class FlashAttention4Backend(FlashAttentionBackend):
    """FlashAttention-4 over cu_seqlens."""

    name = "fa4"
    package = "flash_attn.cute, FlashAttention-4"
    install = "pip install 'flash-attn-4>=4.0.0b36'."
    hub_path = "interface"
    functions = ("_flash_attn_fwd", "_flash_attn_bwd")

    def installed(self, device: torch.device) -> Any:
        """Return `flash_attn.cute.interface`, or why it cannot be used."""
        problem = package_problem(device)
        return import_module(INTERFACE) if problem is None else f"flash_attn.cute: {problem}"

    def from_hub(self, device: torch.device) -> hub.HubKernel | hub.NotLoaded:
        """Return the Hub's kernel that is on disk; it caches compiled kernels, as FA4 does."""
        with importing(device):
            return hub.on_disk(self.name)

    def why_unsupported(self, call: AttentionCall) -> str | None:
        """Refuse batch invariance where the kernel is chosen by the number of documents."""
        if call.batch_invariant and call.head_dim == 256 and machine_of(call.device).major != 9:
            return (
                "fa4 chooses kernels by the number of documents for head_dim 256 on Blackwell, and "
                "is not batch invariant there; use backend='fa2'."
            )
        return None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, boundaries: CallBoundaries, call: AttentionCall
    ) -> tuple[Tensor, Tensor]:
        """As `CuSeqlensKernel`."""
        out_THD, lse_HT, *_ = self.kernel(q.device).forward(
            q,
            k,
            v,
            **boundaries._asdict(),
            softmax_scale=call.scale,
            causal=call.spec.causal,
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
        dq, dk, dv = self.kernel(q.device).backward(
            *(q, k, v, out, grad, lse),
            call.scale,
            call.spec.causal,
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
