"""Which keys each query row keeps: one interval, `lo[q] <= kv < hi[q]`; all masks come from it.

Shapes: T = total_tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flexvarlen.layout import PackedLayout

UNLIMITED = -1


@dataclass(frozen=True)
class MaskSpec:
    """Which keys of its own document a query sees: `left` before it and `right` after it.

    -1 means no limit on that side. Causal is `right=0`. Hashable: plans and compiled kernels are
    kept by it.
    """

    left: int = UNLIMITED
    right: int = 0

    @classmethod
    def of(cls, *, causal: bool = True, window: int | tuple[int, int] | None = None) -> MaskSpec:
        """The spec of a causal or bidirectional mask with an optional sliding window.

        Args:
            causal: no key after the query.
            window: an int W keeps |q - kv| < W (transformers' meaning); a pair `(left, right)`
                counts keys on each side (FlashAttention's meaning), -1 for no limit.

        Raises:
            ValueError: W below 1, or a pair with a value below -1.

        >>> MaskSpec.of(causal=True, window=4)
        MaskSpec(left=3, right=0)
        """
        if window is None:
            left = right = UNLIMITED
        elif isinstance(window, int) and not isinstance(window, bool):
            if window < 1:
                raise ValueError(
                    f"window must be at least 1, got {window}; pass None for no window."
                )
            left = right = window - 1
        else:
            sides: Sequence[int] = window if isinstance(window, tuple | list) else ()
            if [type(side) for side in sides] != [int, int] or min(sides) < UNLIMITED:
                raise ValueError(
                    "window must be an integer or (left, right), each at least -1, got "
                    f"{window}; pass None for no window, -1 for no limit on a side."
                )
            left, right = sides
        return cls(left=left, right=0 if causal else right)

    @property
    def causal(self) -> bool:
        """Whether no key after the query is seen."""
        return self.right == 0


def row_bounds(
    layout: PackedLayout, *, causal: bool = True, window: int | tuple[int, int] | None = None
) -> tuple[Tensor, Tensor]:
    """The interval of keys that each row keeps, inside its own document.

    Args:
        layout: the documents.
        causal, window: as in `MaskSpec.of`.

    Returns:
        lo, hi: int32 `[T]`, on the layout's device, never decreasing. A padding row keeps nothing:
            `lo` is the end of
        its run and `hi` its start.

    No sync; traces under `fullgraph=True`.

    >>> lo, hi = row_bounds(PackedLayout.from_lengths([2, 3]))
    >>> lo.tolist(), hi.tolist()
    ([0, 0, 2, 2, 2], [1, 2, 3, 4, 5])
    """
    return bounds_of(layout, MaskSpec.of(causal=causal, window=window))


def bounds_of(layout: PackedLayout, mask: MaskSpec) -> tuple[Tensor, Tensor]:
    """`row_bounds` of a `MaskSpec`."""
    compute = traced_interval_bounds if torch.compiler.is_compiling() else interval_bounds
    lo, hi = compute(layout.cu_seqlens, layout.padding, layout.total_tokens, mask.left, mask.right)
    return lo, hi


def interval_bounds(
    cu_seqlens: Tensor, padding: Tensor | None, total_tokens: int, left: int, right: int
) -> tuple[Tensor, Tensor]:
    """`row_bounds` of a layout's tensors and the numbers of a `MaskSpec`."""
    rows = torch.arange(total_tokens, device=cu_seqlens.device, dtype=torch.int32)
    slot = torch.searchsorted(cu_seqlens[1:], rows, right=True, out_int32=True)
    # One slot more: the padding after the last document.
    boundaries = torch.cat([cu_seqlens, cu_seqlens.new_full((1,), total_tokens)])
    start, end = boundaries[slot], boundaries[slot + 1]
    lo = start if left == UNLIMITED else torch.maximum(start, rows - left)
    hi = end if right == UNLIMITED else torch.minimum(end, rows + (right + 1))
    padded = slot == cu_seqlens.shape[0] - 1
    if padding is not None:
        padded = padded | padding
    return torch.where(padded, end, lo), torch.where(padded, start, hi)


# Inside a compiled graph one operator: inductor of torch 2.11 on CUDA, fusing the search into what
# uses it, gave a reference attention with wrong gradients.
traced_interval_bounds = torch.library.custom_op(
    "flexvarlen::interval_bounds", interval_bounds, mutates_args=()
)


@traced_interval_bounds.register_fake
def _(
    cu_seqlens: Tensor, padding: Tensor | None, total_tokens: int, left: int, right: int
) -> tuple[Tensor, Tensor]:
    return cu_seqlens.new_empty((total_tokens,)), cu_seqlens.new_empty((total_tokens,))


def dense_mask(lo: Tensor, hi: Tensor) -> Tensor:
    """bool `[T, T]`: True where row q keeps key kv. For small T: takes T² bytes."""
    keys = torch.arange(lo.shape[0], device=lo.device, dtype=torch.int32)
    return (keys >= lo[:, None]) & (keys < hi[:, None])
