"""Join the keys and values of a part of a tree with those above it, eager and in compiled graphs.

The operators of a graph find the part that runs by its number: see `layout/running_part.py`.

Shapes: K = keys above the part, padding before them included; T = tokens of the part; H, Hkv =
heads of queries and of keys, D = head_dim.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from flexvarlen.layout.boundaries import is_traced
from flexvarlen.layout.launch_sizes import NOT_CAPTURED
from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.layout.row_split import Attend
from flexvarlen.layout.running_part import expects_backward, running_part
from flexvarlen.layout.segments import Segments

WITHOUT_INDEX = (
    "an attention layer must have a layer_idx to run on a part of a tree, got one without; run the "
    "whole tree: shared.batch()."
)


class RunningPart(Protocol):
    """What the operators need of `flexvarlen.trees.part.TreePart`."""

    def join(
        self,
        layer: int,
        k: Tensor,
        v: Tensor,
        keys_above: int,
        window: int | None,
        *,
        expects_backward: bool,
    ) -> tuple[Tensor, Tensor]:
        """Keys and values `[K + T, Hkv, D]`: those above, then those of the part's tokens."""

    def split_gradients(
        self, layer: int, dk: Tensor, dv: Tensor, keys_above: int
    ) -> tuple[Tensor, Tensor]:
        """The gradients `[T, Hkv, D]` of the part's own keys, from those of all."""


class KeysOfPart(NamedTuple):
    """The `RowKeys` of the layers of a part that have one mask.

    Attributes:
        number: of the part, int64 `[]` on the host.
        layout_k: of the keys above and the part's own; None if there are none above.
        keys_above: K.
        window: the most tokens of a segment that other parts may see; None: all.
    """

    number: Tensor
    layout_k: PackedLayout | None
    keys_above: int
    window: int | None = None

    def layouts(self, layout: PackedLayout) -> tuple[PackedLayout, PackedLayout | None]:
        """The layouts of the part's queries and of the keys, of which theirs come last."""
        return layout, self.layout_k

    def attend(
        self,
        attend: Attend,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        layer: int | None = None,
    ) -> Any:
        """Call `attend` with padding, the keys above, and the part's own.

        Args:
            attend: takes q `[T, H, D]`, and k and v `[K + T, Hkv, D]`.
            q, k, v: of the part's tokens.
            sinks: `[H]`, or None.
            layer: index of the layer, which is required here.

        Raises:
            NotImplementedError: the layer has no index.
            RuntimeError: the part's loop has ended or gone on, or the layer runs a second time.

        Differentiable once; the gradients of the keys above go to the parts that have them. No
        sync; traces under `fullgraph=True`.
        """
        if layer is None:
            raise NotImplementedError(WITHOUT_INDEX)
        given = self.number, layer, self.keys_above, self.window, expects_backward([k, v])
        k, v = _WithKeysAbove.apply(k, v, *given)  # type: ignore[no-untyped-call]
        return attend(q, k, v, sinks)


def last_keys(layout_k: PackedLayout, dropped: int) -> PackedLayout:
    """The layout of a part's keys without the first `dropped`; positions still count from the root.

    Lengths are no longer known on the host, which no kernel for windows in trees needs. No sync;
    traces under `fullgraph=True`.
    """
    tokens, segments = layout_k.total_tokens - dropped, layout_k.segments
    if segments is not None:
        starts, ends, offsets, depths = segments.table
        cut = (dropped - starts).clamp(min=0)  # from the start of a segment
        rows = [starts - dropped + cut, (ends - dropped).clamp(min=0), offsets + cut, depths]
        by_level = segments.by_level  # of the whole row; only recurrent layers read it, of queries
        segments = Segments(torch.stack(rows), (), (), segments.max_depth, by_level)
    return PackedLayout(
        (layout_k.cu_seqlens - dropped).clamp(min=0),
        cu_seqlens_host=None,
        total_tokens=tokens,
        max_seqlen_bound=min(layout_k.max_seqlen_bound, tokens),
        num_docs=None,
        max_seqlen=None,
        segments=segments,
    )


class _WithKeysAbove(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        k: Tensor,
        v: Tensor,
        number: Tensor,
        layer: int,
        keys_above: int,
        window: int | None,
        expects_backward: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(number)
        ctx.layer, ctx.keys_above = layer, keys_above
        if is_traced():
            k, v = _forward_operator(k, v, number, layer, keys_above, window, expects_backward)
            return k, v
        return _part(number).join(
            layer, k, v, keys_above, window, expects_backward=expects_backward
        )

    @staticmethod
    def backward(ctx: Any, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (number,) = ctx.saved_tensors
        if is_traced():
            own = _backward_operator(dk, dv, number, ctx.layer, ctx.keys_above)
        else:
            own = _part(number).split_gradients(ctx.layer, dk, dv, ctx.keys_above)
        return *own, None, None, None, None, None


def _part(number: Tensor) -> RunningPart:
    part: RunningPart = running_part(number)
    return part


@torch.library.custom_op("flexvarlen::keys_above", mutates_args=(), tags=NOT_CAPTURED)
def _forward_operator(
    k: Tensor,
    v: Tensor,
    number: Tensor,
    layer: int,
    keys_above: int,
    window: int | None,
    expects_backward: bool,
) -> tuple[Tensor, Tensor]:
    joined = _part(number).join(layer, k, v, keys_above, window, expects_backward=expects_backward)
    return _copies(joined) if keys_above == 0 else joined


@_forward_operator.register_fake
def _(
    k: Tensor,
    v: Tensor,
    number: Tensor,
    layer: int,
    keys_above: int,
    window: int | None,
    expects_backward: bool,
) -> tuple[Tensor, Tensor]:
    k, v = (x.new_empty(keys_above + x.shape[0], *x.shape[1:]) for x in (k, v))
    return k, v


@torch.library.custom_op("flexvarlen::keys_above_backward", mutates_args=(), tags=NOT_CAPTURED)
def _backward_operator(
    dk: Tensor, dv: Tensor, number: Tensor, layer: int, keys_above: int
) -> tuple[Tensor, Tensor]:
    return _copies(_part(number).split_gradients(layer, dk, dv, keys_above))


@_backward_operator.register_fake
def _(dk: Tensor, dv: Tensor, number: Tensor, layer: int, keys_above: int) -> tuple[Tensor, Tensor]:
    dk, dv = (x.new_empty(x.shape[0] - keys_above, *x.shape[1:]) for x in (dk, dv))
    return dk, dv


def _copies(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """An operator must not return views of its inputs."""
    first, second = (x.clone(memory_format=torch.contiguous_format) for x in pair)
    return first, second
