"""`fa2`: the flash-attn package, version 2. Optional: imported when it is first asked about."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch
from torch import Tensor

from flexvarlen.backends import cu_seqlens_op
from flexvarlen.backends.cu_seqlens_op import Settings
from flexvarlen.backends.protocol import AttentionOptions, AttentionRequest
from flexvarlen.backends.varlen import flash_kernel_refusal
from flexvarlen.mask import DocumentMask

INSTALL = "install it with: pip install 'flexvarlen[fa2]' --no-build-isolation."


class FlashAttention2Backend:
    """FlashAttention-2 over cu_seqlens."""

    name = "fa2"

    def why_not(self, request: AttentionRequest) -> str | None:
        """Needs the package; and as in `flash_kernel_refusal`."""
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
        return flash_kernel_refusal(self.name, request)

    def plan(self, mask: DocumentMask) -> None:
        """Nothing: the kernel reads cu_seqlens."""

    def attend(
        self,
        q_THD: Tensor,
        k_THD: Tensor,
        v_THD: Tensor,
        mask: DocumentMask,
        plan: None,
        options: AttentionOptions,
    ) -> tuple[Tensor, Tensor | None]:
        """One call for all documents."""
        return cu_seqlens_op.attend(self.name, q_THD, k_THD, v_THD, mask, options)


class _FlashAttention2Kernel:
    def forward(
        self, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, cu_seqlens: Tensor, settings: Settings
    ) -> tuple[Tensor, Tensor]:
        from flash_attn.flash_attn_interface import _flash_attn_varlen_forward

        out_THD, lse_HT, *_ = _flash_attn_varlen_forward(
            q_THD,
            k_THD,
            v_THD,
            cu_seqlens,
            cu_seqlens,
            settings.max_seqlen,
            settings.max_seqlen,
            0.0,
            settings.scale,
            causal=settings.right == 0,
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
        cu_seqlens: Tensor,
        settings: Settings,
    ) -> tuple[Tensor, Tensor, Tensor]:
        from flash_attn.flash_attn_interface import _flash_attn_varlen_backward

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
            cu_seqlens,
            cu_seqlens,
            settings.max_seqlen,
            settings.max_seqlen,
            0.0,
            settings.scale,
            settings.right == 0,
            settings.left,
            settings.right,
            settings.softcap,
            None,
            settings.deterministic,
        )
        return dq, dk, dv


def installed_version() -> str | None:
    """The installed version of flash-attn, or None."""
    try:
        return version("flash-attn")
    except PackageNotFoundError:
        return None


cu_seqlens_op.KERNELS["fa2"] = _FlashAttention2Kernel()
BACKEND = FlashAttention2Backend()
