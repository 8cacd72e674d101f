"""`fa2`: the flash-attn package, version 2. Optional: imported on first use."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from flexvarlen.attention.backends.cu_seqlens.backend import CuSeqlensBackend
from flexvarlen.attention.backends.cu_seqlens.kernel import (
    CallBoundaries,
    empty_gradients,
    one_split,
)
from flexvarlen.attention.backends.limits import ampere_refusal
from flexvarlen.attention.call import AttentionCall

INSTALL = "install it with: pip install flash-attn --no-build-isolation."


class FlashAttention2Backend(CuSeqlensBackend):
    """FlashAttention-2 over cu_seqlens."""

    name = "fa2"
    head_dims = (8, 256)

    def why_missing(self, device: torch.device) -> str | None:
        """Require the package and an Ampere or newer GPU."""
        # flash_attn alone is not enough: FA4 installs into the same folder.
        if find_spec("flash_attn_2_cuda") is None:
            return f"fa2 needs the package flash-attn, version 2, which is not installed; {INSTALL}"
        try:
            from flash_attn import flash_attn_interface  # noqa: F401
        except ImportError as error:
            return (
                f"fa2's package flash-attn does not import here ({error}); build it for this "
                f"torch: {INSTALL}"
            )
        return ampere_refusal(self.name, device)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, boundaries: CallBoundaries, call: AttentionCall
    ) -> tuple[Tensor, Tensor]:
        """As `CuSeqlensKernel`."""
        from flash_attn.flash_attn_interface import _flash_attn_varlen_forward

        out_THD, lse_HT, *_ = _plain(_flash_attn_varlen_forward)(
            q,
            k,
            v,
            *boundaries,
            0.0,
            call.scale,
            causal=call.spec.right == 0,
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
        from flash_attn.flash_attn_interface import _flash_attn_varlen_backward

        if call.batch_invariant:
            boundaries = one_split(boundaries, call.num_heads)
        grads = empty_gradients(q, k, v)
        _plain(_flash_attn_varlen_backward)(
            *(grad, q, k, v, out, lse),
            *grads,
            *boundaries,
            0.0,
            call.scale,
            call.spec.right == 0,
            call.spec.left,
            call.spec.right,
            call.softcap or 0.0,
            None,
            call.ordered_backward,
        )
        return grads


def _plain(function: Any) -> Any:
    """Unwrap the package's custom operator, as this code already runs inside an operator."""
    return getattr(function, "_init_fn", function)


BACKEND = FlashAttention2Backend()
