"""SDPA on a padded batch.

The padded batch is made beforehand, as it stands in a padded model.

Shapes: T = tokens of the row, B = documents, S = padded length, H = num_heads, D = head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from flexvarlen.bench.suites.attention.inputs import Inputs, Prepared


@dataclass(frozen=True)
class Padding:
    """Where the tokens of a packed row stand in a padded batch `[B, S]`.

    Attributes:
        shape: B and S.
        index: int64 `[T]`, each token's index in the flattened batch.
        real: bool `[B, S]`, False at padding.
    """

    shape: tuple[int, int]
    index: Tensor
    real: Tensor

    @classmethod
    def of(cls, inputs: Inputs, length: int) -> Padding:
        """Each document padded to `length`."""
        shape = (len(inputs.lengths), length)
        position = torch.arange(shape[1], device=inputs.q.device)
        real = position < inputs.cu_seqlens.diff()[:, None]
        return cls(shape, real.flatten().nonzero()[:, 0], real)

    def pad(self, x: Tensor) -> Tensor:
        """`[T, ...]` as `[B, S, ...]`, with zeros at padding."""
        flat = x.new_zeros((self.shape[0] * self.shape[1], *x.shape[1:]))
        return flat.index_copy_(0, self.index, x).view(*self.shape, *x.shape[1:])

    def unpad(self, x: Tensor) -> Tensor:
        """`[B, S, ...]` as `[T, ...]`."""
        return x.reshape(-1, *x.shape[2:])[self.index]


def sdpa(inputs: Inputs, needs_grad: bool, *, length: int, masked: bool = False) -> Prepared:
    """`scaled_dot_product_attention` on the padded batch, with torch's choice of kernel.

    Its leaves `[B, H, S, D]` are views of `[B, S, H, D]`, as a model's projections are.

    Args:
        length: S.
        masked: with a boolean mask `[B, 1, 1, S]` of the real keys, or `[B, 1, S, S]` with the
            causal one. Without it padding is attended to unless a causal mask hides it.
    """
    padding = Padding.of(inputs, length)
    q, k, v = (
        padding.pad(x).transpose(1, 2).detach().requires_grad_(needs_grad)
        for x in (inputs.q, inputs.k, inputs.v)
    )
    mask = padding.real[:, None, None] if masked else None
    if mask is not None and inputs.causal:
        mask = mask & torch.ones(length, length, dtype=torch.bool, device=mask.device).tril()
    is_causal = inputs.causal and mask is None
    attend = partial(scaled_dot_product_attention, q, k, v, attn_mask=mask, is_causal=is_causal)

    def as_THD(x_BHSD: Tensor) -> Tensor:
        return padding.unpad(x_BHSD.transpose(1, 2))

    return Prepared(attend, (q, k, v), padding.pad(inputs.grad_out).transpose(1, 2), as_THD)
