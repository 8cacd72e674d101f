"""`flex_fa4`: FlexAttention with `BACKEND="FLASH"`, i.e. FlashAttention-4 with a BlockMask."""

from __future__ import annotations

import torch
from packaging.version import Version
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexvarlen.attention.backends.compiled_flex import flex
from flexvarlen.attention.backends.fa4_package import package_refusal
from flexvarlen.attention.call import AttentionCall
from flexvarlen.mask.block_mask import block_mask_of
from flexvarlen.mask.document_mask import DocumentMask

_INDUCTOR_KEEPS_MASKS = Version(torch.__version__) >= Version("2.13")
"""Before, Inductor frees mask tensors that the same graph computes before the kernel reads them,
unless the backward of this attention saves them (pytorch issue 181800)."""


class FlexFlashBackend:
    """FlexAttention on FlashAttention-4's kernels."""

    name = "flex_fa4"

    def why_not(self, call: AttentionCall) -> str | None:
        """Require FlashAttention-4; refuse LSE, determinism and graphs that lose the mask."""
        if (missing := package_refusal(self.name, call.device)) is not None:
            return missing
        if call.graph == "inference" and not _INDUCTOR_KEEPS_MASKS:
            return (
                "flex_fa4 needs torch 2.13 or later in a compiled graph without gradients, as "
                "earlier releases free its mask too early there; use backend='flex' or 'fa4'."
            )
        if call.sinks or call.return_lse:
            return (
                "flex_fa4 supports neither LSE nor sinks (its LSE is off by ln 2 in torch 2.11 and "
                "2.12); use backend='flex' or 'fa4'."
            )
        if call.needs_grad and torch.are_deterministic_algorithms_enabled():
            return (
                "flex_fa4 has no backward under torch.use_deterministic_algorithms(True); use "
                "backend='fa4' or 'flex'."
            )
        if call.ordered_backward:
            return (
                "flex_fa4 guarantees neither determinism nor batch invariance; use backend='flex' "
                "or 'fa4'."
            )
        return None

    def plan(self, mask: DocumentMask, *, batch_invariant: bool = False) -> BlockMask:
        """Return the document BlockMask."""
        return block_mask_of(mask)

    def attend(
        self,
        q_THD: Tensor,
        k_THD: Tensor,
        v_THD: Tensor,
        sinks_H: Tensor | None,
        call: AttentionCall,
        mask: DocumentMask,
        plan: BlockMask,
    ) -> tuple[Tensor, Tensor | None]:
        """Call FlexAttention once for all documents and heads."""
        return flex(q_THD, k_THD, v_THD, call, mask, plan, "FLASH", with_lse=False)


BACKEND = FlexFlashBackend()
