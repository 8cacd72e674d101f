"""`fa3`: FlashAttention-3, from an installed package or the Hub; imported on first use.

Importing either registers operators, in `torch.ops.flash_attn_3` or in the Hub's module. We call
them by keyword, because the arguments of the Python functions change between releases.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from flexvarlen.attention.backends.cu_seqlens.flash_attention import FlashAttentionBackend
from flexvarlen.attention.backends.cu_seqlens.kernel import CallBoundaries, empty_gradients
from flexvarlen.attention.backends.limits import fa3_order_refusal
from flexvarlen.attention.call import AttentionCall


class FlashAttention3Backend(FlashAttentionBackend):
    """FlashAttention-3 over cu_seqlens."""

    name = "fa3"
    package = "flash_attn_interface, FlashAttention-3"
    install = "build it from the folder hopper of github.com/Dao-AILab/flash-attention."
    hub_path = "_ops.ops"
    functions = ("fwd", "bwd")

    def installed(self, device: torch.device) -> Any:
        """Return `torch.ops.flash_attn_3`, or why it cannot be registered."""
        if find_spec("flash_attn_interface") is None:
            return "flash_attn_interface is not installed"
        try:
            import flash_attn_interface  # noqa: F401
        except ImportError as error:
            return f"flash_attn_interface cannot be imported ({error})"
        if not hasattr(torch.ops.flash_attn_3, "fwd"):
            return "flash_attn_interface is too old to register torch.ops.flash_attn_3"
        return torch.ops.flash_attn_3

    def why_unsupported(self, call: AttentionCall) -> str | None:
        """Refuse softcap if the build lacks it, and ordered backward for head_dim above 192."""
        if call.softcap is not None:
            if call.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                return "fa3 cannot test for softcap during CUDA graph capture; call it once before."
            if not _built_with_softcap(call.device):
                return (
                    "fa3 is built without softcap here; build it without "
                    "FLASH_ATTENTION_DISABLE_SOFTCAP, or use backend='fa4' or 'flex'."
                )
        return fa3_order_refusal(self.name, call)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, boundaries: CallBoundaries, call: AttentionCall
    ) -> tuple[Tensor, Tensor]:
        """As `CuSeqlensKernel`."""
        out_THD, lse_HT, *_ = self.kernel(q.device).forward(
            _rows(q),
            _rows(k),
            _rows(v),
            **_keywords(boundaries, call),
            num_splits=1,  # more splits are for decoding, and break batch invariance
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
        grads = empty_gradients(q, k, v)
        self.kernel(q.device).backward(
            *(grad, _rows(q), _rows(k), _rows(v), out, lse),
            *grads,
            **_keywords(boundaries, call),
            deterministic=call.ordered_backward,
        )
        return grads


def _keywords(boundaries: CallBoundaries, call: AttentionCall) -> dict[str, Any]:
    """Return the keyword arguments common to the forward and backward operators."""
    return {
        "cu_seqlens_q": boundaries.cu_seqlens_q,
        "cu_seqlens_k": boundaries.cu_seqlens_k,
        "max_seqlen_q": boundaries.max_seqlen_q,
        "max_seqlen_k": boundaries.max_seqlen_k,
        "softmax_scale": call.scale,
        "is_causal": call.spec.causal,
        "window_size_left": call.spec.left,
        "window_size_right": call.spec.right,
        "softcap": call.softcap or 0.0,
    }


def _rows(x_THD: Tensor) -> Tensor:
    """Return `x` with a contiguous last dimension, as the kernels require."""
    return x_THD if x_THD.stride(-1) == 1 else x_THD.contiguous()


@cache
def _built_with_softcap(device: torch.device) -> bool:
    """Return whether the build has softcap; only calling the kernel can tell."""
    q = torch.zeros(1, 1, 64, dtype=torch.bfloat16, device=device)
    cu_seqlens = torch.tensor([0, 1], dtype=torch.int32, device=device)
    call = AttentionCall(device, q.dtype, 1, 1, 64, softcap=1.0)
    try:
        BACKEND.forward(q, q, q, CallBoundaries(cu_seqlens, cu_seqlens, 2, 2), call)
    except RuntimeError as error:
        if "softcap" not in str(error):
            raise
        return False
    return True


BACKEND = FlashAttention3Backend()
