"""States pass from segment to segment, level by level, whatever kernel computes them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given

from flexvarlen.layout.running_part import begin_part, end_part
from flexvarlen.recurrent.documents import CHUNK
from flexvarlen.recurrent.fla_kernels import levels
from flexvarlen.recurrent.fla_kernels.levels import Boundaries
from tests.recurrent.cases import branches, chunk_offsets, stand_in_for_fla
from tests.trees import Tree, trees


@pytest.fixture(autouse=True, scope="module")
def fla_without_kernels():
    with pytest.MonkeyPatch.context() as patch:
        stand_in_for_fla(patch)
        yield


def by_slot(walk, docs):
    """What a kernel that adds a slot's number of tokens to a state writes for each slot."""
    boundaries, launched, written = Boundaries.of(docs), [], []

    def run(level, read, out):
        sizes = level.cu_seqlens.diff()
        chunks = chunk_offsets(docs.cu_seqlens, CHUNK)
        assert set(level.chunk_offsets.tolist()) <= set(chunks.tolist())
        assert torch.equal(level.chunk_offsets.diff(), -(-sizes // CHUNK))
        torch.add(read, sizes.view(-1, 1, 1, 1), out=out)
        launched.append(level)
        written.append(out.flatten())

    walk(boundaries, torch.zeros(1, len(docs.chunk_indices), 1, 1, 1), run)
    assert int(launched[-1].cu_seqlens[0]) == sum(docs.layout.segments.lengths)  # spare slots
    ordered = written[:-1] if walk is levels.run_levels_forward else written[-2::-1]
    return torch.cat([*ordered, written[-1]]).tolist()


@given(trees(most_tokens=150))
def test_a_state_of_another_segment(tree):
    """A final state adds up what is above a segment, its gradient what is below it."""
    docs = branches(tree)
    index = docs.layout.segments.by_level.table[3].tolist()
    final, grads = (
        by_slot(walk, docs) for walk in (levels.run_levels_forward, levels.run_levels_backward)
    )
    below = list(tree.lengths)
    for segment in reversed(range(len(below))):
        if tree.parents[segment] >= 0:
            below[tree.parents[segment]] += below[segment]
    for segment in range(len(below)):
        assert final[index[segment]] == len(tree.path_of(segment))
        assert grads[index[segment]] == below[segment]


class Part:
    """A part of a tree below a state of 1000, whose segments get the gradients 1, 2, …"""

    number = torch.tensor(-1)

    def __init__(self, slots):
        self.continued = [SimpleNamespace(slot=slot) for slot in slots]
        self.loaded, self.stored, self.gradient = [], None, None

    def load_state(self, layer, name, *, expects_backward, in_backward):
        self.loaded.append(((layer, name), expects_backward and not in_backward, in_backward))
        return torch.full((1, 1, 1), 1000.0)

    def store_states(self, layer, name, states):
        assert self.stored is None
        self.stored = torch.stack([*states]).flatten().tolist()

    def pop_gradients(self, layer, name):
        return [torch.full((1, 1, 1), 1.0 + i) for i in range(len(self.continued))]

    def add_gradient(self, layer, name, gradient):
        self.gradient = int(gradient)


@given(trees(most_tokens=150))
def test_a_part_of_a_tree(tree):
    """Roots start from the state above, and the last segments' states and gradients pass on."""
    docs = branches(tree)
    index = docs.layout.segments.by_level.table[3].tolist()
    last = [segment for segment in range(len(tree.lengths)) if segment not in tree.parents]
    part = Part([index[segment] for segment in last])
    begin_part(part)
    boundaries = Boundaries.of(docs)._replace(part=part.number, layer=3, expects_backward=True)

    def run(level, read, out):
        torch.add(read, level.cu_seqlens.diff().view(-1, 1, 1, 1), out=out)

    like = torch.zeros(1, len(docs.chunk_indices), 1, 1, 1)
    none = levels.run_levels_forward(boundaries, like, run)
    assert part.stored == [1000 + len(tree.path_of(segment)) for segment in last]
    levels.run_levels_forward(boundaries, like, run, none)
    levels.run_levels_backward(boundaries, like, run)
    assert part.loaded == [((3, "scan"), True, False), ((3, "scan"), False, True)]
    assert part.gradient == sum(range(1, 1 + len(last))) + sum(tree.lengths)
    end_part(part)


def test_a_cuda_graph_of_one_tree(monkeypatch):
    """It would replay the levels of the tree that it is captured with."""
    boundaries = Boundaries.of(branches(Tree((5, 3), (-1, 0))))
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(NotImplementedError, match="CUDA graph"):
        levels.run_levels_forward(boundaries, torch.zeros(1), None)
