"""`TreePart`: what the layout of a part of a tree answers as its `shard`.

Shapes: T = tokens of the part, P = tokens above it, Hkv = num_kv_heads, D = head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.layout.row_split import Attend, RowKeys
from flexvarlen.trees.plan import PlannedPart, TreePlan
from flexvarlen.trees.step import Of, TreeStep

if TYPE_CHECKING:  # not available in a torch built without distributed
    from torch.distributed import ProcessGroup

WITHOUT_INDEX = (
    "an attention layer must have a layer_idx to run on a part of a tree, got one without; run the "
    "whole tree: shared.batch()."
)


class Kept(NamedTuple):
    """A segment that other parts have above them.

    Attributes:
        segment: its index in the tree.
        number: in the part.
        tokens: its tokens in the part.
    """

    segment: int
    number: int
    tokens: slice


class TreePart:
    """Segments of a tree below one path, whose keys and values a step holds: a `RowSplit`.

    It is the `RowKeys` of all its layers, too: queries attend to the keys above and to their own.

    Attributes:
        step: of the loop over the parts.
        path: the segments above.
        tokens_above: P.
        kept: the segments that other parts have above them.
        keeps: whether this forward is to keep their keys and values.
        layout_k: of the keys above as one segment, and of the part's own; None if P is 0.
    """

    rank, ranks = 0, 1
    is_whole, needs_group, splits_documents, exchanges_keys = False, False, False, False
    is_part_of_tree = True
    links = None

    def __init__(
        self,
        step: TreeStep,
        path: Sequence[int],
        tokens_above: int,
        kept: Sequence[Kept],
        *,
        keeps: bool,
        layout_k: PackedLayout | None,
    ) -> None:
        self.step, self.path, self.tokens_above = step, tuple(path), tokens_above
        self.kept, self.keeps, self.layout_k = tuple(kept), keeps, layout_k

    def position_bound(self, row_tokens: int) -> int:
        """With the tokens above."""
        return self.tokens_above + row_tokens

    def positions(self, layout: PackedLayout, positions: Tensor) -> Tensor:
        """Along the whole path."""
        return positions + self.tokens_above

    def keys(
        self, window: int | None, chunk: int | None, group: ProcessGroup | None
    ) -> RowKeys[PackedLayout]:
        """Itself, for every kind of layer."""
        return self

    def why_not(self, *, causal: bool, window: int | None) -> str | None:
        """None: whether the model is causal is asked for trees."""
        return None

    def moved(self, move: Callable[[Tensor], Tensor]) -> TreePart:
        """The same with the layout of its keys on the device."""
        layout_k = None if self.layout_k is None else self.layout_k.moved(move)
        return TreePart(
            self.step,
            self.path,
            self.tokens_above,
            self.kept,
            keeps=self.keeps,
            layout_k=layout_k,
        )

    # ---- its keys ----

    def layouts(self, layout: PackedLayout) -> tuple[PackedLayout, PackedLayout | None]:
        """Of the part's tokens, and of the keys that they attend to."""
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
        """Attend to the keys above and to the part's own.

        Raises:
            NotImplementedError: the layer has no index.
        """
        if layer is None:
            raise NotImplementedError(WITHOUT_INDEX)
        of = layer, "keys"
        if self.keeps:
            for segment, _, tokens in self.kept:
                self.step.keep(of, segment, k[tokens], v[tokens])
        elif k.requires_grad or v.requires_grad:
            self.step.await_backward(of)
        k, v = _WithKeysAbove.apply(k, v, self, of)  # type: ignore[no-untyped-call]
        return attend(q, k, v, sinks)

    def join(self, of: Of, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values `[P + T, Hkv, D]`."""
        above = [self.step.kept(of, segment) for segment in self.path]
        return torch.cat([*(x for x, _ in above), k]), torch.cat([*(x for _, x in above), v])

    def split_gradients(self, of: Of, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
        """Send those of the keys above, and add to the part's own what came from below."""
        self.step.ran_backward(of)
        done = 0
        for segment in self.path:
            end = done + len(self.step.kept(of, segment)[0])
            self.step.send(of, segment, dk[done:end], dv[done:end])
            done = end
        own = [x[done:].clone() if self.kept else x[done:] for x in (dk, dv)]
        for segment, _, tokens in self.kept:
            for x, more in zip(own, self.step.receive(of, segment), strict=False):
                x[tokens] += more
        return own[0], own[1]

    # ---- states of recurrent layers ----

    def above(self, layer: int, name: str, sources: Sequence[Tensor]) -> Tensor | None:
        """The state at the end of the path; None at the root.

        Args:
            layer: index of the layer.
            name: of the state in the layer.
            sources: inputs of the layer; the state requires a gradient if one of them does.
        """
        if not self.path:
            return None
        found: Tensor = _FromAbove.apply(self, (layer, name), *sources)  # type: ignore[no-untyped-call]
        return found

    def below(self, layer: int, name: str, out: Tensor, states: Sequence[Tensor]) -> Tensor:
        """The output of a layer; the states of the `kept` segments go to the parts below."""
        of = layer, name
        if self.keeps:
            for kept, state in zip(self.kept, states, strict=True):
                self.step.keep(of, kept.segment, state)
        elif out.requires_grad:
            self.step.await_backward(of)
        found: Tensor = _ToBelow.apply(self, of, out, *states)  # type: ignore[no-untyped-call]
        return found


class _WithKeysAbove(torch.autograd.Function):
    """Keys and values with those above the part; the gradients of these wait in the step."""

    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, part: TreePart, of: Of) -> tuple[Tensor, Tensor]:
        ctx.part, ctx.of = part, of
        return part.join(of, k, v)

    @staticmethod
    def backward(ctx: Any, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor, None, None]:  # type: ignore[override]
        return *ctx.part.split_gradients(ctx.of, dk, dv), None, None


class _FromAbove(torch.autograd.Function):
    """The state at the end of the path; its gradient waits in the step."""

    @staticmethod
    def forward(ctx: Any, part: TreePart, of: Of, *sources: Tensor) -> Tensor:
        ctx.part, ctx.of = part, of
        (state,) = part.step.kept(of, part.path[-1])
        return state.view_as(state)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:  # type: ignore[override]
        ctx.part.step.send(ctx.of, ctx.part.path[-1], grad)
        return (None,) * len(ctx.needs_input_grad)


class _ToBelow(torch.autograd.Function):
    """The output; the gradients of the states are those that came from the parts below."""

    @staticmethod
    def forward(ctx: Any, part: TreePart, of: Of, out: Tensor, *states: Tensor) -> Tensor:
        ctx.part, ctx.of, ctx.dtypes = part, of, [x.dtype for x in states]
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        step: TreeStep = ctx.part.step
        step.ran_backward(ctx.of)
        found = [step.receive(ctx.of, kept.segment) for kept in ctx.part.kept]
        of_states = [x[0].to(d) if x else None for x, d in zip(found, ctx.dtypes, strict=True)]
        return None, None, grad, *of_states


def layout_of(
    plan: TreePlan,
    part: PlannedPart,
    segments: Sequence[int],
    step: TreeStep,
    *,
    keeps: bool,
    device: torch.device,
) -> PackedLayout:
    """The layout of some segments of a part, with a `TreePart` as its shard.

    Args:
        plan: of the tree.
        part: of the plan.
        segments: all of the part, or those that others hang from and what is above these in it.
        step: of the loop.
        keeps: whether the forward keeps keys and values.
        device: of the tokens.
    """
    lengths = [plan.lengths[segment] for segment in segments]
    number = {segment: index for index, segment in enumerate(segments)}
    parents = [number.get(plan.parents[segment], -1) for segment in segments]
    layout = PackedLayout.from_tree(lengths, parents, device=device)
    tokens_above, layout_k = sum(plan.lengths[segment] for segment in part.path), None
    if tokens_above:
        below = [0 if parent < 0 else parent + 1 for parent in parents]
        layout_k = PackedLayout.from_tree([tokens_above, *lengths], [-1, *below], device=device)
    starts = list(accumulate(lengths, initial=0))
    kept = [Kept(x, i := number[x], slice(starts[i], starts[i + 1])) for x in part.kept]
    shard = TreePart(step, part.path, tokens_above, kept, keeps=keeps, layout_k=layout_k)
    return layout.replace(shard=shard)
