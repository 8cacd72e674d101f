"""`flex`: FlexAttention's Triton kernels (C++ on the CPU) with a document BlockMask.

The BlockMask is built once per forward.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexvarlen.attention.backends.block_alignment import AlignedRow, align
from flexvarlen.attention.backends.compiled_flex import flex
from flexvarlen.attention.backends.sinks import share_without_sink
from flexvarlen.attention.call import AttentionCall
from flexvarlen.mask.block_mask import block_mask_of
from flexvarlen.mask.document_mask import DocumentMask


class FlexBackend:
    """FlexAttention with the mask expressed as `lo[q] <= kv < hi[q]`."""

    name = "flex"

    def why_not(self, call: AttentionCall) -> str | None:
        """Refuse an LSE on the CPU, and batch invariance where it does not hold."""
        if call.device.type == "cpu" and (call.sinks or call.return_lse):
            return "flex returns no LSE on the CPU; use backend='reference' there."
        spec = call.spec
        if call.batch_invariant and (spec.prefix or spec.runs or spec.cross):
            return (
                "flex does not support prefixes, runs or layout_k with batch_invariant; use "
                "backend='fa3' for layout_k, or, without gradients or softcap, 'sdpa'."
            )
        if call.batch_invariant and spec.tree:
            return "flex is not batch invariant with trees; pack each path as a document."
        if call.batch_invariant and call.needs_grad:
            return (
                "flex is batch invariant only in its outputs: in its backward, Inductor compiles "
                "a kernel that sums grad * out for each shape, so the order of summation changes; "
                "use backend='fa3' or 'fa2', in half precision, or torch.no_grad()."
            )
        return None

    def plan(self, mask: DocumentMask, *, batch_invariant: bool = False) -> BlockMask | AlignedRow:
        """Return the document BlockMask or, if batch invariant, the aligned row and its mask."""
        return align(mask) if batch_invariant else block_mask_of(mask)

    def attend(
        self,
        q_THD: Tensor,
        k_THD: Tensor,
        v_THD: Tensor,
        sinks_H: Tensor | None,
        call: AttentionCall,
        mask: DocumentMask,
        plan: BlockMask | AlignedRow,
    ) -> tuple[Tensor, Tensor | None]:
        """Call FlexAttention once for all documents and heads; K and V are not repeated for GQA."""
        if call.batch_invariant is isinstance(plan, BlockMask):
            raise ValueError(
                "plan must be made with the same batch_invariant as the call, got a plan with "
                f"batch_invariant={not call.batch_invariant}; remove plan=."
            )
        if isinstance(plan, BlockMask):
            return self._attend(q_THD, k_THD, v_THD, sinks_H, call, mask, plan)
        q_AHD, k_AHD, v_AHD = plan.enter(q_THD), plan.enter(k_THD), plan.enter(v_THD)
        out_AHD, lse_HA = self._attend(
            q_AHD, k_AHD, v_AHD, sinks_H, call, plan.mask, plan.block_mask
        )
        if lse_HA is None:
            return plan.leave(out_AHD), None
        lse_HT = plan.leave(lse_HA.T[..., None])[..., 0].T
        nowhere_T = plan.target_T >= lse_HA.shape[1]
        return plan.leave(out_AHD), torch.where(nowhere_T, float("-inf"), lse_HT)

    def _attend(
        self,
        q_THD: Tensor,
        k_THD: Tensor,
        v_THD: Tensor,
        sinks_H: Tensor | None,
        call: AttentionCall,
        mask: DocumentMask,
        block_mask: BlockMask,
    ) -> tuple[Tensor, Tensor | None]:
        with_lse = call.return_lse or sinks_H is not None
        out_THD, lse_HT = flex(
            q_THD, k_THD, v_THD, call, mask, block_mask, "TRITON", with_lse=with_lse
        )
        if sinks_H is not None and lse_HT is not None:
            out_THD = (out_THD * share_without_sink(lse_HT, sinks_H)).to(q_THD.dtype)
        return out_THD, lse_HT if call.return_lse else None


BACKEND = FlexBackend()
