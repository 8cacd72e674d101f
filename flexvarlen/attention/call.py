"""`AttentionCall`, the static arguments of one attention call, and the `Backend` protocol.

Shape legend of all backends: T, Tk = tokens of the query and the key row (equal in
self-attention), H = num_heads, Hkv = num_kv_heads, D = head_dim.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from flexvarlen.attention.check_arguments import check_heads, check_numbers
from flexvarlen.env import BATCH_INVARIANT, DETERMINISTIC, resolve_flag
from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.mask.document_mask import DocumentMask
from flexvarlen.mask.spec import MaskSpec

INT32_ELEMENTS = 2**31


class AttentionCall(NamedTuple):
    """The static arguments of a call: all except its tensors and documents. Used as a cache key.

    Attributes:
        device, dtype: device and dtype of the tensors.
        num_heads, num_kv_heads, head_dim: H, Hkv and D.
        spec: the kind of mask.
        scale: factor on the scores before the softmax.
        softcap: scores become `softcap * tanh(score / softcap)`, or None.
        sinks: whether each head has a logit that is added to the softmax's denominator.
        needs_grad: whether a backward may follow; in eager mode read from the tensors.
        deterministic: the backward is bitwise deterministic.
        batch_invariant: a document's results, in the backward too, do not depend on the rest of
            the row.
        return_lse: the log-sum-exp of the scores is returned too.
        past_int32: the queries, or the keys repeated for each query head, have `INT32_ELEMENTS` or
            more elements: some kernels index with 32 bits.
        graph: set while a backend is chosen inside a compiled graph: "training" if it holds a
            backward of this call, else "inference". None in eager mode.
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
    graph: Literal["training", "inference"] | None = None

    @property
    def ordered_backward(self) -> bool:
        """Whether the backward must sum in a fixed order."""
        return self.deterministic or self.batch_invariant

    def kind(self) -> AttentionCall:
        """The call with the default scale, as the choice of a backend does not depend on it."""
        return self._replace(scale=self.head_dim**-0.5)

    def in_graph(self) -> AttentionCall:
        """The same call inside a compiled graph."""
        return self._replace(graph="training" if self.needs_grad else "inference")


def attention_call(
    device: torch.device,
    dtype: torch.dtype,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    spec: MaskSpec,
    *,
    scale: float | None = None,
    softcap: float | None,
    sinks: bool,
    needs_grad: bool,
    deterministic: bool | None,
    batch_invariant: bool | None,
    return_lse: bool = False,
    past_int32: bool = False,
) -> AttentionCall:
    """The call that `packed_attention`, `why_not` and `explain` ask a backend about.

    Args:
        scale: None: `head_dim ** -0.5`.
        deterministic, batch_invariant: None: use the environment variables.

    Raises:
        ValueError: a number is not positive and finite, or num_heads is not a multiple of
            num_kv_heads.
    """
    check_numbers(softcap, scale)
    check_heads(num_heads, num_kv_heads)
    return AttentionCall(
        device,
        dtype,
        num_heads,
        num_kv_heads,
        head_dim,
        spec,
        head_dim**-0.5 if scale is None else scale,
        softcap,
        sinks,
        needs_grad,
        resolve_flag(DETERMINISTIC, deterministic),
        resolve_flag(BATCH_INVARIANT, batch_invariant),
        return_lse,
        past_int32,
    )


def is_past_int32(layout: PackedLayout, layout_k: PackedLayout, heads: int, head_dim: int) -> bool:
    """The value of `AttentionCall.past_int32` for calls on these rows."""
    tokens = max(layout.total_tokens, layout_k.total_tokens)
    # A plain bool, also for dynamic sizes in a compiled graph.
    return True if tokens * heads * head_dim >= INT32_ELEMENTS else False  # noqa: SIM210


class Backend(Protocol):
    """One attention kernel. Its package is imported when it is first asked about."""

    name: str

    def why_not(self, call: AttentionCall) -> str | None:
        """Return why the backend cannot serve the call and what to do, or None if it can."""
        ...

    def plan(self, mask: DocumentMask, *, batch_invariant: bool = False) -> Any:
        """Build what all layers with this mask share in a forward, such as a BlockMask, or None."""
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
        """Compute attention on validated tensors; k and v are `[Tk, Hkv, D]`.

        Returns the output `[T, H, D]`, zero at padding, and the LSE `[H, T]` or None.
        """
        ...
