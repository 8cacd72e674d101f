"""The order in which the slots of a row run, if states pass from one slot to another.

A slot holds a document, or a segment of a tree.

A segment of a tree starts from the final state of its parent. So the steps that pass states are
launched once for each level of a tree, all segments of a level together; the backward starts at the
deepest level, and the gradient of a state is the sum over the segments that start from it, in
order.

The roots of a part of a tree start from the state at the end of the path above it, and the part
stores the final states of the segments that other parts continue (see `tree_parts.py`).

In a row over several ranks, the first document of a rank may start from the final state of the
previous rank, and its last one may continue on the next. Slots that wait for no rank run first.

Shapes: HV = heads of values; K, V = head_dim of keys and of values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from flexvarlen.layout.row_split import BoundaryLinks
from flexvarlen.layout.running_part import running_part
from flexvarlen.recurrent.adjacent_ranks import receive, send
from flexvarlen.recurrent.documents import CHUNK, RecurrentDocuments
from flexvarlen.recurrent.tree_parts import SCAN, PartOfTree


class Boundaries(NamedTuple):
    """The fields of `RecurrentDocuments` that operators need.

    Attributes:
        parents, levels: tables of trees; None for plain documents.
        part: the number of the part of a tree that the row is, or None (see `tree_parts.py`).
        layer, expects_backward: of a part: the index of the layer, and whether its backward must
            run.
        links, group: as in `RecurrentDocuments`, if documents continue from rank to rank.
    """

    cu_seqlens: Tensor
    chunk_indices: Tensor
    parents: Tensor | None = None
    levels: Tensor | None = None
    part: Tensor | None = None
    links: Tensor | None = None
    layer: int = -1
    expects_backward: bool = False
    group: str = ""

    @classmethod
    def of(cls, documents: RecurrentDocuments) -> Boundaries:
        """The boundaries of a row's documents."""
        branches = documents.branches
        parents, levels = (None, None) if branches is None else (branches.parents, branches.levels)
        of_row = documents.cu_seqlens, documents.chunk_indices
        found = cls(*of_row, parents, levels, links=documents.links, group=documents.group)
        carry = documents.carry
        return found if carry is None else found._replace(part=carry.part.number, layer=carry.layer)

    def running_part(self) -> PartOfTree | None:
        """The part of a tree that the row is, if it is one."""
        found: PartOfTree | None = None if self.part is None else running_part(self.part)
        return found

    @property
    def pass_states(self) -> bool:
        """Whether a slot starts from the state of another slot or rank."""
        return self.parents is not None or self.links is not None

    def kwargs(self) -> dict[str, Tensor]:
        """Keyword arguments in fla's names."""
        return {"cu_seqlens": self.cu_seqlens, "chunk_indices": self.chunk_indices}


CONSTANTS = 3
"""The last fields of `Boundaries`, which are no tensors."""
TABLES = len(Boundaries._fields) - CONSTANTS
"""The first ones, which are."""


class Level(NamedTuple):
    """Slots that a kernel runs for in one launch: those of one level, or all plain documents.

    Attributes:
        cu_seqlens, chunk_offsets: `[n + 1]`, into the tokens and the chunks of the row.
        parents: int64 `[n]`, the slots of the level above that they start from; None for roots.
        first: the first slot.
    """

    cu_seqlens: Tensor
    chunk_offsets: Tensor
    parents: Tensor | None = None
    first: int = 0

    @property
    def slots(self) -> int:
        """The number of slots, n."""
        return len(self.cu_seqlens) - 1

    def of(self, slots: Iterable[int]) -> list[int]:
        """The slots of this level among some slots."""
        return [slot for slot in slots if 0 <= slot - self.first < self.slots]


LaunchLevel = Callable[[Level, Tensor | None, Tensor | None], None]
"""Launches a kernel for a level. It reads states, or their gradients, and writes the next; fp32
`[n, HV, K, V]`, None for plain documents."""


def _levels(boundaries: Boundaries) -> tuple[list[Level], Level]:
    """The levels, roots first, and the padding; for plain documents no levels, and all slots."""
    parents, levels = boundaries.parents, boundaries.levels
    every = _every_slot(boundaries)
    if parents is None or levels is None:
        return [], every
    cu_seqlens, chunks, *_ = every
    bounds: list[int] = levels.tolist()
    last, above, found = bounds[-1], 0, []
    for start, end in pairwise(bounds[: bounds.index(last) + 1]):
        of_level = parents[start:end].long() - above if start else None
        bounds_of = slice(start, end + 1)
        found.append(Level(cu_seqlens[bounds_of], chunks[bounds_of], of_level, start))
        above = start
    return found, Level(cu_seqlens[-3:-1], chunks[-3:-1])


def _every_slot(boundaries: Boundaries) -> Level:
    """All slots of a row.

    Raises:
        NotImplementedError: a CUDA graph is captured, and states pass from slot to slot.
    """
    from fla.ops.utils.index import prepare_chunk_offsets

    cu_seqlens = boundaries.cu_seqlens
    if boundaries.pass_states and cu_seqlens.is_cuda and torch.cuda.is_current_stream_capturing():
        raise NotImplementedError(
            "recurrent layers run trees level by level, and rows over ranks one rank after "
            "another, and a CUDA graph would replay this row's order for other rows; do not "
            "capture CUDA graphs, and compile without mode='reduce-overhead'."
        )
    return Level(cu_seqlens, prepare_chunk_offsets(cu_seqlens, CHUNK))


def run_levels_forward(
    boundaries: Boundaries, like: Tensor, launch: LaunchLevel, received: Tensor | None = None
) -> Tensor:
    """Run a kernel that reads the initial states of a level, and writes the final ones.

    Args:
        received: in a backward, the result of the forward, so that no rank waits for another again,
            and no part stores its states again.

    Returns:
        Over ranks, the state that the first slot starts from, `[HV, K, V]`; else `[0]`.
    """
    if boundaries.links is not None:
        if received is None:
            return _along_ranks(boundaries, like, launch)
        every = _every_slot(boundaries)
        initial = _zeros(every, like)
        initial[0] = received
        launch(every, initial, torch.empty_like(initial))
        return received
    levels, others = _levels(boundaries)
    final = like.new_empty(0)
    part, layer = boundaries.running_part(), boundaries.layer
    above, continued = None, list[int]()
    if part is not None:
        continued, in_backward = [x.slot for x in part.continued], received is not None
        expects = boundaries.expects_backward
        above = part.load_state(layer, SCAN, expects_backward=expects, in_backward=in_backward)
    kept: dict[int, Tensor] = {}
    for level in levels:
        if level.parents is not None:
            initial = final[level.parents]
        else:
            initial = _zeros(level, like)
            if above is not None:
                initial += above
        final = torch.empty_like(initial)
        launch(level, initial, final)
        kept |= {slot: final[slot - level.first] for slot in level.of(continued)}
    _run_others(boundaries, others, like, launch)
    if part is not None and received is None:
        part.store_states(layer, SCAN, (kept[slot] for slot in continued))
    return like.new_empty(0, dtype=torch.float32)


def run_levels_backward(boundaries: Boundaries, like: Tensor, launch: LaunchLevel) -> None:
    """Run a kernel that reads gradients of the final states, and writes those of the initial."""
    if boundaries.links is not None:
        _along_ranks(boundaries, like, launch, back=True)
        return
    levels, others = _levels(boundaries)
    grads, parents = like.new_empty(0), None
    part, layer = boundaries.running_part(), boundaries.layer
    below: dict[int, Tensor] = {}
    if part is not None:
        of_slots = zip(part.continued, part.pop_gradients(layer, SCAN), strict=True)
        below = {each.slot: x for each, x in of_slots if x is not None}
    for level in reversed(levels):
        final = _zeros(level, like) if parents is None else _summed(grads, parents, level.slots)
        for slot in level.of(below):
            final[slot - level.first] += below[slot]
        grads, parents = torch.empty_like(final), level.parents
        launch(level, final, grads)
    _run_others(boundaries, others, like, launch)
    if part is not None:
        part.add_gradient(layer, SCAN, grads.sum(0))


def states_like(shape: Sequence[int], like: Tensor, boundaries: Boundaries) -> Tensor:
    """An empty result of `run_levels_forward`, for states `[HV, K, V]` of this shape."""
    return like.new_empty((0,) if boundaries.links is None else shape, dtype=torch.float32)


def _run_others(boundaries: Boundaries, others: Level, like: Tensor, launch: LaunchLevel) -> None:
    """Run a kernel for plain documents, or for the padding after trees.

    The padding comes last, as Triton tunes a kernel at its first launch and the padding may be
    empty. It gets states as all levels do: without them, Triton would tune the kernel again.
    """
    if boundaries.parents is None:
        launch(others, None, None)
    else:
        zeros = _zeros(others, like)
        launch(others, zeros, torch.empty_like(zeros))


def _along_ranks(
    boundaries: Boundaries, like: Tensor, launch: LaunchLevel, *, back: bool = False
) -> Tensor:
    """Run a kernel for the slots that wait for no rank, then for the others.

    In the forward, the first slot waits for the previous rank, from whose state it starts. In the
    backward, the last document waits for the next rank; spare slots and padding run with it.

    Args:
        back: whether gradients pass, in the opposite direction.

    Returns:
        The received tensor, or zeros.
    """
    every, links = _every_slot(boundaries), BoundaryLinks.of(boundaries.links)
    if back:
        step, leaving, is_sent = -1, 0, links.continues_from_previous
        first_waiting = links.last_slot if links.continues_on_next else every.slots
        ready, waiting = range(first_waiting), range(first_waiting, every.slots)
    else:
        step, leaving, is_sent = 1, links.last_slot, links.continues_on_next
        waiting = range(links.continues_from_previous)
        ready = range(len(waiting), every.slots)
    works, received = [], like.new_zeros(like.shape[2:], dtype=torch.float32)
    for slots in (ready, waiting):
        if not slots:
            continue
        bounds = slice(slots.start, slots.stop + 1)
        level = Level(every.cu_seqlens[bounds], every.chunk_offsets[bounds])
        given = _zeros(level, like)
        if slots is waiting:
            received = given[0]
            receive(received, -step, boundaries.group).wait()
        found = torch.empty_like(given)
        launch(level, given, found)
        if is_sent and leaving in slots:
            works.append(send(found[leaving - slots.start], step, boundaries.group))
    for work in works:
        work.wait()
    return received


def _zeros(level: Level, like: Tensor) -> Tensor:
    return like.new_zeros(level.slots, *like.shape[2:], dtype=torch.float32)


def _summed(grads: Tensor, parents: Tensor, slots: int) -> Tensor:
    """Gradients of the final states of `slots` slots, summed over their children's states.

    The children of a segment follow one another, so each sum runs in their order.
    """
    offsets = torch.searchsorted(parents, torch.arange(slots + 1, device=grads.device))
    return torch.segment_reduce(grads, "sum", offsets=offsets, axis=0, initial=0)
