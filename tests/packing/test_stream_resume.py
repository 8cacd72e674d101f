"""A stream that is stopped anywhere and resumed gives the rows of one that was not."""

from __future__ import annotations

import json
from functools import partial
from itertools import islice

import numpy as np
import pytest
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer, TrainingArguments

import flexvarlen as fv
from flexvarlen.packing import stream as module
from tests.contract_training import forget_accelerate, settings
from tests.packing.test_pieces import first_tokens
from tests.slow import with_slow
from tests.tiny_models import new_model

datasets = pytest.importorskip("datasets", reason="needs datasets: pip install datasets")
from datasets.distributed import split_dataset_by_node  # noqa: E402

COUNT, SHARDS = 40, 3
LENGTHS = np.random.default_rng(0).integers(2, 33, COUNT).tolist()
DOCUMENTS = [[number + 1] * n for number, n in enumerate(LENGTHS)]
NUMBERS = list(range(1, COUNT + 1))


class Reordered(IterableDataset):
    """In another order in each epoch; without a state."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = np.random.default_rng(self.epoch).permutation(COUNT)
        return (DOCUMENTS[i] for i in order)


def of_datasets():
    table = datasets.Dataset.from_list([{"input_ids": x} for x in DOCUMENTS])
    return table.to_iterable_dataset(num_shards=SHARDS)


def half(dataset, rank):
    """A rank's documents."""
    if isinstance(dataset, datasets.IterableDataset):
        return split_dataset_by_node(dataset, rank, 2)
    return dataset[rank::2]


SOURCES = {
    "list": lambda: DOCUMENTS,
    "reordered": Reordered,
    "datasets": of_datasets,
    "shuffled": lambda: of_datasets().shuffle(seed=1, buffer_size=20),
}


@pytest.fixture(autouse=True)
def short_segments(monkeypatch):
    """Of 16 examples, the buffer's four times."""
    monkeypatch.setattr(module, "SEGMENT", 1)


def packer(source, passes=1, rank=None):
    dataset = SOURCES[source]()
    share = dataset if rank is None else half(dataset, rank)
    return fv.StreamPacker(share, 64, buffer=4, passes=passes)


def numbers(rows):
    return sorted(x for row in rows for x in row)


def check_every_stop(make):
    """All rows; those after each are the ones of a run that was not stopped there."""
    whole, first = first_tokens(make()), make()
    rows = iter(first)
    for stop in range(len(whole) + 1):
        state = json.dumps(first.state_dict())  # as a checkpoint keeps it
        assert len(state) < 3000
        later = make()
        later.load_state_dict(json.loads(state))
        assert first_tokens(later) == whole[stop:], stop
        next(rows, None)
    assert first_tokens(later) == whole  # the next iteration
    return whole


@pytest.mark.parametrize("source", with_slow(SOURCES, ["datasets"]))  # shuffled: a dataset too
def test_rows_after_any_row_of_two_passes(source):
    whole = check_every_stop(lambda: packer(source, passes=2))
    assert numbers(whole) == sorted(NUMBERS * 2)
    second = packer(source)
    second.set_epoch(1)
    rows = first_tokens(second)
    assert whole[-len(rows) :] == rows


@pytest.mark.parametrize("source", with_slow(["list", "datasets", "shuffled"], ["datasets"]))
def test_ranks_share_the_documents(source):
    found = []
    for rank in range(2):
        found += check_every_stop(partial(packer, source, 1, rank))
    assert numbers(found) == NUMBERS


def test_a_stream_of_datasets_continues_from_its_state():
    """Files that were read before the last two segments are not opened again."""
    opened = []

    def read(files):
        for file in files:
            opened.append(file)
            yield from ({"input_ids": x} for x in DOCUMENTS[file * 5 : file * 5 + 5])

    def stream():
        files = {"files": list(range(COUNT // 5))}
        return fv.StreamPacker(
            datasets.IterableDataset.from_generator(read, gen_kwargs=files), 64, buffer=4
        )

    whole = first_tokens(stream())
    first, later = stream(), stream()
    before = first_tokens(islice(first, len(whole) - 1))
    later.load_state_dict(first.state_dict())
    opened.clear()
    assert before + first_tokens(later) == whole
    assert min(opened) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"workers": 2}, "num_workers must be 2, as when the state was saved, got 0; resume"),
        ({"buffer": 5}, "buffer must be 5, as when the state was saved, got 4"),
        ({"crc": 1}, "its first 9 rows are not those that were yielded"),
        ({"rows": 8}, "its first 8 rows are not those that were yielded"),
    ],
)
def test_a_state_of_another_run_is_a_sentence(change, message):
    stream = packer("list")
    list(islice(stream, 9))
    later = packer("list")
    with pytest.raises(ValueError, match=message):  # noqa: PT012 - either may
        later.load_state_dict(stream.state_dict() | change)
        next(iter(later))


def test_passes_of_an_iterator_are_refused():
    with pytest.raises(ValueError, match=r"passes must be 1 for an iterator, .*, got None; pass"):
        fv.StreamPacker(iter(DOCUMENTS), 64, passes=None)


def collate(rows):
    return first_tokens(rows)


def stateful(source, workers, passes=1):
    """A packer, and torchdata's loader of it."""
    torchdata = pytest.importorskip("torchdata.stateful_dataloader", reason="needs torchdata")
    stream = packer(source, passes)
    return stream, torchdata.StatefulDataLoader(
        stream, batch_size=2, num_workers=workers, collate_fn=collate
    )


@pytest.mark.parametrize(
    ("source", "workers"),
    [
        *((source, 0) for source in SOURCES),
        ("list", 2),
        *(
            pytest.param(source, workers, marks=pytest.mark.slow)
            for source, workers in [("reordered", 2), ("shuffled", 2), ("datasets", SHARDS + 1)]
        ),  # the last with a worker more than there are shards
    ],
)
def test_torchdata_resumes_in_the_second_epoch(source, workers):
    stream, loader = stateful(source, workers)
    whole = []
    for epoch in range(3):
        stream.set_epoch(epoch)
        whole.append(list(loader))
        assert workers or numbers(row for batch in whole[-1] for row in batch) == NUMBERS
    assert (whole[0] != whole[1]) == (source in ("shuffled", "reordered"))
    end = len(whole[1])
    for stop in (1, end - 2, end) if workers else range(end + 1):
        stream, loader = stateful(source, workers)
        stream.set_epoch(1)
        batches = iter(loader)
        before = [next(batches) for _ in range(stop)]
        later, resumed = stateful(source, workers)
        resumed.load_state_dict(loader.state_dict())
        later.set_epoch(1)
        assert before + list(resumed) == whole[1], stop
        if stop == end - 2:
            later.set_epoch(2)
            assert list(resumed) == whole[2]


# Workers in the middle of an epoch may take ten seconds to end, beside threads of gloo.
@pytest.mark.parametrize("workers", with_slow([0, 2], [2]))
def test_a_loop_that_begins_with_another_epoch_is_a_sentence(workers):
    """The loader gives the state to the stream after set_epoch; the epoch would be run twice."""
    stream, loader = stateful("list", workers)
    stream.set_epoch(1)
    next(batches := iter(loader))
    state = loader.state_dict()
    del batches
    later, resumed = stateful("list", workers)
    resumed.load_state_dict(state)
    later.set_epoch(0)
    with pytest.raises(ValueError, match=r"epoch must be 1, which load_state_dict .*, got 0"):
        list(resumed)


def test_a_state_of_the_end_and_the_next_epoch():
    first, later = packer("reordered"), packer("reordered")
    list(first)
    first.set_epoch(1)
    later.load_state_dict(json.loads(json.dumps(first.state_dict())))
    later.set_epoch(1)
    assert first_tokens(later) == first_tokens(first)


def by_accelerate(loader, **options):
    config = DataLoaderConfiguration(dispatch_batches=False, **options)
    return Accelerator(cpu=True, dataloader_config=config).prepare(loader)


def test_a_batch_that_accelerate_reads_ahead_is_a_sentence(fresh_accelerate):
    stream = packer("list")
    loader = by_accelerate(DataLoader(stream, batch_size=2, collate_fn=collate))
    next(batches := iter(loader))
    with pytest.raises(ValueError, match="pass DataLoaderConfiguration"):
        stream.state_dict()
    list(batches)
    assert stream.state_dict()["has_ended"]


def test_batches_of_several_passes_are_skipped(fresh_accelerate):
    whole = list(by_accelerate(DataLoader(packer("list", 2), collate_fn=collate)))
    stop = 2 * len(whole) // 3
    loader = by_accelerate(DataLoader(packer("list", 2), collate_fn=collate))
    assert list(skip_first_batches(loader, stop)) == whole[stop:]


def test_accelerate_resumes_in_the_second_epoch(fresh_accelerate):
    """Its loader asks for a state before the epoch is set, and reads a batch ahead."""
    pytest.importorskip("torchdata.stateful_dataloader", reason="needs torchdata")

    def prepared():
        loader = DataLoader(packer("shuffled"), batch_size=2, collate_fn=collate)
        loader = by_accelerate(loader, use_stateful_dataloader=True)
        loader.set_epoch(1)
        return loader

    whole = list(prepared())
    for stop in range(1, len(whole)):
        first, later = prepared(), prepared()
        before = list(islice(first, stop))
        later.load_state_dict(first.state_dict())
        assert before + list(later) == whole, stop


def test_trainer_beyond_the_only_pass_is_a_sentence(fresh_accelerate, tmp_path):
    """It would train on the second pass from its beginning."""

    def train(checkpoint=None):
        forget_accelerate()
        changes = {"max_steps": 6, "save_strategy": "steps", "save_steps": 5}
        Trainer(
            fv.patch_model(new_model("qwen3"), "sdpa"),
            TrainingArguments(**settings(tmp_path, **changes)),
            train_dataset=packer("list"),
            data_collator=fv.PackedCollator(),
        ).train(checkpoint)

    train()
    with pytest.raises(ValueError, match=r"passes must be None to skip 20 rows .* of 13, got 1; "):
        train(f"{tmp_path}/checkpoint-5")
