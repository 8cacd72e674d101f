"""`fa3`: FlashAttention-3, the Hopper kernels. Optional: imported on first use.

Importing its package, `flash_attn_interface`, registers `torch.ops.flash_attn_3`. We call these
operators by keyword, because the arguments of its Python functions change between releases.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from flexvarlen.attention.backends.cu_seqlens.backend import CuSeqlensBackend
from flexvarlen.attention.backends.cu_seqlens.kernel import CallBoundaries, empty_gradients
from flexvarlen.attention.backends.limits import fa3_order_refusal
from flexvarlen.attention.call import AttentionCall

INSTALL = "build it from the folder hopper of github.com/Dao-AILab/flash-attention."


class FlashAttention3Backend(CuSeqlensBackend):
    """FlashAttention-3 over cu_seqlens."""

    name = "fa3"
    head_dims = (8, 256)

    def why_missing(self, device: torch.device) -> str | None:
        """Require the package and a Hopper GPU."""
        if find_spec("flash_attn_interface") is None:
            return f"fa3 needs flash_attn_interface, FlashAttention-3, not installed; {INSTALL}"
        try:
            import flash_attn_interface  # noqa: F401
        except ImportError as error:
            return f"fa3's package cannot be imported ({error}); for this torch, {INSTALL}"
        if not hasattr(torch.ops.flash_attn_3, "fwd"):
            return f"fa3's package is too old to register torch.ops.flash_attn_3; {INSTALL}"
        if torch.cuda.get_device_capability(device)[0] != 9:
            return "fa3 needs a Hopper GPU (compute capability 9.0); use backend='fa2' or 'flex'."
        return None

    def why_unsupported(self, call: AttentionCall) -> str | None:
        """Refuse softcap if the build lacks it, and ordered backward for head_dim above 192."""
        if call.softcap is not None and torch.cuda.is_current_stream_capturing():
            return "fa3 cannot test for softcap during CUDA graph capture; call it once before."
        if call.softcap is not None and not _built_with_softcap(call.device):
            return (
                "fa3 is built without softcap here; build it without "
                "FLASH_ATTENTION_DISABLE_SOFTCAP, or use backend='fa4' or 'flex'."
            )
        return fa3_order_refusal(self.name, call)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, boundaries: CallBoundaries, call: AttentionCall
    ) -> tuple[Tensor, Tensor]:
        """As `CuSeqlensKernel`."""
        out_THD, lse_HT, *_ = _operators()[0](
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
        _operators()[1](
            *(grad, _rows(q), _rows(k), _rows(v), out, lse),
            *grads,
            **_keywords(boundaries, call),
            deterministic=call.ordered_backward,
        )
        return grads


@cache
def _operators() -> tuple[Any, Any]:
    """Return the forward and backward operators, which importing the package registers."""
    import flash_attn_interface  # noqa: F401

    return torch.ops.flash_attn_3.fwd.default, torch.ops.flash_attn_3.bwd.default


def _keywords(boundaries: CallBoundaries, call: AttentionCall) -> dict[str, Any]:
    """Return the keyword arguments common to the forward and backward operators."""
    return {
        "cu_seqlens_q": boundaries.cu_seqlens_q,
        "cu_seqlens_k": boundaries.cu_seqlens_k,
        "max_seqlen_q": boundaries.max_seqlen_q,
        "max_seqlen_k": boundaries.max_seqlen_k,
        "softmax_scale": call.scale,
        "is_causal": call.spec.right == 0,
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
