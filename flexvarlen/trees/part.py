"""`TreePart`: the `shard` of a part's layout. It gives layers the keys and states above it.

Shapes: T = tokens of the part, P = tokens above it; K = keys above it that a layer gets: P, in a
padded part more, of a layer with a window only the last ones; H, Hkv = heads of queries and of
keys, D = head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, count
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import Tensor

from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.layout.row_split import RowKeys
from flexvarlen.trees.keys_above import KeysOfPart, last_keys
from flexvarlen.trees.plan import PartSizes, PlannedPart, TreePlan
from flexvarlen.trees.states import LayerState, PartStates

if TYPE_CHECKING:  # not available in a torch built without distributed
    from torch.distributed import ProcessGroup

NOT_PADDED = (
    "a compiled graph must get parts of one size, got one that is not padded; pass the compiled "
    "model to shared.parts(model, max_tokens)."
)

_NUMBERS = count()
"""The numbers of all parts of this process."""


class ContinuedSegment(NamedTuple):
    """A segment of a part that other parts continue.

    Attributes:
        segment: its index in the tree.
        slot: its index in the part, in the order of recurrent layers (see `LevelOrder`).
        tokens: its tokens in the part.
    """

    segment: int
    slot: int
    tokens: slice


@dataclass(eq=False)
class TreePart:
    """A part of a tree: a `RowSplit` whose other parts run in other forwards.

    Not frozen, as Dynamo would guard on each field. A graph reads `number`, `keys_above`,
    `is_padded` and `layout_k`; its operators read the others of the part of that number.

    Attributes:
        states: of the loop over the parts.
        path: the segments above.
        continued: the segments that other parts continue.
        stores_states: whether this forward stores their keys and states.
        needs_grad: whether its backward must run.
        layout_k: of all keys above as one segment, and of the part's own; None if P is 0. In a
            padded part a tree of padding comes first.
        keys_above: K of layers without a window.
        is_padded: whether all parts have the same sizes, as one compiled graph needs.
        number: of the part, int64 `[]` on the host; that of no other.
    """

    states: PartStates
    path: tuple[int, ...]
    continued: tuple[ContinuedSegment, ...]
    stores_states: bool
    needs_grad: bool
    layout_k: PackedLayout | None
    keys_above: int
    is_padded: bool
    number: Tensor = field(default_factory=lambda: torch.tensor(next(_NUMBERS), device="cpu"))
    rank: ClassVar[int] = 0
    ranks: ClassVar[int] = 1
    is_whole: ClassVar[bool] = False
    needs_group: ClassVar[bool] = False
    splits_documents: ClassVar[bool] = False
    exchanges_keys: ClassVar[bool] = False
    is_part_of_tree: ClassVar[bool] = True
    links: ClassVar[None] = None

    def position_bound(self, row_tokens: int) -> int:
        """A bound on the positions, which count from the root."""
        return self.keys_above + row_tokens

    def positions(self, layout: PackedLayout, positions: Tensor) -> Tensor:
        """Positions from the root, from those in the part."""
        if self.layout_k is None:
            return positions
        return self.layout_k.position_ids()[self.keys_above :]

    def keys(
        self, window: int | None, chunk: int | None, group: ProcessGroup | None
    ) -> RowKeys[PackedLayout]:
        """The keys of layers with this mask: those above, of a window the last, and the part's own.

        Raises:
            ValueError: a compiled graph got a part that is not padded.
        """
        if torch.compiler.is_compiling() and not self.is_padded:
            raise ValueError(NOT_PADDED)
        if window is None or chunk is not None:
            return KeysOfPart(self.number, self.layout_k, self.keys_above)
        # The first query sees window - 1; one more keeps sizes multiples of powers of two.
        layout_k, keys_above = self.layout_k, min(self.keys_above, window)
        if layout_k is not None and keys_above < self.keys_above:
            layout_k = last_keys(layout_k, self.keys_above - keys_above)
        return KeysOfPart(self.number, layout_k, keys_above, window)

    def why_not(self, *, causal: bool, window: int | None) -> str | None:
        """None: trees are refused elsewhere if the model is not causal."""
        return None

    def moved(self, move: Callable[[Tensor], Tensor]) -> TreePart:
        """A copy, with `move` applied to the tensors on the device."""
        return replace(self, layout_k=None if self.layout_k is None else self.layout_k.moved(move))

    # ---- attention ----

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
        """Keys and values `[K + T, Hkv, D]`, those above first; store those that others need.

        Args:
            layer: index of the layer.
            k, v: of the part's tokens.
            keys_above: K.
            window: tokens of a segment to store at most; None: all.
            expects_backward: whether they require gradients, or a reentrant checkpoint hides that
                they do.
        """
        key = layer, "keys"
        self.states.enter(key, expects_backward=self.needs_grad and expects_backward)
        if self.stores_states:
            last = slice(None if window is None else -window, None)
            for each in self.continued:
                own = (x[each.tokens][last] for x in (k, v))
                self.states.store(key, each.segment, *own)
        if not keys_above:
            return k.view_as(k), v.view_as(v)
        above = self._last_above(key, keys_above, k.dtype)
        padding = keys_above - sum(tokens for _, tokens in above)
        joined = []
        for i, x in enumerate((k, v)):
            stored = (self.states.stored(key, segment)[i][-tokens:] for segment, tokens in above)
            joined.append(torch.cat([x.new_zeros(padding, *x.shape[1:]), *stored, x]))
        return joined[0], joined[1]

    def _last_above(
        self, key: LayerState, keys_above: int, dtype: torch.dtype | None = None
    ) -> list[tuple[int, int]]:
        """The segments of the last keys above, and the number of these keys in each."""
        found: list[tuple[int, int]] = []
        for segment in reversed(self.path):
            tokens = min(keys_above, len(self.states.stored(key, segment, dtype)[0]))
            keys_above -= tokens
            if tokens:
                found.append((segment, tokens))
        return found[::-1]

    def split_gradients(
        self, layer: int, dk: Tensor, dv: Tensor, keys_above: int
    ) -> tuple[Tensor, Tensor]:
        """Store the gradients of the keys above, and return those of the part's own keys.

        These include what the parts below have stored. `[K + T, Hkv, D]` -> `[T, Hkv, D]`.
        """
        key = layer, "keys"
        self.states.ran_backward(key)
        above = self._last_above(key, keys_above)
        done = keys_above - sum(tokens for _, tokens in above)
        for segment, tokens in above:
            end = done + tokens
            self.states.add_gradients(key, segment, dk[done:end], dv[done:end])
            done = end
        own = [x[keys_above:].clone() if self.continued else x[keys_above:] for x in (dk, dv)]
        for each in self.continued:
            if below := self.states.pop_gradients(key, each.segment):
                for x, gradient in zip(own, below, strict=True):
                    x[each.tokens.stop - len(gradient) : each.tokens.stop] += gradient
        return own[0], own[1]

    # ---- recurrent layers ----

    def load_state(
        self,
        layer: int,
        name: str,
        *,
        dtype: torch.dtype | None = None,
        expects_backward: bool = False,
        in_backward: bool = False,
    ) -> Tensor | None:
        """The state at the end of the path, as it was stored; None at the root.

        Args:
            layer: index of the layer.
            name: of the state in the layer.
            dtype: of the layer, if the state has that of the layer.
            expects_backward: whether the inputs of the layer require gradients, or a reentrant
                checkpoint hides that they do.
            in_backward: whether this is the backward, which needs the state again.

        Raises:
            ValueError: the state has another dtype.
        """
        key = layer, name
        if not in_backward:
            self.states.enter(key, expects_backward=self.needs_grad and expects_backward)
        if not self.path:
            return None
        (state,) = self.states.stored(key, self.path[-1], dtype)
        return state

    def store_states(self, layer: int, name: str, states: Iterable[Tensor]) -> None:
        """Store the states of the `continued` segments, if other parts are to continue them."""
        if self.stores_states:
            for each, state in zip(self.continued, states, strict=True):
                self.states.store((layer, name), each.segment, state)

    def pop_gradients(self, layer: int, name: str) -> list[Tensor | None]:
        """The gradients of these states, which the parts below have stored; None without any."""
        self.states.ran_backward((layer, name))
        found = [self.states.pop_gradients((layer, name), each.segment) for each in self.continued]
        return [below[0] if below else None for below in found]

    def add_gradient(self, layer: int, name: str, gradient: Tensor) -> None:
        """Store a gradient of the state above, of which there is none at the root."""
        if self.path:
            self.states.add_gradients((layer, name), self.path[-1], gradient)


def layout_of(
    plan: TreePlan,
    part: PlannedPart,
    segments: Sequence[int],
    states: PartStates,
    *,
    stores_states: bool,
    needs_grad: bool,
    device: torch.device,
    sizes: PartSizes | None = None,
) -> PackedLayout:
    """The layout of some segments of a part, with a `TreePart` as its shard.

    Args:
        plan: of the tree.
        part: of the plan.
        segments: all of the part, or those that other parts continue.
        states: of the loop.
        stores_states, needs_grad: as of `TreePart`.
        device: of the tokens.
        sizes: to which the part is padded, or None.
    """
    lengths = [plan.lengths[segment] for segment in segments]
    index = {segment: i for i, segment in enumerate(segments)}
    parents = [index.get(plan.parents[segment], -1) for segment in segments]
    tokens_above, layout_k = plan.tokens_above(part), None
    keys_above = tokens_above if sizes is None else sizes.keys_above
    of_queries, of_keys = ({}, {}) if sizes is None else (sizes.of_queries(), sizes.of_keys())
    layout = PackedLayout.from_tree(lengths, parents, device=device, **of_queries)
    if keys_above:
        padding = [] if sizes is None else [keys_above - tokens_above]
        path = len(padding)  # the index of the segment of all keys above
        below = [path if parent < 0 else path + 1 + parent for parent in parents]
        sizes_k, roots = [*padding, tokens_above, *lengths], [-1] * (path + 1)
        layout_k = PackedLayout.from_tree(sizes_k, [*roots, *below], device=device, **of_keys)
    starts = list(accumulate(lengths, initial=0))
    order = range(len(lengths)) if layout.segments is None else layout.segments.by_level.index
    continued = tuple(
        ContinuedSegment(x, order[i := index[x]], slice(starts[i], starts[i + 1]))
        for x in part.continued
    )
    shard = TreePart(
        states=states,
        path=part.path,
        continued=continued,
        stores_states=stores_states,
        needs_grad=needs_grad,
        layout_k=layout_k,
        keys_above=keys_above,
        is_padded=sizes is not None,
    )
    return layout.replace(shard=shard)
