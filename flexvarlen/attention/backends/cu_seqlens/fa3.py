"""`fa3`: FlashAttention-3, the Hopper kernels. Optional: imported when it is first asked about.

Upstream installs it as `flash_attn_interface`, whose import registers `torch.ops.flash_attn_3`: its
own Python functions change their arguments from release to release, the operators have names.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from flexvarlen.attention.backends.cu_seqlens.backend import CuSeqlensBackend
from flexvarlen.attention.backends.cu_seqlens.kernel import KernelCall
from flexvarlen.attention.call import AttentionRequest

INSTALL = "build it from the folder hopper of github.com/Dao-AILab/flash-attention."
_WIDEST_ORDERED_HEAD_DIM = 192  # above it the kernel refuses an ordered backward


class FlashAttention3Backend(CuSeqlensBackend):
    """FlashAttention-3 over cu_seqlens."""

    name = "fa3"
    head_dims = (8, 256)

    def why_missing(self, device: torch.device) -> str | None:
        """Needs the package and a Hopper GPU."""
        if find_spec("flash_attn_interface") is None:
            return f"fa3 needs flash_attn_interface, FlashAttention-3, not installed; {INSTALL}"
        try:
            import flash_attn_interface  # noqa: F401
        except ImportError as error:
            return f"fa3's package does not import here ({error}); for this torch, {INSTALL}"
        if not hasattr(torch.ops.flash_attn_3, "fwd"):
            return f"fa3's package is too old to register torch.ops.flash_attn_3; {INSTALL}"
        if torch.cuda.get_device_capability(device)[0] != 9:
            return "fa3 needs a Hopper GPU (compute capability 9.0); use backend='fa2' or 'flex'."
        return None

    def why_not_this(self, request: AttentionRequest) -> str | None:
        """Softcap is left out of some builds; no ordered backward for the widest heads."""
        if request.softcap is not None and torch.cuda.is_current_stream_capturing():
            return "fa3 cannot be asked about softcap in a CUDA graph; make one such call before."
        if request.softcap is not None and not _built_with_softcap(request.device):
            return (
                "fa3 is built without softcap here; build it without "
                "FLASH_ATTENTION_DISABLE_SOFTCAP, or use backend='fa4' or 'flex'."
            )
        ordered = request.deterministic or request.batch_invariant
        return order_refusal(self.name, request) if ordered and request.needs_grad else None


def order_refusal(name: str, request: AttentionRequest) -> str | None:
    """Where FlashAttention-3 has no backward that sums in one order."""
    if request.head_dim > _WIDEST_ORDERED_HEAD_DIM:
        return (
            f"{name} has no deterministic backward for head_dim above {_WIDEST_ORDERED_HEAD_DIM}, "
            f"got {request.head_dim}; use backend='fa2'."
        )
    return None


@cache
def _built_with_softcap(device: torch.device) -> bool:
    """Ask the kernel, once: a build does not tell."""
    q_THD = torch.zeros(1, 1, 64, dtype=torch.bfloat16, device=device)
    cu_seqlens = torch.tensor([0, 1], dtype=torch.int32, device=device)
    qkv, cu_seqlens_qk = (q_THD, q_THD, q_THD), (cu_seqlens, cu_seqlens)
    call = KernelCall(*qkv, *cu_seqlens_qk, 2, 2, -1, 0, 1.0, 1.0, False, False)
    try:
        _KERNEL.forward(call)
    except RuntimeError as error:
        if "softcap" not in str(error):
            raise
        return False
    return True


class _FlashAttention3Kernel:
    def forward(self, call: KernelCall) -> tuple[Tensor, Tensor]:
        out_THD, lse_HT, *_ = _operators()[0](
            _rows(call.q_THD),
            _rows(call.k_THD),
            _rows(call.v_THD),
            **_keywords(call),
            num_splits=1,  # more are for decoding, and would depend on the batch
        )
        return out_THD, lse_HT

    def backward(
        self, call: KernelCall, grad_THD: Tensor, out_THD: Tensor, lse_HT: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = call.empty_gradients()
        _operators()[1](
            grad_THD,
            _rows(call.q_THD),
            _rows(call.k_THD),
            _rows(call.v_THD),
            out_THD,
            lse_HT,
            dq,
            dk,
            dv,
            **_keywords(call),
            deterministic=call.deterministic,
        )
        return dq, dk, dv


@cache
def _operators() -> tuple[Any, Any]:
    """Forward and backward, which the package's import registers."""
    import flash_attn_interface  # noqa: F401

    return torch.ops.flash_attn_3.fwd.default, torch.ops.flash_attn_3.bwd.default


def _keywords(call: KernelCall) -> dict[str, Any]:
    """What forward and backward are told alike, as their operators name it."""
    return {
        "cu_seqlens_q": call.cu_seqlens_q,
        "cu_seqlens_k": call.cu_seqlens_k,
        "max_seqlen_q": call.max_seqlen_q,
        "max_seqlen_k": call.max_seqlen_k,
        "softmax_scale": call.scale,
        "is_causal": call.causal,
        "window_size_left": call.left,
        "window_size_right": call.right,
        "softcap": call.softcap,
    }


def _rows(x_THD: Tensor) -> Tensor:
    """`x` with its head_dim in one piece, as the kernels want it."""
    return x_THD if x_THD.stride(-1) == 1 else x_THD.contiguous()


_KERNEL = _FlashAttention3Kernel()
BACKEND = FlashAttention3Backend(_KERNEL)
