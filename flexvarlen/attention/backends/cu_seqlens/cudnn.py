"""`cudnn`: cuDNN's variable-length kernel as included in torch, forward only."""

from __future__ import annotations

import torch
from torch import Tensor

from flexvarlen.attention.backends.cu_seqlens.backend import CuSeqlensBackend
from flexvarlen.attention.backends.cu_seqlens.kernel import CallBoundaries
from flexvarlen.attention.call import AttentionCall


class CudnnBackend(CuSeqlensBackend):
    """cuDNN's kernel over cu_seqlens, as included in torch."""

    name = "cudnn"
    launches_own_sizes = False  # cuDNN builds and caches a plan for each size
    has_windows = False
    has_softcap = False

    def why_missing(self, device: torch.device) -> str | None:
        """Require a CUDA build of torch with cuDNN."""
        if not torch.backends.cudnn.is_available() or not hasattr(
            torch.ops.aten, "_cudnn_attention_forward"
        ):
            return "cudnn needs a torch built with cuDNN; install a CUDA build of torch."
        return None

    def why_unsupported(self, call: AttentionCall) -> str | None:
        """Refuse layout_k, chunks, very large rows and batch invariance."""
        if call.past_int32:
            return (
                "cudnn gives wrong outputs for queries of 2**31 elements or more (tokens x heads x "
                "head_dim); pack shorter rows, or use backend='fa3', 'fa2' or 'flex'."
            )
        if call.spec.cross or call.spec.chunk or call.spec.tree:
            return "cudnn has no trees, layout_k or chunks; use backend='varlen' or 'flex'."
        if call.batch_invariant:
            return "cudnn does not guarantee batch invariance; use backend='varlen' or 'fa3'."
        return None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, boundaries: CallBoundaries, call: AttentionCall
    ) -> tuple[Tensor, Tensor]:
        """As `CuSeqlensKernel`."""
        out_THD, lse_TH1, *_ = torch.ops.aten._cudnn_attention_forward.default(
            q,
            k,
            v,
            None,
            *boundaries,
            True,
            0.0,
            call.spec.causal,
            False,
            scale=call.scale,
        )
        return out_THD, lse_TH1[..., 0].T

    def backward(self, *args: object) -> tuple[Tensor, Tensor, Tensor]:
        """Raise; `why_not` refuses calls that need gradients."""
        raise NotImplementedError("cudnn is forward only; use backend='varlen'.")


BACKEND = CudnnBackend()
