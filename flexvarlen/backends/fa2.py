"""`fa2`: the flash-attn package, version 2. Optional: imported when it is first asked about."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch
from torch import Tensor

from flexvarlen.backends.cu_seqlens_backend import CuSeqlensBackend
from flexvarlen.backends.cu_seqlens_op import Settings

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
    def forward(
        self,
        q_THD: Tensor,
        k_THD: Tensor,
        v_THD: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        settings: Settings,
    ) -> tuple[Tensor, Tensor]:
        from flash_attn.flash_attn_interface import _flash_attn_varlen_forward

        out_THD, lse_HT, *_ = _flash_attn_varlen_forward(
            q_THD,
            k_THD,
            v_THD,
            cu_seqlens_q,
            cu_seqlens_k,
            settings.max_seqlen_q,
            settings.max_seqlen_k,
            0.0,
            settings.scale,
            causal=settings.causal,
            window_size_left=settings.left,
            window_size_right=settings.right,
            softcap=settings.softcap,
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
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        settings: Settings,
    ) -> tuple[Tensor, Tensor, Tensor]:
        from flash_attn.flash_attn_interface import _flash_attn_varlen_backward

        if settings.batch_invariant:
            cu_seqlens_q, cu_seqlens_k = one_split(q_THD, cu_seqlens_q, cu_seqlens_k)
        dq, dk, dv = (
            torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q_THD, k_THD, v_THD)
        )
        _flash_attn_varlen_backward(
            grad_THD,
            q_THD,
            k_THD,
            v_THD,
            out_THD,
            lse_HT,
            dq,
            dk,
            dv,
            cu_seqlens_q,
            cu_seqlens_k,
            settings.max_seqlen_q,
            settings.max_seqlen_k,
            0.0,
            settings.scale,
            settings.causal,
            settings.left,
            settings.right,
            settings.softcap,
            None,
            settings.deterministic,
        )
        return dq, dk, dv


def one_split(q_THD: Tensor, *cu_seqlens: Tensor) -> tuple[Tensor, ...]:
    """The boundaries with so many empty documents behind that dq is summed in one order always.

    FlashAttention-2's deterministic backward splits the sum over keys into
    ceil(processors / (documents x heads)) parts: one, if there are enough documents.
    """
    processors = torch.cuda.get_device_properties(q_THD.device).multi_processor_count
    slots = -(-processors // q_THD.shape[1])
    return tuple(
        torch.cat([cu, cu[-1:].expand(max(0, slots + 1 - cu.shape[0]))]) for cu in cu_seqlens
    )


def installed_version() -> str | None:
    """The installed version of flash-attn, or None."""
    try:
        return version("flash-attn")
    except PackageNotFoundError:
        return None


BACKEND = FlashAttention2Backend(_FlashAttention2Kernel())
