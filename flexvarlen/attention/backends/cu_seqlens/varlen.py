"""`varlen`: torch's variable-length flash kernel, which `varlen_attn` uses.

The ATen operator is called directly to be sure which kernel runs: `varlen_attn` in torch 2.14 and
later may choose cuDNN on Hopper. `torch.nn.attention.activate_flash_attention_impl`
changes the kernel behind the operator; `flexvarlen.measure.machine` records which it is.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from flexvarlen.attention.backends.cu_seqlens.backend import CuSeqlensBackend
from flexvarlen.attention.backends.cu_seqlens.kernel import CallBoundaries, one_split
from flexvarlen.attention.backends.limits import fa3_order_refusal, fa4_gradient_refusal
from flexvarlen.attention.call import AttentionCall
from flexvarlen.env import flash_attention_impl

SWITCH = "torch.use_deterministic_algorithms(True)"


class VarlenBackend(CuSeqlensBackend):
    """torch's built-in flash kernel over cu_seqlens."""

    name = "varlen"
    has_softcap = False

    def why_missing(self, device: torch.device) -> str | None:
        """Require a torch built with flash attention."""
        if not hasattr(torch.ops.aten, "_flash_attention_forward"):
            return "varlen needs a torch built with flash attention; install a CUDA build of torch."
        return None

    def why_unsupported(self, call: AttentionCall) -> str | None:
        """Require torch's global setting to order the backward; apply the limits of FA3 and FA4."""
        if not call.needs_grad:
            return None
        if call.past_int32:
            return (
                "varlen gives wrong gradients for queries of 2**31 elements or more (tokens x "
                "heads x head_dim); pack shorter rows, or use backend='fa3', 'fa2' or 'flex'."
            )
        limits = {"FA3": fa3_order_refusal, "FA4": fa4_gradient_refusal}
        limit = limits.get(flash_attention_impl() or "")
        refusal = None if limit is None else limit(self.name, call)
        if refusal is not None:
            return refusal
        if call.ordered_backward and not torch.are_deterministic_algorithms_enabled():
            return (
                f"varlen's backward is deterministic only under {SWITCH}; call it, do without "
                "gradients, or use backend='fa3', 'fa2' or 'flex'."
            )
        return None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, boundaries: CallBoundaries, call: AttentionCall
    ) -> tuple[Tensor, Tensor]:
        """As `CuSeqlensKernel`."""
        out_THD, lse_HT, *_ = torch.ops.aten._flash_attention_forward.default(
            q,
            k,
            v,
            *boundaries,
            0.0,
            _is_plainly_causal(call),
            False,
            scale=call.scale,
            window_size_left=call.spec.left,
            window_size_right=call.spec.right,
            **(_num_splits() if call.batch_invariant else {}),
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
        if call.ordered_backward and not torch.are_deterministic_algorithms_enabled():
            raise RuntimeError(
                f"varlen was asked for a deterministic backward, but {SWITCH} no longer holds; "
                "keep it on until the backward has run."
            )
        if call.batch_invariant:
            boundaries = one_split(boundaries, call.num_heads)
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)  # dropout's RNG state
        dq, dk, dv = torch.ops.aten._flash_attention_backward.default(
            *(grad, q, k, v, out, lse),
            *boundaries,
            0.0,
            _is_plainly_causal(call),
            no_dropout,
            torch.empty(0, device=q.device),
            scale=call.scale,
            window_size_left=call.spec.left,
            window_size_right=call.spec.right,
        )
        return dq, dk, dv


def _is_plainly_causal(call: AttentionCall) -> bool:
    return call.spec.causal and call.spec.left < 0


@cache
def _num_splits() -> dict[str, Any]:
    """Return `num_splits=1` if torch supports it, so that the sum over keys is batch invariant."""
    schema = torch.ops.aten._flash_attention_forward.default._schema
    return {"num_splits": 1} if any(a.name == "num_splits" for a in schema.arguments) else {}


BACKEND = VarlenBackend()
