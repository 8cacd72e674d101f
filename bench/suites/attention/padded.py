"""Variants that take a padded batch: SDPA; of documents of one length also other attention.

The padded batch is made beforehand, as it stands in a padded model.

Shapes: T = tokens of the row, B = documents, S = padded length, H = num_heads, D = head_dim.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from flexvarlen.bench.suites.attention.inputs import Inputs, Prepared
from flexvarlen.bench.suites.attention.packed import first_of
from flexvarlen.report.records import one_line
from flexvarlen.runner.failures import Unsupported


@dataclass(frozen=True)
class Padding:
    """Positions of a packed row's tokens in a padded batch `[B, S]`.

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


def sdpa(
    inputs: Inputs, needs_grad: bool, *, length: int | None = None, masked: bool = False
) -> Prepared:
    """`scaled_dot_product_attention` on the padded batch, with torch's choice of kernel.

    Its leaves `[B, H, S, D]` are views of `[B, S, H, D]`, as a model's projections are.

    Args:
        length: S; None: the longest document's.
        masked: with a boolean mask `[B, 1, 1, S]` of the real keys, or `[B, 1, S, S]` with the
            causal one. Without it padding is attended to unless a causal mask hides it.
    """
    length = inputs.longest if length is None else length
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


def forced(kernel: SDPBackend, inputs: Inputs, needs_grad: bool) -> Prepared:
    """The same by a given kernel, without a mask; forcing it costs microseconds of host time."""
    default = sdpa(inputs, needs_grad)

    def forward() -> Any:
        try:
            with sdpa_kernel(kernel):
                return default.forward()
        except RuntimeError as error:
            if "No available kernel" in str(error) or "No viable backend" in str(error):
                raise Unsupported(one_line(error)) from error
            raise

    return replace(default, forward=forward)


def standard(inputs: Inputs, needs_grad: bool) -> Prepared:
    """What papers call standard attention: matmul, softmax, matmul in the inputs' dtype."""
    length, scale = inputs.longest, inputs.q.shape[2] ** -0.5
    future = torch.ones(length, length, dtype=torch.bool, device=inputs.q.device).triu(1)
    batch = sdpa(inputs, needs_grad)

    def forward() -> Tensor:
        q, k, v = batch.leaves
        scores = (q * scale) @ k.mT
        if inputs.causal:
            scores.masked_fill_(future, float("-inf"))
        out: Tensor = scores.softmax(-1) @ v
        return out

    return replace(batch, forward=forward)


def fixed(module: str, inputs: Inputs, needs_grad: bool, **options: Any) -> Prepared:
    """`flash_attn_func` of a FlashAttention package, on `[B, S, H, D]`."""
    function = importlib.import_module(module).flash_attn_func

    def batch(x_THD: Tensor) -> Tensor:
        return x_THD.detach().view(len(inputs.lengths), -1, *x_THD.shape[1:])

    leaves = [batch(x).requires_grad_(needs_grad) for x in (inputs.q, inputs.k, inputs.v)]
    call = partial(function, *leaves, causal=inputs.causal, **options)
    as_THD = partial(torch.flatten, start_dim=0, end_dim=1)
    return Prepared(lambda: first_of(call()), leaves, batch(inputs.grad_out), as_THD)
