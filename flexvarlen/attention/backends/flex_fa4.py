"""`flex_fa4`: FlexAttention with `BACKEND="FLASH"`, i.e. FlashAttention-4 with a BlockMask."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexvarlen.attention.backends.compiled_flex import flex
from flexvarlen.attention.backends.fa4_package import package_refusal
from flexvarlen.attention.call import AttentionCall
from flexvarlen.mask.block_mask import block_mask_of
from flexvarlen.mask.document_mask import DocumentMask


class FlexFlashBackend:
    """FlexAttention on FlashAttention-4's kernels."""

    name = "flex_fa4"

    def why_not(self, call: AttentionCall) -> str | None:
        """Require FlashAttention-4; refuse LSE, determinism and the user's compiled graphs."""
        if (missing := package_refusal(self.name, call.device)) is not None:
            return missing
        if call.compiled:
            return (
                "flex_fa4 runs in eager mode only, because Inductor fails to compile its mask into "
                "larger graphs (torch 2.11); use backend='flex' or 'fa4'."
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
