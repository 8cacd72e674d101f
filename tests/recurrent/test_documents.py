"""`RecurrentDocuments`: boundaries and chunks for kernels that go over all tokens."""

from __future__ import annotations

import torch
from hypothesis import assume, given

from flexvarlen.recurrent.documents import CHUNK
from tests.recurrent.cases import LENGTHS, TREE, T, branches, documents
from tests.trees import trees


def test_chunk_indices():
    docs = documents()
    lengths = docs.cu_seqlens.diff().tolist()
    assert (sum(lengths), lengths[-1]) == (T, 0)
    real = [[i, n] for i, length in enumerate(lengths) for n in range(-(-length // CHUNK))]
    assert docs.chunk_indices[: len(real)].tolist() == real
    empty = len(lengths) - 1
    assert len(real) < len(docs.chunk_indices) == T // CHUNK + empty
    assert (docs.chunk_indices[len(real) :, 0] == empty).all()


def test_padding():
    docs = documents()
    real = sum(LENGTHS)
    assert docs.padding.tolist() == [False] * real + [True] * (T - real)
    assert documents((T,)).padding is None
    x = torch.ones(1, T, 2, requires_grad=True)
    zeroed = docs.zero_padding(x)
    zeroed.sum().backward()
    for found in (zeroed, x.grad):
        assert found[0, :, 0].tolist() == [1.0] * real + [0.0] * (T - real)


def test_the_token_before():
    docs = documents()
    firsts = {*docs.cu_seqlens.tolist()}
    assert docs.previous.tolist() == [-1 if i in firsts else i - 1 for i in range(T)]
    assert docs.next_tokens is None


@given(trees())
def test_tokens_of_a_path(tree):
    """By its table each token finds all before it, and by the lists those that follow it."""
    assume(tree.total_tokens)
    docs = branches(tree)
    order = docs.tokens.order.tolist()  # where the row has each token
    previous = docs.previous.tolist()
    starts, codes = (x.tolist() for x in docs.next_tokens)
    expected = {}
    for segment, length in enumerate(tree.lengths):
        path = tree.path_of(segment)
        expected |= {x: path[:at] for at, x in enumerate(path) if at >= len(path) - length}
    followers = {token: set() for token in expected}
    for token, before in expected.items():
        for distance in (1, 2, 3):
            if distance <= len(before):
                followers[before[-distance]].add((token, distance))
    for at, token in enumerate(order[: sum(tree.lengths)]):
        found, index = [], previous[at]
        while index >= 0:
            found.append(order[index])
            index = previous[index]
        assert found[::-1] == expected[token]
        listed = [divmod(x, 4) for x in codes[starts[at] : starts[at + 1]]]
        own = {(order[x], distance) for x, distance in listed}
        assert len(own) == len(listed)
        linked = at
        for distance in (1, 2, 3):
            if linked + 1 == len(order) or previous[linked + 1] != linked:
                break
            linked += 1
            own.add((order[linked], distance))
        assert own == followers[token]


def test_the_order_of_levels():
    docs = branches()
    x = torch.arange(T, dtype=torch.float64).view(1, T, 1).requires_grad_()
    ordered = docs.tokens.enter(x)
    depths = [0, 1, 2, 2, 3, 4, 1, 0]
    by_level = sorted(range(len(depths)), key=depths.__getitem__)
    starts = [sum(TREE.lengths[:segment]) for segment in by_level]
    tokens = [s + i for s, n in zip(starts, by_level, strict=True) for i in range(TREE.lengths[n])]
    assert ordered.flatten().tolist() == [*tokens, *range(140, T)]
    assert torch.equal(docs.tokens.leave(ordered), x)
    weights = torch.rand(1, T, 1, dtype=torch.float64)
    (ordered * weights).sum().backward()
    assert torch.equal(x.grad, docs.tokens.leave(weights))


def test_another_device():
    docs = documents()
    moved = docs.to("meta")
    assert {x.device.type for x in (moved.cu_seqlens, moved.previous)} == {"meta"}
    table = branches().to("meta").tokens.inverse
    assert table.device.type == "meta"
    assert docs.to("cpu") is docs
    assert docs.to(None) is docs
