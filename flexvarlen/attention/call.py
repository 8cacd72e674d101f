"""What every attention kernel answers: why it cannot, its plan, and attention itself.

Shape legend: T = tokens of the query row, Tk = of the key row (equal in self-attention),
H = num_heads, Hkv = num_kv_heads, D = head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from flexvarlen.mask.document_mask import DocumentMask
from flexvarlen.mask.spec import MaskSpec

INT32_ELEMENTS = 2**31


@dataclass(frozen=True)
class AttentionRequest:
    """What a call asks of a kernel, before it is made. Hashable.

    Attributes:
        past_int32: the queries, or the keys repeated for each query head, have `INT32_ELEMENTS` or
            more: some kernels index with 32 bits.
    """

    device: torch.device
    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mask: MaskSpec = field(default_factory=MaskSpec)
    softcap: float | None = None
    sinks: bool = False
    needs_grad: bool = True
    deterministic: bool = False
    batch_invariant: bool = False
    return_lse: bool = False
    past_int32: bool = False


@dataclass(frozen=True)
class AttentionOptions:
    """How a call weighs the scores.

    Attributes:
        scale: factor on the scores before the softmax.
        softcap: scores become `softcap * tanh(score / softcap)`, or None.
        sinks_H: one logit a head that joins the softmax's denominator, `[H]`, or None.
        deterministic: the backward gives the same bits every time.
        batch_invariant: a document gives the same bits, in the backward too, whatever else is in
            the row.
        return_lse: also return the log-sum-exp of the scores.
    """

    scale: float
    softcap: float | None = None
    sinks_H: Tensor | None = None
    deterministic: bool = False
    batch_invariant: bool = False
    return_lse: bool = False


class Backend(Protocol):
    """One attention kernel. Its package is imported on first use, never when flexvarlen is."""

    name: str

    def why_not(self, request: AttentionRequest) -> str | None:
        """One sentence: why it cannot serve the request and what to do; None if it can."""
        ...

    def plan(self, mask: DocumentMask, *, batch_invariant: bool = False) -> Any:
        """What it derives from the mask once a forward, for all layers, or None."""
        ...

    def attend(
        self,
        q_THD: Tensor,
        k_THD: Tensor,
        v_THD: Tensor,
        mask: DocumentMask,
        plan: Any,
        options: AttentionOptions,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of validated tensors, k and v `[Tk, Hkv, D]`.

        The output `[T, H, D]`, zero at padding, and the LSE `[H, T]` or None.
        """
        ...
