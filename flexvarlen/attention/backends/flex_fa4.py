"""`flex_fa4`: FlexAttention with `BACKEND="FLASH"`, i.e. FlashAttention-4 with a BlockMask."""

from __future__ import annotations

from functools import cache

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
        """Require FlashAttention-4; refuse LSE, determinism, and graphs that lose the mask."""
        if (missing := package_refusal(self.name, call.device)) is not None:
            return missing
        if call.graph == "inference" and not _inductor_keeps_masks():
            return (
                "flex_fa4 needs torch 2.13 in a compiled graph without gradients, as Inductor "
                "removes its mask there; use backend='flex' or 'fa4'."
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


@cache
def _inductor_keeps_masks() -> bool:
    """Whether Inductor knows that the kernel reads the mask's tensors.

    Otherwise it removes those that the same graph computes, and fails (pytorch pull request
    182002). A graph with a backward saves them for it.
    """
    from torch._inductor.kernel.flex import common

    return hasattr(common, "realize_captures_for_cutedsl")


BACKEND = FlexFlashBackend()
