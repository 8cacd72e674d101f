"""Documents of a stream: each in one row, in bounded memory, resumable at any row."""

from __future__ import annotations

import json
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import flexvarlen as fv


def packer(lengths, capacity=64, buffer=16):
    return fv.StreamPacker(capacity, buffer=buffer, length=lengths.__getitem__)


LENGTHS = st.lists(st.integers(1, 64), max_size=120)


@given(LENGTHS, st.integers(1, 30))
def test_every_document_is_in_one_row(lengths, buffer):
    rows = list(packer(lengths, buffer=buffer).pack(range(len(lengths))))
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in row) <= 64 for row in rows)


@given(LENGTHS, st.integers(1, 30), st.data())
def test_resumed_rows_are_those_of_a_run_that_was_not_stopped(lengths, buffer, data):
    whole = list(packer(lengths, buffer=buffer).pack(range(len(lengths))))
    stop = data.draw(st.integers(0, len(whole)))
    first = packer(lengths, buffer=buffer)
    rows = first.pack(range(len(lengths)))
    before = [next(rows) for _ in range(stop)]
    state = json.loads(json.dumps(first.state_dict()))  # as a checkpoint keeps it
    later = packer(lengths, buffer=buffer)
    later.load_state_dict(state)
    after = list(later.pack(later.skip(range(len(lengths)))))
    assert before + after == whole


def test_a_state_does_not_change_with_later_rows():
    lengths = [40] * 30
    stream = packer(lengths, buffer=4)
    rows = stream.pack(range(30))
    next(rows)
    state = stream.state_dict()
    kept = json.dumps(state)
    list(rows)
    assert json.dumps(state) == kept


def test_no_more_than_the_buffer_waits_and_the_stream_is_read_as_needed():
    lengths = [5] * 1000
    stream = packer(lengths, buffer=50)
    for count, _ in enumerate(stream.pack(range(1000)), 1):
        state = stream.state_dict()
        held = len(state["waiting"]) + sum(map(len, state["ready"]))
        assert held <= 50
        assert state["num_given"] <= count * 12 + 50


def test_a_second_stream_is_resumed_at_its_own_place():
    lengths = [30] * 40
    stream = packer(lengths, buffer=8)
    assert len(list(stream.pack(range(40)))) == 20
    rows = stream.pack(range(40))
    first = [next(rows) for _ in range(7)]
    later = packer(lengths, buffer=8)
    later.load_state_dict(stream.state_dict())
    rest = list(later.pack(later.skip(range(40))))
    assert sorted(index for row in first + rest for index in row) == list(range(40))


def test_no_document_waits_for_ever():
    """One that fits nothing else leaves with the buffer after the one that it came in."""
    lengths = [33] + [64] * 200
    for count, row in enumerate(packer(lengths, buffer=8).pack(range(201))):
        if 0 in row:
            assert count < 8
            return
    pytest.fail("document 0 never came out")


def test_a_buffer_of_documents_fills_rows():
    drawn = np.random.default_rng(0).lognormal(np.log(500) - 0.5, 1.0, 20_000)
    lengths = np.clip(drawn.round(), 1, 4096).astype(int).tolist()
    rows = list(packer(lengths, 4096, buffer=2048).pack(range(len(lengths))))
    assert sum(lengths) / (4096 * len(rows)) >= 0.995


def test_a_document_too_long_raises_and_loses_none_before_it():
    lengths = [64, 64, 65]
    stream = packer(lengths, buffer=2)
    rows = stream.pack(range(3))
    assert next(rows) == [0]
    with pytest.raises(ValueError, match="cut long documents with split_long"):
        next(rows)
    assert stream.num_given == 2
    assert list(stream.pack([])) == [[1]]


def test_a_state_of_other_rows_or_another_stream_is_a_sentence():
    stream = packer([1], capacity=8)
    next(stream.pack([0]))
    state = stream.state_dict()
    with pytest.raises(ValueError, match="state must be of capacity 16, got 8"):
        packer([1], capacity=16).load_state_dict(state)
    with pytest.raises(ValueError, match="state must be of buffer 5, got 16"):
        packer([1], capacity=8, buffer=5).load_state_dict(state)
    with pytest.raises(ValueError, match="the stream that the state was saved for, at least 1 "):
        stream.skip([])
    with pytest.raises(ValueError, match="buffer must be an integer of at least 1"):
        fv.StreamPacker(8, buffer=0, length=len)


class Stream(IterableDataset):
    """12 documents, all of them to each worker, or a share."""

    def __init__(self, *, shared):
        self.shared = shared

    def __iter__(self):
        documents = range(12)
        if self.shared and (worker := get_worker_info()) is not None:
            documents = islice(documents, worker.id, None, worker.num_workers)
        return packer([20] * 12, buffer=4).pack(documents, worker_share=self.shared)


@pytest.mark.parametrize(("shared", "workers"), [(False, 0), (False, 1), (True, 0), (True, 2)])
def test_loader_workers_give_each_document_once(shared, workers):
    loader = DataLoader(Stream(shared=shared), batch_size=None, num_workers=workers)
    assert sorted(int(index) for row in loader for index in row) == list(range(12))


def test_loader_workers_that_would_each_give_every_document_are_a_sentence():
    loader = DataLoader(Stream(shared=False), batch_size=None, num_workers=2)
    with pytest.raises(ValueError, match="documents must be a shard of the stream") as caught:
        list(loader)
    assert "got no worker_share=True in 2 of them; pass islice" in str(caught.value)
