"""Rows of `PackedDataset` hold each example once, cut alike in all columns, in every epoch."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import flexvarlen as fv
from flexvarlen.packing import examples as reading
from tests.contract_training import documents
from tests.packing.test_pieces import COLUMNS, SOURCES, example, first_tokens, of_arrow

LENGTHS = (5, 20, 8, 9, 16)


def tokens_of(dataset):
    """All documents, in the order of their tokens."""
    return sorted(each["input_ids"].tolist() for row in dataset for each in row)


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.__name__)
@pytest.mark.parametrize("columns", [COLUMNS[:1], COLUMNS[:2]], ids=len)
def test_many_examples_are_read_in_parts(source, columns, monkeypatch):
    monkeypatch.setattr(reading, "_BLOCK", 2)
    packed = fv.PackedDataset(source([example(i, n, columns) for i, n in enumerate(LENGTHS)]), 20)
    expected = [example(i, n)["input_ids"] for i, n in enumerate(LENGTHS)]
    assert tokens_of(packed) == expected


@pytest.mark.parametrize("strategy", ["best_fit_decreasing", "first_fit", "in_order"])
def test_an_epoch_changes_the_documents_of_rows_alone(strategy):
    rng = np.random.default_rng(3)
    docs = [[i * 100 + t for t in range(n)] for i, n in enumerate(rng.integers(2, 12, 300))]
    packed = fv.PackedDataset(docs, 32, strategy=strategy, seed=5)
    again = fv.PackedDataset(docs, 32, strategy=strategy, seed=5)
    seen, lengths = [], packed.row_lengths
    for epoch in (0, 1, 2, 1):
        packed.set_epoch(epoch)
        assert tokens_of(packed) == sorted(docs)
        seen.append(first_tokens(packed))
        assert [[len(x["input_ids"]) for x in row] for row in packed] == lengths
    assert len(packed) == len(fv.pack([len(x) for x in docs], 32, strategy=strategy))
    assert seen[0] != seen[1] != seen[2]
    assert seen[1] == seen[3]
    plain = fv.PackedDataset(docs, 32, strategy=strategy, seed=None)
    assert plain.row_lengths != lengths
    assert sorted(plain.row_lengths) == sorted(lengths)
    other = fv.PackedDataset(docs, 32, strategy=strategy, seed=6)
    assert tokens_of(other) == sorted(docs)
    mates = [{frozenset(row) for row in rows} for rows in seen]
    other = {frozenset(row) for row in first_tokens(other)}
    assert mates[0] != mates[1] != mates[2] != other != mates[0]
    again.set_epoch(2)
    assert first_tokens(again) == seen[2]


@pytest.mark.parametrize(
    ("size", "cost"), [(1, None), (4, None), (1000, None), (4, fv.RowCost(per_token=1.0))]
)
def test_rows_of_a_step_cost_the_same(size, cost):
    rng = np.random.default_rng(3)
    docs = [[i * 100 + t for t in range(n)] for i, n in enumerate(rng.integers(2, 33, 400))]
    options = {"seed": 5, "strategy": "in_order" if cost else "best_fit_decreasing"}
    plain = fv.PackedDataset(docs, 32, **options)
    packed = fv.PackedDataset(docs, 32, rows_per_step=size, cost=cost, **options)
    orders = []
    for epoch in (0, 1, 2, 1):
        packed.set_epoch(epoch)
        plain.set_epoch(epoch)
        orders.append(first_tokens(packed))
        assert sorted(orders[-1]) == sorted(first_tokens(plain))
        lengths = packed.row_lengths
        assert lengths == [[len(x["input_ids"]) for x in row] for row in packed]
        power = 1 if cost else 2
        costs = np.array([sum(n**power for n in row) for row in lengths], float)
        steps = costs[: len(costs) - len(costs) % size].reshape(-1, size)
        assert size == 1000 or steps.max(1).sum() < 1.05 * steps.mean(1).sum()
        if size == 4:  # longer rows do not come first
            assert abs(np.corrcoef(steps.mean(1), np.arange(len(steps)))[0, 1]) < 0.5
    assert orders[0] != orders[1] != orders[2]
    assert orders[1] == orders[3]


def test_without_a_seed_rows_are_those_of_pack():
    docs = documents()
    rows = fv.pack([len(x) for x in docs], 40, strategy="in_order")
    packed = fv.PackedDataset([[*x, 1] for x in docs], 41, strategy="in_order", seed=None)
    for epoch in (0, 1):
        packed.set_epoch(epoch)
        found = [x["input_ids"].tolist() for row in packed for x in row]
        assert found == [[*x, 1] for x in docs]
    assert packed.row_lengths != rows
    assert packed[-1][-1]["input_ids"].tolist() == [*docs[-1], 1]


@pytest.mark.parametrize("source", SOURCES[:2], ids=lambda source: source.__name__)
def test_loader_workers_follow_the_epoch(source):
    """Also those that persist, which hold a copy of the dataset."""
    docs = [[i, i, i] for i in range(40)]
    packed = fv.PackedDataset(source([{"input_ids": x} for x in docs]), 12)
    options = {"batch_size": 2, "collate_fn": fv.PackedCollator(total_tokens=24)}
    alone = DataLoader(packed, **options)
    workers = DataLoader(packed, num_workers=2, persistent_workers=True, **options)
    for epoch in range(3):
        packed.set_epoch(epoch)
        for one, other in zip(alone, workers, strict=True):
            assert torch.equal(one["input_ids"], other["input_ids"])
            assert one["packed_layout"].lengths == other["packed_layout"].lengths


def test_values_of_an_arrow_table_are_read_when_an_item_is(monkeypatch, capsys):
    read = []
    own = reading.rows_of
    monkeypatch.setattr(reading, "rows_of", lambda *args: read.append(1) or own(*args))
    monkeypatch.setattr(reading, "_REPORT_S", -1.0)
    table = of_arrow([example(0, 4, ["input_ids"])] * 5000)
    packed = fv.PackedDataset(table, 8)
    assert len(read) == 1  # the first, whose columns are checked
    assert "PackedDataset: read 4,000 of 5,000 examples" in capsys.readouterr().err
    packed[7]
    assert len(read) == 3


GOOD = {"input_ids": [1, 2, 3]}
LEARNED = GOOD | {"labels": [1, 2, 3]}


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        (iter([[1]]), {}, "dataset must be a sequence .*, got list_iterator; .*StreamPacker"),
        (
            of_arrow([LEARNED, GOOD | {"labels": [-100, -1, 3]}]),
            {},
            r"dataset\[1\] must .*labels must be at least 0, .*got -1; ",
        ),
        (
            of_arrow([LEARNED, GOOD | {"labels": [1, 2]}]),
            {},
            r"dataset\[1\] must .*labels must have a value",
        ),
        (
            of_arrow([{"input_ids": [[1, 2]], "labels": [[1, 2]]}] * 2),
            {},
            r"dataset\[0\] must .*T\]",
        ),
        ([GOOD], {"strategy": "best"}, "strategy must be one of .*, got 'best'; "),
        ([GOOD], {"rows_per_step": 0}, "rows_per_step must be an integer of at least 1, got 0; "),
        (
            [GOOD],
            {"rows_per_step": 2, "seed": None},
            "rows_per_step must be None if seed is, got 2",
        ),
        ([GOOD], {"cost": 1.0}, "cost must be a RowCost, got 1.0; pass fv.row_cost"),
        ([GOOD], {"seed": -1}, "seed must be an integer of at least 0, got -1; "),
    ],
)
def test_what_is_refused(dataset, options, message):
    with pytest.raises(ValueError, match=message):
        fv.PackedDataset(dataset, **{"tokens": 8, **options})


def test_an_arrow_table_of_rows_without_labels_is_learned_as_it_is():
    table = of_arrow([LEARNED, GOOD | {"labels": None}])
    assert fv.PackedDataset(table, 8).row_lengths == [[3, 3]]


def test_an_arrow_table_of_rows_of_one_document():
    """As a tokenizer with return_tensors makes them: a list in a list."""
    row = {"input_ids": [[1, 2, 3]], "attention_mask": [[1, 1, 1]]}
    packed = fv.PackedDataset(of_arrow([row, row]), 8)
    assert packed.row_lengths == [[3, 3]]
    assert tokens_of(packed) == [[1, 2, 3]] * 2


def test_an_item_names_the_example():
    table = of_arrow([GOOD, {"input_ids": [1, -2, 3]}])
    packed = fv.PackedDataset(table, 3)
    with pytest.raises(ValueError, match=r"dataset\[1\] must be .*at least 0, got -2"):
        list(packed)
    with pytest.raises(IndexError):
        packed[2]


MILLION = """
import time
import datasets, numpy as np, pyarrow as pa
import flexvarlen as fv

rng = np.random.default_rng(0)
lengths = rng.lognormal(np.log(100) - 0.32, 0.8, 1_000_000).astype(int).clip(1)
ends = np.concatenate([[0], lengths.cumsum()]).astype(np.int32)
tokens = pa.ListArray.from_arrays(ends, rng.integers(0, 30_000, ends[-1]).astype(np.int32))
table = datasets.Dataset(pa.table({name: tokens for name in %r}))
fv.PackedDataset(table.select(range(9)), 4096)

def mib(name):
    return next(int(x.split()[1]) for x in open("/proc/self/status") if name in x) / 1024

open("/proc/self/clear_refs", "w").write("5")  # the peak from here on
before, begin = mib("VmRSS"), time.process_time()
packed = fv.PackedDataset(table, 4096)
seconds, peak = time.process_time() - begin, mib("VmHWM") - before
begin = time.process_time()
packed.set_epoch(1)
packed[0]
print(seconds, peak, mib("VmHWM") - before, time.process_time() - begin, len(packed))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("columns", [["input_ids"], ["input_ids", "labels"]], ids=len)
def test_a_million_examples(columns):
    """5 s of a core and 200 MB above the data, to pack, and to draw another epoch."""
    done = subprocess.run(
        [sys.executable, "-c", MILLION % columns], stdout=subprocess.PIPE, text=True, check=True
    )
    seconds, peak, later, epoch_s, rows = map(float, done.stdout.split())
    print(
        f"{seconds:.2f} s, {peak:.0f} MiB, then {later:.0f} MiB, {epoch_s:.2f} s, {rows:.0f} rows"
    )
    assert seconds < 5
    assert epoch_s < 5
    assert max(peak, later) < 200 * 1e6 / 2**20
