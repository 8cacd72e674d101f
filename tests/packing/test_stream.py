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
from tests.packing.test_pieces import first_tokens, of_iterable

datasets = pytest.importorskip("datasets", reason="needs datasets: pip install datasets")


def numbered(lengths):
    """Documents whose tokens are all their own number."""
    return [[number] * n for number, n in enumerate(lengths)]


def packer(lengths, tokens=64, buffer=16):
    return fv.StreamPacker(numbered(lengths), tokens, buffer=buffer)


LENGTHS = st.lists(st.integers(2, 64), min_size=1, max_size=120)


@given(LENGTHS, st.integers(1, 30))
def test_every_document_is_in_one_row(lengths, buffer):
    rows = list(packer(lengths, buffer=buffer))
    assert sorted(x for row in first_tokens(rows) for x in row) == list(range(len(lengths)))
    assert all(sum(len(x["input_ids"]) for x in row) <= 64 for row in rows)


@given(LENGTHS, st.integers(1, 30), st.data())
def test_resumed_rows_are_those_of_a_run_that_was_not_stopped(lengths, buffer, data):
    whole = first_tokens(packer(lengths, buffer=buffer))
    stop = data.draw(st.integers(0, len(whole)))
    first = packer(lengths, buffer=buffer)
    rows = iter(first)
    before = first_tokens(next(rows) for _ in range(stop))
    state = json.loads(json.dumps(first.state_dict()))  # as a checkpoint keeps it
    later = packer(lengths, buffer=buffer)
    later.load_state_dict(state)
    assert before + first_tokens(later) == whole
    assert first_tokens(later) == whole  # the next epoch


def test_the_epoch_is_resumed():
    table = datasets.Dataset.from_list([{"input_ids": x} for x in numbered([20] * 12)])

    def stream():
        return fv.StreamPacker(table.to_iterable_dataset().shuffle(seed=3), 64, buffer=4)

    whole = stream()
    epochs = []
    for epoch in range(3):
        whole.set_epoch(epoch)
        epochs.append(first_tokens(whole))
    assert epochs[0] != epochs[1] != epochs[2]
    first = stream()
    first.set_epoch(1)
    before = first_tokens(islice(first, 2))
    later = stream()
    later.load_state_dict(first.state_dict())
    with pytest.raises(ValueError, match=r"epoch must be 1, which load_state_dict resumed .*got 0"):
        later.set_epoch(0)
    assert before + first_tokens(later) == epochs[1]
    later.set_epoch(2)
    assert first_tokens(later) == epochs[2]


def test_no_more_than_the_buffer_waits_and_the_stream_is_read_as_needed():
    read = []

    def stream():
        for document in numbered([5] * 1000):
            read.append(document)
            yield document

    for count, _ in enumerate(fv.StreamPacker(stream(), 64, buffer=50), 1):
        assert len(read) <= count * 12 + 50


def test_no_document_waits_for_ever():
    """One that fits nothing else leaves with the buffer after the one that it came in."""
    rows = first_tokens(islice(packer([33] + [64] * 200, buffer=8), 8))
    assert [0] in rows


def test_a_buffer_of_documents_fills_rows():
    drawn = np.random.default_rng(0).lognormal(np.log(500) - 0.5, 1.0, 5_000)
    lengths = np.clip(drawn.round(), 2, 4096).astype(int).tolist()
    rows = list(packer(lengths, 4096, buffer=1024))
    assert sum(lengths) / (4096 * len(rows)) >= 0.995


def test_a_stream_without_labels_ends():
    """Also an endless one, and in loader workers."""

    def endless():
        while True:
            yield {"input_ids": [1, 2], "labels": [-100, -100]}

    class Endless(IterableDataset):
        def __iter__(self):
            return endless()

    message = "labels that are not -100, but the first 9 examples have none; .*long='split'"
    with pytest.raises(ValueError, match=message):
        next(iter(fv.StreamPacker(endless(), 8, buffer=9)))
    stream = fv.StreamPacker(Endless(), 8, buffer=9)
    with pytest.raises(ValueError, match=message):
        next(iter(DataLoader(stream, batch_size=None, num_workers=1)))


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        (7, {}, "dataset must be an iterable .*, got int; "),
        (iter([]), {}, "dataset must contain at least one example; .* was not read before"),
        ([[1, 2]], {"buffer": 0}, "buffer must be an integer of at least 1, got 0; "),
    ],
)
def test_what_is_refused(dataset, options, message):
    with pytest.raises(ValueError, match=message):
        list(fv.StreamPacker(dataset, 8, **options))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_second_pass_over_an_iterator_is_a_sentence(workers):
    """It would have the rows that are left, or none: a worker that persists yields nothing."""
    stream = fv.StreamPacker(iter(numbered([5] * 4)), 8)
    loader = DataLoader(
        stream, batch_size=None, num_workers=workers, persistent_workers=bool(workers)
    )
    assert len(list(loader)) == 4
    with pytest.raises(
        ValueError, match=r"each pass can read .*, got a list_iterator that .*; pass"
    ):
        list(loader)


def test_a_state_of_other_rows_or_another_stream_is_a_sentence():
    stream = packer([2, 3], tokens=4)
    next(iter(stream))
    state = stream.state_dict()
    with pytest.raises(ValueError, match="tokens must be 4, as when the state was saved, got 16"):
        packer([2], tokens=16).load_state_dict(state)
    with pytest.raises(ValueError, match="buffer must be 16, as when the state was saved, got 5"):
        packer([2], tokens=4, buffer=5).load_state_dict(state)
    shorter = packer([2], tokens=4)
    shorter.load_state_dict(state | {"rows": 2})
    with pytest.raises(
        ValueError, match="the stream that the state was saved for, but its first 2 rows"
    ):
        next(iter(shorter))


class Sharded(IterableDataset):
    """12 documents, of which a worker gives its share."""

    def __iter__(self):
        worker = get_worker_info()
        share = (worker.id, None, worker.num_workers) if worker else (None,)
        return islice(numbered([20] * 12), *share)


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("source", ["list", "sharded", "datasets"])
def test_loader_workers_give_each_document_once(source, workers):
    rows = numbered([20] * 12)
    dataset = {"list": rows, "sharded": Sharded()}.get(source)
    dataset = dataset or of_iterable([{"input_ids": x} for x in rows])
    stream = fv.StreamPacker(dataset, 64, buffer=4)
    loader = DataLoader(stream, batch_size=2, num_workers=workers, collate_fn=fv.PackedCollator())
    found = []
    for batch in loader:
        parts = batch["packed_layout"].split(batch["input_ids"][0])
        found += [int(part[0]) for part in parts if len(part)]
    assert sorted(found) == list(range(12))


def test_state_of_a_stream_that_workers_pack_is_refused():
    """The main process would say that no row was yielded, and all would come again."""
    stream = fv.StreamPacker([[1, 2, 3]] * 8, 3)
    assert len(list(DataLoader(stream, batch_size=None, num_workers=1))) == 8
    with pytest.raises(ValueError, match="num_workers must be 0 to save the state"):
        stream.state_dict()
    assert len(list(stream)) == stream.state_dict()["rows"] == 8
