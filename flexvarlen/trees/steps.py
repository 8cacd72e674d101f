"""The forwards of a loop over the parts of a tree, in their order; on the host."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from flexvarlen.trees.plan import PlannedPart, TreePlan


class Step(NamedTuple):
    """One forward of the loop.

    Attributes:
        part: that it runs; None if only other ranks have one in this step.
        is_first_pass: whether it runs without gradients, only to store keys and states.
        stores: whether it stores the keys and states of the segments that other parts continue.
        done: segments whose keys and states no later step needs.
    """

    part: PlannedPart | None
    is_first_pass: bool = False
    stores: bool = False
    done: tuple[int, ...] = ()

    @property
    def segments(self) -> tuple[int, ...]:
        """The segments that run."""
        if self.part is None:
            return ()
        return self.part.continued if self.is_first_pass else self.part.segments


def steps_of(plan: TreePlan, *, trains: bool) -> list[Step]:
    """The steps of a rank, depth first.

    Args:
        plan: of its trees.
        trains: whether the segments that other parts continue run first, and their part after those
            parts; else each part runs once, before those that continue it.

    >>> from flexvarlen.trees.plan import plan_parts
    >>> plan = plan_parts([4, 3, 3, 2], [-1, 0, 0, 0], max_tokens=7)
    >>> [step.segments for step in steps_of(plan, trains=True)]
    [(0,), (2, 3), (0, 1)]
    >>> [step.segments for step in steps_of(plan, trains=False)]
    [(0, 1), (2, 3)]
    """
    steps: list[Step] = []
    # A stack, as a conversation of many turns is a deep tree.
    waiting = [(part, False) for part in reversed(plan.roots)]
    while waiting:
        part, visited = waiting.pop()
        if part.below and not visited:
            waiting += [(part, True), *((each, False) for each in reversed(part.below))]
            steps.append(Step(part, is_first_pass=trains, stores=True))
        elif visited and not trains:
            steps[-1] = steps[-1]._replace(done=(*steps[-1].done, *part.continued))
        else:
            steps.append(Step(part, done=part.continued))
    return steps


def common_schedule(schedules: Sequence[Sequence[bool]]) -> list[bool]:
    """A schedule that contains each rank's in order: for each step, whether it is a first pass.

    In each step, the rank that has the most steps left decides.

    >>> common_schedule([[True, False, False], [False]])
    [True, False, False]
    """
    left = [deque(own) for own in schedules]
    common: list[bool] = []
    while longest := max(left, key=len, default=None):
        common.append(longest[0])
        for own in left:
            if own and own[0] == common[-1]:
                own.popleft()
    return common


def fill_steps(own: Sequence[Step], schedule: Sequence[bool]) -> Iterator[Step]:
    """A rank's steps, and an empty one wherever the schedule has a step of the other kind."""
    left = deque(own)
    for is_first_pass in schedule:
        if left and left[0].is_first_pass == is_first_pass:
            yield left.popleft()
        else:
            yield Step(None, is_first_pass)
