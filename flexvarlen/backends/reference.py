"""`reference`: dense attention in plain torch operations, T x Tk scores; any float dtype.

In fp64 it is the oracle of the tests. In a low precision it is the plain peer that errors are
judged against: matrix products in the dtype, softmax in fp32, probabilities in the dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexvarlen.backends.protocol import AttentionOptions, AttentionRequest
from flexvarlen.bounds import dense_mask
from flexvarlen.mask import DocumentMask


class ReferenceBackend:
    """Dense attention; memory H·T·Tk scores."""

    name = "reference"

    def why_not(self, request: AttentionRequest) -> str | None:
        """It can do all but be batch invariant: a matrix product's order of sums depends on T."""
        if not request.dtype.is_floating_point:
            return f"reference needs a float dtype, got {request.dtype}; convert the tensors."
        if request.batch_invariant:
            return (
                "reference is not batch invariant: its matrix products depend on T; use "
                "backend='sdpa'."
            )
        return None

    def plan(self, mask: DocumentMask, *, batch_invariant: bool = False) -> Tensor:
        """The dense mask, bool `[T, Tk]`."""
        return dense_mask(*mask.bounds(), mask.layout_k.total_tokens)

    def attend(
        self,
        q_THD: Tensor,
        k_THD: Tensor,
        v_THD: Tensor,
        mask: DocumentMask,
        plan: Tensor,
        options: AttentionOptions,
    ) -> tuple[Tensor, Tensor | None]:
        """Scores of all pairs, masked; rows that keep nothing give 0 and an LSE of -inf."""
        tokens, heads, dim = q_THD.shape
        groups = k_THD.shape[1]
        q_GRTD = q_THD.reshape(tokens, groups, heads // groups, dim).permute(1, 2, 0, 3)
        k_GDT, v_GTD = k_THD.permute(1, 2, 0), v_THD.permute(1, 0, 2)
        scores = (q_GRTD @ k_GDT[:, None]).to(
            torch.promote_types(q_THD.dtype, torch.float32)
        ) * options.scale
        if options.softcap is not None:
            scores = options.softcap * torch.tanh(scores / options.softcap)
        # Not -inf: the softmax of a row of -inf is NaN. The product with the mask makes such rows
        # zero.
        scores = scores.masked_fill(~plan, torch.finfo(scores.dtype).min)
        lse = scores.logsumexp(-1)
        probabilities = torch.softmax(scores, -1) * plan
        if options.sinks_H is not None:
            sinks = options.sinks_H.to(scores.dtype).view(groups, heads // groups, 1)
            probabilities = probabilities * torch.sigmoid(lse - sinks)[..., None]
        out_GRTD = probabilities.to(q_THD.dtype) @ v_GTD[:, None]
        out_THD = out_GRTD.permute(2, 0, 1, 3).reshape(tokens, heads, v_THD.shape[-1])
        if not options.return_lse:
            return out_THD, None
        return out_THD, lse.masked_fill(~plan.any(-1), float("-inf")).reshape(heads, tokens)


BACKEND = ReferenceBackend()
