"""`fa2`: the flash-attn package, version 2. Optional: imported when it is first asked about."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from flexvarlen.attention.backends.cu_seqlens.backend import CuSeqlensBackend
from flexvarlen.attention.backends.cu_seqlens.kernel import KernelCall

INSTALL = "install it with: pip install 'flexvarlen[fa2]' --no-build-isolation."


class FlashAttention2Backend(CuSeqlensBackend):
    """FlashAttention-2 over cu_seqlens."""

    name = "fa2"
    head_dims = (8, 256)

    def why_missing(self, device: torch.device) -> str | None:
        """Needs the package and an Ampere GPU."""
        # flash_attn alone is no proof: FA4 lives in the same folder.
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


def ampere_refusal(name: str, device: torch.device) -> str | None:
    """What the FlashAttention-2 kernels, torch's and the package's, need of a GPU."""
    if torch.cuda.get_device_capability(device) < (8, 0):
        return (
            f"{name} needs compute capability 8.0 (Ampere) or newer; use backend='flex' or 'sdpa'."
        )
    return None


class _FlashAttention2Kernel:
    def forward(self, call: KernelCall) -> tuple[Tensor, Tensor]:
        from flash_attn.flash_attn_interface import _flash_attn_varlen_forward

        out_THD, lse_HT, *_ = _plain(_flash_attn_varlen_forward)(
            call.q_THD,
            call.k_THD,
            call.v_THD,
            call.cu_seqlens_q,
            call.cu_seqlens_k,
            call.max_seqlen_q,
            call.max_seqlen_k,
            0.0,
            call.scale,
            causal=call.causal,
            window_size_left=call.left,
            window_size_right=call.right,
            softcap=call.softcap,
        )
        return out_THD, lse_HT

    def backward(
        self, call: KernelCall, grad_THD: Tensor, out_THD: Tensor, lse_HT: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        from flash_attn.flash_attn_interface import _flash_attn_varlen_backward

        if call.batch_invariant:
            call = one_split(call)
        dq, dk, dv = call.empty_gradients()
        _plain(_flash_attn_varlen_backward)(
            grad_THD,
            call.q_THD,
            call.k_THD,
            call.v_THD,
            out_THD,
            lse_HT,
            dq,
            dk,
            dv,
            call.cu_seqlens_q,
            call.cu_seqlens_k,
            call.max_seqlen_q,
            call.max_seqlen_k,
            0.0,
            call.scale,
            call.causal,
            call.left,
            call.right,
            call.softcap,
            None,
            call.deterministic,
        )
        return dq, dk, dv


def _plain(function: Any) -> Any:
    """The function that the package registers as an operator: here it runs inside one already."""
    return getattr(function, "_init_fn", function)


def one_split(call: KernelCall) -> KernelCall:
    """The call with so many empty documents behind that dq is summed in one order always.

    FlashAttention-2's deterministic backward splits the sum over keys into
    ceil(processors / (documents x heads)) parts: one, if there are enough documents.
    """
    processors = torch.cuda.get_device_properties(call.q_THD.device).multi_processor_count
    slots = -(-processors // call.q_THD.shape[1])
    longer_q, longer_k = (
        torch.cat([cu, cu[-1:].expand(max(0, slots + 1 - cu.shape[0]))])
        for cu in (call.cu_seqlens_q, call.cu_seqlens_k)
    )
    return call._replace(cu_seqlens_q=longer_q, cu_seqlens_k=longer_k)


def installed_version() -> str | None:
    """The installed version of flash-attn, or None."""
    try:
        return version("flash-attn")
    except PackageNotFoundError:
        return None


BACKEND = FlashAttention2Backend(_FlashAttention2Kernel())
