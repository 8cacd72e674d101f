"""Rows of `PackedDataset` hold each example once, cut alike in all columns, in every epoch."""

from __future__ import annotations

import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

import flexvarlen as fv
from flexvarlen.packing import examples as reading
from tests.contract_training import documents, settings
from tests.tiny_models import new_model

datasets = pytest.importorskip("datasets", reason="needs datasets: pip install datasets")

COLUMNS = (
    *("input_ids", "labels", "attention_mask", "completion_mask", "assistant_masks"),
    *("position_ids", "seq_idx", "weight"),
)
LENGTHS = (5, 20, 8, 9, 16)


def example(i, length, columns=COLUMNS):
    """Values that tell where they come from; all of it learned."""
    tokens = [100 * (i + 1) + t for t in range(length)]
    values = {name: [1] * length for name in columns}
    for name, plus in (
        ("input_ids", 0),
        ("labels", 0),
        ("position_ids", -100 * i - 100),
        ("weight", 5000),
    ):
        if name in columns:
            values[name] = [t + plus for t in tokens]
    return values


EXAMPLES = [example(i, n) for i, n in enumerate(LENGTHS)]


def of_list(rows):
    return rows


def of_arrow(rows):
    return datasets.Dataset.from_list(rows)


def of_select(rows):
    """Stored in another order, behind indices."""
    return datasets.Dataset.from_list(rows[::-1]).select(range(len(rows) - 1, -1, -1))


def of_tensors(rows):
    return datasets.Dataset.from_list(rows).with_format("torch")


def of_transform(rows):
    """Of which the Arrow table holds something else."""
    table = datasets.Dataset.from_dict({"index": range(len(rows))})
    return table.with_transform(
        lambda batch: {name: [rows[i][name] for i in batch["index"]] for name in rows[0]}
    )


SOURCES = (of_list, of_arrow, of_select, of_tensors, of_transform)


def tokens_of(dataset):
    """All documents, in the order of their tokens."""
    return sorted(each["input_ids"].tolist() for row in dataset for each in row)


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.__name__)
@pytest.mark.parametrize(
    ("long", "spans"),
    [
        ("split", [(0, 5), (0, 8), (8, 16), (16, 20), (0, 8), (0, 8), (0, 8), (8, 16)]),
        ("truncate", [(0, 5), (0, 8), (0, 8), (0, 8), (0, 8)]),
        ("drop", [(0, 5), (0, 8)]),
    ],
)
def test_all_columns_are_cut_alike(source, long, spans):
    """The ninth token of the fourth example is alone, and nothing predicts it."""
    packed = fv.PackedDataset(source(EXAMPLES), 8, long=long, extra=["weight"])
    found = sorted((x for row in packed for x in row), key=lambda x: x["input_ids"][0])
    assert [(x["input_ids"][0] % 100, x["input_ids"][-1] % 100 + 1) for x in found] == spans
    for document in found:
        assert set(document) == set(COLUMNS)
        tokens = np.asarray(document["input_ids"])
        assert (np.asarray(document["weight"]) == tokens + 5000).all()
        assert (np.asarray(document["position_ids"]) == tokens % 100).all()
        assert fv.PackedCollator(extra={"weight": 0})(document)["packed_layout"].num_docs == 1
        labels = np.asarray(document["labels"]).copy()
        if tokens[0] % 100:  # of a piece, which begins after its predictor
            assert labels[0] == -100
            labels[0] = tokens[0]
        assert (labels == tokens).all()
        assert {len(values) for values in document.values()} == {len(tokens)}
    assert packed.num_long == 3
    assert packed.num_dropped == (long == "split")
    assert all(sum(row) <= 8 for row in packed.row_lengths)
    assert packed.row_lengths == [[len(x["input_ids"]) for x in row] for row in packed]


MASKED = {
    "labels": [-100] * 9 + [1] * 3,
    "attention_mask": [0] * 9 + [1] * 3,
    "completion_mask": [0] * 9 + [1] * 3,
    "assistant_masks": [0] * 9 + [1] * 3,
}


@pytest.mark.parametrize("source", SOURCES[:2], ids=lambda source: source.__name__)
@pytest.mark.parametrize("column", MASKED)
def test_pieces_without_labels_are_dropped_and_counted(source, column):
    """The first two of three pieces hold padding, or tokens whose loss is masked."""
    tokens = [1] * 12
    dataset = source([{"input_ids": tokens, column: MASKED[column]}, example(1, 3, COLUMNS[:1])])
    if source is of_list:
        packed = fv.PackedDataset(dataset, 4)
    else:  # the second example has no such column
        packed = fv.PackedDataset(dataset.select([0]), 4)
    assert packed.num_dropped == 2
    found = [x for row in packed for x in row if column in x]
    assert len(found) == 1
    batch = fv.PackedCollator()(found)
    assert (batch["labels"] != -100).sum() == {"attention_mask": 2}.get(column, 3)


def test_a_label_that_nothing_predicts():
    """At a piece's first token, a next token's label is none; a tag is one."""
    masked = [{"input_ids": [5, 6, 7, 8, 9], "labels": [-100, 6, 7, -100, 9]}]
    packed = fv.PackedDataset(masked, 4)
    assert tokens_of(packed) == [[5, 6, 7, 8]]
    assert packed.num_dropped == 1
    tags = [{"input_ids": [5, 6, 7, 8, 9], "labels": [0, 1, 0, 1, 1]}]
    packed = fv.PackedDataset(tags, 4)
    assert tokens_of(packed) == [[5, 6, 7, 8], [9]]
    assert [x["labels"].tolist() for row in packed for x in row if x["input_ids"][0] == 9] == [[1]]


def test_a_piece_that_begins_within_an_answer():
    """A label at its first token and -100 later look like tags to the collator."""
    labels = np.array([-100, -100, 3, 4, 5, 6, -100, -100, 9, 10])
    turns = {"input_ids": list(range(1, 11)), "labels": labels}
    packed = fv.PackedDataset([turns], 5, seed=None)
    labels = fv.PackedCollator()(list(packed))["labels"][0]
    assert labels[:10].tolist() == [-100, -100, 3, 4, 5, -100, -100, -100, 9, 10]
    assert turns["labels"][5] == 6  # what was given is as it was


def test_padding_at_the_start_of_a_piece():
    """The first token that is kept begins the document."""
    values = [1, 2, 3, 4, 5, 6, 7, 8]
    padded = {"input_ids": values, "labels": values, "attention_mask": [1, 1, 1, 1, 0, 0, 1, 1]}
    document = next(x for row in fv.PackedDataset([padded], 4) for x in row if x["labels"][0] == 5)
    assert document["labels"].tolist() == [5, 6, -100, 8]


def test_labels_of_padding_are_not_learned():
    padded = {"input_ids": [5, 0, 0], "attention_mask": [1, 0, 0]}
    assert fv.PackedDataset([padded, [1, 2]], 4).num_dropped == 1


@pytest.mark.parametrize(
    ("labels", "kind", "kept"),
    [
        ([0, 1, 0, 1, 1], None, 2),
        ([0, 1, 0, 1, 1], True, 1),
        ([5, 6, 7, 8, 9], None, 1),
        ([5, 6, 7, 8, 9], False, 2),
        (None, False, 1),
    ],
)
def test_the_kind_of_labels_may_be_given(labels, kind, kept):
    example = {"input_ids": [5, 6, 7, 8, 9], "labels": labels}
    packed = fv.PackedDataset([example], 4, next_token_labels=kind)
    assert len(tokens_of(packed)) == kept


def test_some_examples_without_labels():
    """They learn their tokens; the labels of the others are next tokens still."""
    packed = fv.PackedDataset([{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, [8, 9, 3]], 2)
    assert tokens_of(packed) == [[5, 6], [8, 9]]
    assert packed.num_dropped == 2


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.__name__)
@pytest.mark.parametrize("columns", [COLUMNS[:1], COLUMNS[:2]], ids=len)
def test_many_examples_are_read_in_parts(source, columns, monkeypatch):
    monkeypatch.setattr(reading, "_BLOCK", 2)
    packed = fv.PackedDataset(source([example(i, n, columns) for i, n in enumerate(LENGTHS)]), 20)
    expected = [example(i, n)["input_ids"] for i, n in enumerate(LENGTHS)]
    assert tokens_of(packed) == expected


def test_empty_and_one_token_examples():
    packed = fv.PackedDataset([[], [1], [2, 3]], 4)
    assert (tokens_of(packed), packed.num_dropped) == ([[2, 3]], 2)


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
        seen.append([[int(x["input_ids"][0]) for x in row] for row in packed])
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
    other = {frozenset(int(x["input_ids"][0]) for x in row) for row in other}
    assert mates[0] != mates[1] != mates[2] != other != mates[0]
    again.set_epoch(2)
    assert [[int(x["input_ids"][0]) for x in row] for row in again] == seen[2]


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_rows_of_a_step_cost_the_same(size):
    rng = np.random.default_rng(3)
    docs = [[i * 100 + t for t in range(n)] for i, n in enumerate(rng.integers(2, 33, 400))]
    plain = fv.PackedDataset(docs, 32, seed=5)
    packed = fv.PackedDataset(docs, 32, seed=5, rows_per_step=size)
    orders = []
    for epoch in (0, 1, 2, 1):
        packed.set_epoch(epoch)
        plain.set_epoch(epoch)
        rows, same = (
            [[int(x["input_ids"][0]) for x in row] for row in each] for each in (packed, plain)
        )
        assert sorted(rows) == sorted(same)
        orders.append(rows)
        lengths = packed.row_lengths
        assert lengths == [[len(x["input_ids"]) for x in row] for row in packed]
        costs = np.array([sum(n**2 for n in row) for row in lengths], float)
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


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batch", [1, 2])
def test_trainer_steps_are_those_of_the_documents_alone(batch, workers, check_trainer_steps):
    docs = [x for x in documents() if len(x) > 1]
    table = datasets.Dataset.from_dict(
        {"input_ids": docs, "completion_mask": [[1] * len(x) for x in docs]}
    )
    packed = fv.PackedDataset(table, 48, long="truncate")
    check_trainer_steps(packed, docs, batch=batch, workers=workers)


@pytest.mark.parametrize("balanced", [None, 4])
def test_trainer_sets_the_epoch(balanced, tmp_path):
    docs = [[i, t] for i in range(3, 23) for t in range(3, 6)]
    packed = fv.PackedDataset(docs, 30, rows_per_step=balanced)
    strategy = "sequential" if balanced else "random"
    arguments = settings(
        tmp_path, max_steps=-1, num_train_epochs=2, train_sampling_strategy=strategy
    )
    trainer = Trainer(
        fv.patch_model(new_model("qwen3"), "sdpa"),
        TrainingArguments(**arguments),
        train_dataset=packed,
        data_collator=fv.PackedCollator(),
    )
    assert trainer.train().global_step == 2 * -(-len(packed) // 4)
    assert int(packed._epoch) == 1


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
WRONG = GOOD | {"labels": [-100, -1, 3]}


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        (iter([[1]]), {}, r"dataset must be a sequence .*, got list_iterator; .*StreamPacker"),
        ({"train": [GOOD]}, {}, "dataset must be a sequence .*, got dict; pass one split"),
        ("text", {}, "dataset must be a sequence"),
        ([], {}, "dataset must contain at least one example; "),
        ([[1], [2]], {}, "dataset must contain a document with labels .* got 2 examples without; "),
        ([1, 2, 3], {}, r"dataset\[0\] must be a tokenized document: .*got int; "),
        ([GOOD, {"labels": [1]}], {}, r"dataset\[1\] .* input_ids, got labels; "),
        ([GOOD, GOOD | {"text": "a"}], {}, r"dataset\[1\] .* got 'text'; drop it"),
        (
            [GOOD, GOOD | {"labels": [1, 2]}],
            {},
            r"dataset\[1\] .*labels must have a value .* \[2\]; ",
        ),
        ([GOOD, {"input_ids": [1.5, 2.0]}], {}, r"dataset\[1\] .*must be integers, got float64; "),
        ([GOOD, {"input_ids": [1, -2]}], {}, r"dataset\[1\] .*at least 0, got -2; "),
        ([GOOD, "text"], {}, r"dataset\[1\] .* got str; "),
        ([GOOD, [[1, 2], [3, 4]]], {}, r"dataset\[1\] .*one document, got a list of 2; flatten "),
        ([[GOOD, GOOD]], {}, r"dataset\[0\] .*got a list of 2; .*for d in fv.tokenize_chat\(c, "),
        ([(np.array([1]), np.array([2]))], {}, r"dataset\[0\] .*one document, got a list of 2; "),
        ([np.array([[1, 2], [3, 4]])], {}, r"dataset\[0\] .*one document, got 2 rows; "),
        ([["a", "b"]], {}, r"dataset\[0\] .*must be integers, got <U1; "),
        ([GOOD, WRONG], {}, r"dataset\[1\] .*labels must be at least 0, or -100 .* got -1; "),
        (of_arrow([LEARNED, WRONG]), {}, r"dataset\[1\] .*labels must be at least 0, .*got -1; "),
        ([GOOD, GOOD | {"seq_lengths": [3]}], {}, r"dataset\[1\] .*got seq_lengths, .*; "),
        (of_arrow([{"input_ids": [[1, 2]], "labels": [[1, 2]]}] * 2), {}, r"dataset\[0\] .*T\]"),
        ([GOOD], {"extra": ["weight"]}, r"dataset\[0\] .*must have weight, got input_ids; "),
        ([GOOD], {"extra": "weight"}, "extra must be names of columns, got 'weight'; "),
        ([GOOD], {"tokens": 0}, "tokens must be an integer of at least 1, got 0; "),
        ([GOOD], {"long": "cut"}, "long must be split, truncate or drop, got 'cut'; "),
        ([GOOD], {"strategy": "best"}, "strategy must be one of .*, got 'best'; "),
        ([GOOD], {"rows_per_step": 0}, "rows_per_step must be an integer of at least 1, got 0; "),
        (
            [GOOD],
            {"rows_per_step": 2, "seed": None},
            "rows_per_step must be None if seed is, got 2; ",
        ),
        ([GOOD], {"seed": -1}, "seed must be an integer of at least 0, got -1; "),
        (
            [GOOD],
            {"next_token_labels": 1},
            "next_token_labels must be True, False or None, got 1; ",
        ),
    ],
)
def test_what_is_refused(dataset, options, message):
    with pytest.raises(ValueError, match=message) as raised:
        fv.PackedDataset(dataset, **{"tokens": 8, **options})
    sentence = str(raised.value)
    assert sentence.endswith(".")
    assert not re.search(r"\. |\n", sentence)


@pytest.mark.parametrize("bad", [{"labels": [1, 2]}, {"labels": None}])
def test_a_column_of_an_arrow_table_that_is_too_short(bad):
    table = of_arrow([GOOD | {"labels": [1, 2, 3]}, GOOD | bad])
    if bad["labels"] is None:  # learned as it is
        assert fv.PackedDataset(table, 8).row_lengths == [[3, 3]]
        return
    with pytest.raises(ValueError, match=r"dataset\[1\] must be .*labels must have a value"):
        fv.PackedDataset(table, 8)


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
