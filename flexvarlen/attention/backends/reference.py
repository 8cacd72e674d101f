"""`reference`: dense attention in plain torch, with T x Tk scores, in any floating-point dtype.

Masked keys are multiplied by 0, so a NaN or an infinity of one document reaches others.
Half-precision inputs are computed in fp32 and rounded at the end, as fp16 scores could overflow.
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

from flexvarlen.attention.call import AttentionCall
from flexvarlen.mask.document_mask import DocumentMask


class ReferenceBackend:
    """Dense attention. Needs memory for H·T·Tk scores."""

    name = "reference"

    def why_not(self, call: AttentionCall) -> str | None:
        """Refuse only batch invariance, as the summation order in a matmul depends on T."""
        if call.batch_invariant:
            return (
                "reference is not batch invariant: its matrix products depend on T; use "
                "backend='sdpa'."
            )
        return None

    def plan(self, mask: DocumentMask, *, batch_invariant: bool = False) -> Tensor:
        """Return the dense mask, bool `[T, Tk]`."""
        return mask.dense()

    def attend(
        self,
        q_THD: Tensor,
        k_THD: Tensor,
        v_THD: Tensor,
        sinks_H: Tensor | None,
        call: AttentionCall,
        mask: DocumentMask,
        plan: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute dense attention; queries without any key give 0 and an LSE of -inf."""
        wide = torch.promote_types(q_THD.dtype, torch.float32)
        with torch.autocast(q_THD.device.type, enabled=False):  # would use half precision again
            out_THD, lse_HT = dense_attention(
                q_THD.to(wide), k_THD.to(wide), v_THD.to(wide), sinks_H, plan, call
            )
        return out_THD.to(q_THD.dtype), lse_HT if call.return_lse else None


def dense_attention(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    sinks_H: Tensor | None,
    seen: Tensor,
    call: AttentionCall,
) -> tuple[Tensor, Tensor]:
    """Return the output `[T, H, Dv]` and LSE `[H, T]` in the inputs' dtype, ignoring `call.dtype`.

    `seen` is bool `[T, Tk]`.
    """
    # G = Hkv groups of R query heads each
    q_GRTD = rearrange(q_THD, "t (g r) d -> g r t d", g=k_THD.shape[1])
    k_G1DT = rearrange(k_THD, "t g d -> g 1 d t")
    v_G1TD = rearrange(v_THD, "t g d -> g 1 t d")
    scores = (q_GRTD * call.scale) @ k_G1DT
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    # Not -inf: the softmax of a row of -inf is NaN. Multiplying by the mask makes such rows zero.
    scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
    lse = scores.logsumexp(-1)
    probabilities = torch.softmax(scores, -1) * seen
    if sinks_H is not None:
        sinks_GR1 = rearrange(sinks_H.to(scores.dtype), "(g r) -> g r 1", g=k_THD.shape[1])
        probabilities = probabilities * torch.sigmoid(lse - sinks_GR1)[..., None]
    out_THD = rearrange(probabilities @ v_G1TD, "g r t d -> t (g r) d")
    lse_HT = rearrange(lse.masked_fill(~seen.any(-1), float("-inf")), "g r t -> (g r) t")
    return out_THD, lse_HT


BACKEND = ReferenceBackend()
