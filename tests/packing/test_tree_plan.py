"""Plans of trees in parts: each token in one part, below one path, and no part too large."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexvarlen.trees.plan import plan_parts
from tests.trees import Tree, trees


def parts_of(plan):
    """All parts, those above first."""
    found = list(plan.roots)
    for part in found:
        found += part.below
    return found


@given(trees(), st.integers(1, 100))
def test_each_token_is_in_one_part_below_one_path(tree, max_tokens):
    plan = plan_parts(tree.lengths, tree.parents, max_tokens)
    parts = parts_of(plan)
    assert sorted(x for part in parts for x in part.segments) == list(range(len(plan.lengths)))
    assert sum(plan.lengths) == sum(tree.lengths)
    cut = Tree(plan.lengths, plan.parents)
    assert [len(x) for x in map(cut.path_of, cut.leaves())] == [
        len(x) for x in map(tree.path_of, tree.leaves())
    ]
    for part in parts:
        assert sum(plan.lengths[x] for x in part.segments) <= max_tokens
        for segment in part.segments:
            above = [x for x in paths(plan, segment) if x not in part.segments]
            assert tuple(above) == part.path
        held = {x for below in parts for x in below.path}
        assert set(part.continued) == held & set(part.segments)


def paths(plan, segment):
    """The segments above one, from the root."""
    path, above = [], plan.parents[segment]
    while above >= 0:
        path.append(above)
        above = plan.parents[above]
    return path[::-1]


@pytest.mark.parametrize(
    ("lengths", "parents", "max_tokens", "expected"),
    [
        ([4, 3, 3], [-1, 0, 0], 10, [(0, 1, 2)]),
        ([4, 3, 3, 3], [-1, 0, 0, 0], 10, [(0, 1, 2), (3,)]),
        ([4, 3, 3, 3, 3], [-1, 0, 0, 0, 0], 7, [(0, 1), (2, 3), (4,)]),
        ([5, 5, 5], [-1, -1, -1], 10, [(0, 1), (2,)]),
        ([10, 2], [-1, 0], 4, [(0,), (1,), (2, 3)]),  # a chain of 4, 4 and 2 tokens
        ([3, 9, 1, 1], [-1, 0, 1, 1], 10, [(0,), (1, 2), (3,)]),
    ],
)
def test_few_parts(lengths, parents, max_tokens, expected):
    plan = plan_parts(lengths, parents, max_tokens)
    assert sorted(part.segments for part in parts_of(plan)) == expected
