"""`AttentionCall`: what one attention call asks of a kernel; and `Backend`, what answers it.

Shape legend of all backends: T = tokens of the query row, Tk = of the key row (equal in
self-attention), H = num_heads, Hkv = num_kv_heads, D = head_dim.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.mask.document_mask import DocumentMask
from flexvarlen.mask.spec import MaskSpec

INT32_ELEMENTS = 2**31


class AttentionCall(NamedTuple):
    """All of a call but its tensors and its documents: constants, so a key.

    Attributes:
        device, dtype: of the tensors.
        num_heads, num_kv_heads, head_dim: H, Hkv and D.
        spec: the kind of mask.
        scale: factor on the scores before the softmax.
        softcap: scores become `softcap * tanh(score / softcap)`, or None.
        sinks: whether each head has a logit that joins the softmax's denominator.
        needs_grad: whether a backward may follow; eagerly that is known of the very tensors.
        deterministic: the backward gives the same bits every time.
        batch_invariant: a document gives the same bits, in the backward too, whatever else is in
            the row.
        return_lse: the log-sum-exp of the scores is returned too.
        past_int32: the queries, or the keys repeated for each query head, have `INT32_ELEMENTS` or
            more elements: some kernels index with 32 bits.
    """

    device: torch.device
    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    spec: MaskSpec = MaskSpec()
    scale: float = 1.0
    softcap: float | None = None
    sinks: bool = False
    needs_grad: bool = True
    deterministic: bool = False
    batch_invariant: bool = False
    return_lse: bool = False
    past_int32: bool = False

    @property
    def same_bits(self) -> bool:
        """Whether the backward must sum in one order."""
        return self.deterministic or self.batch_invariant

    def kind(self) -> AttentionCall:
        """The call with the default scale: no choice of a backend depends on how large it is."""
        return self._replace(scale=self.head_dim**-0.5)


def is_past_int32(layout: PackedLayout, layout_k: PackedLayout, heads: int, head_dim: int) -> bool:
    """`AttentionCall.past_int32` of calls on these rows."""
    tokens = max(layout.total_tokens, layout_k.total_tokens)
    # A plain bool, also of sizes that vary in a compiled graph.
    return True if tokens * heads * head_dim >= INT32_ELEMENTS else False  # noqa: SIM210


class Backend(Protocol):
    """One attention kernel. Its package is imported when it is first asked about."""

    name: str

    def why_not(self, call: AttentionCall) -> str | None:
        """One sentence: why it cannot serve the call and what to do; None if it can."""
        ...

    def plan(self, mask: DocumentMask, *, batch_invariant: bool = False) -> Any:
        """What it derives from the mask, once a forward for all layers with this mask; or None."""
        ...

    def attend(
        self,
        q_THD: Tensor,
        k_THD: Tensor,
        v_THD: Tensor,
        sinks_H: Tensor | None,
        call: AttentionCall,
        mask: DocumentMask,
        plan: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of validated tensors, k and v `[Tk, Hkv, D]`.

        The output `[T, H, D]`, zero at padding, and the LSE `[H, T]` or None.
        """
        ...
