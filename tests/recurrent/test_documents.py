"""`RecurrentDocuments`: boundaries and chunks for kernels that go over all tokens."""

from __future__ import annotations

import torch

from flexvarlen.recurrent.documents import CHUNK
from tests.recurrent.cases import LENGTHS, T, documents


def test_chunk_indices():
    docs = documents()
    lengths = docs.cu_seqlens.diff().tolist()
    assert (sum(lengths), lengths[-1]) == (T, 0)
    real = [[i, n] for i, length in enumerate(lengths) for n in range(-(-length // CHUNK))]
    assert docs.chunk_indices[: len(real)].tolist() == real
    empty = len(lengths) - 1
    assert len(real) < len(docs.chunk_indices) == T // CHUNK + empty
    assert (docs.chunk_indices[len(real) :, 0] == empty).all()


def test_padding_and_offsets():
    docs = documents()
    offsets = [i for length in LENGTHS for i in range(length)]
    assert docs.offsets[: len(offsets)].tolist() == offsets
    assert docs.padding.tolist() == [False] * len(offsets) + [True] * (T - len(offsets))
    assert documents((T,)).padding is None
    x = torch.ones(1, T, 2, requires_grad=True)
    zeroed = docs.zero_padding(x)
    zeroed.sum().backward()
    for found in (zeroed, x.grad):
        assert found[0, :, 0].tolist() == [1.0] * len(offsets) + [0.0] * (T - len(offsets))


def test_another_device():
    docs = documents()
    moved = docs.to("meta")
    assert {x.device.type for x in (moved.cu_seqlens, moved.offsets, moved.seq_idx)} == {"meta"}
    assert docs.to("cpu") is docs
    assert docs.to(None) is docs
