"""Pieces of examples, in the rows of a data set and of a stream: cut alike, and learned alike."""

from __future__ import annotations

import re

import numpy as np
import pytest
from transformers import Trainer, TrainingArguments

import flexvarlen as fv
from flexvarlen.packing.columns import LOSS_MASKS
from tests.contract_oracle import check_step
from tests.contract_training import documents, recorded, settings
from tests.tiny_models import new_model

datasets = pytest.importorskip("datasets", reason="needs datasets: pip install datasets")

PACKERS = (fv.PackedDataset, fv.StreamPacker)
COLUMNS = (
    *("input_ids", "labels", "attention_mask", "completion_mask", "assistant_masks"),
    *("position_ids", "seq_idx", "weight"),
)


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


def first_tokens(rows):
    """Of the documents of each row: which documents they are."""
    return [[int(document["input_ids"][0]) for document in row] for row in rows]


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


def of_iterable(rows):
    return datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=2)


SOURCES = (of_list, of_arrow, of_select, of_tensors, of_transform)
CUT = [(fv.PackedDataset, x) for x in SOURCES] + [(fv.StreamPacker, x) for x in (list, of_iterable)]


@pytest.mark.parametrize(("packer", "source"), CUT, ids=lambda of: of.__name__)
@pytest.mark.parametrize(
    ("long", "spans"),
    [
        ("split", [(0, 5), (0, 8), (8, 16), (16, 20), (0, 8), (0, 8), (0, 8), (8, 16)]),
        ("truncate", [(0, 5), (0, 8), (0, 8), (0, 8), (0, 8)]),
        ("drop", [(0, 5), (0, 8)]),
    ],
)
def test_all_columns_are_cut_alike(packer, source, long, spans):
    """The ninth token of the fourth example is alone, and nothing predicts it."""
    examples = [example(i, n) for i, n in enumerate((5, 20, 8, 9, 16))]
    packed = packer(source(examples), 8, long=long, extra=["weight"])
    rows = list(packed)
    found = sorted((x for row in rows for x in row), key=lambda x: x["input_ids"][0])
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
    lengths = [[len(x["input_ids"]) for x in row] for row in rows]
    assert max(map(sum, lengths)) <= 8
    if packer is fv.PackedDataset:
        assert packed.row_lengths == lengths


IDS, TAGS = [5, 6, 7, 8, 9], [0, 1, 0, 1, 1]
MASK = [0] * 9 + [1] * 3  # the last of three pieces is learned
BEGUN = [-100, 6, 7, 8]
LEARNED = [
    ({"labels": [-100] * 9 + [14, 15, 16]}, None, {13: [-100, 14, 15, 16]}),
    ({"completion_mask": MASK}, None, {13: [-100, 14, 15, 16]}),
    ({"assistant_masks": MASK}, None, {13: [-100, 14, 15, 16]}),
    ({"attention_mask": MASK}, None, {14: [-100, 15, 16]}),
    ({"attention_mask": [1, 0, 0]}, None, {}),
    ({"attention_mask": [1, 1, 1, 1, 0, 0, 1, 1]}, None, {5: BEGUN, 11: [-100, 12]}),
    (
        {"labels": [5, 6, 7, 8, 9, 10, -100, 12], "attention_mask": [1, 1, 1, 1, 0, 1, 1, 1]},
        None,
        {5: BEGUN, 10: [-100, -100, 12]},
    ),
    ({"labels": [5]}, None, {}),
    ({"labels": []}, None, {}),
    ({"labels": [-100, 6, 7, -100, 9]}, None, {5: [-100, 6, 7, -100]}),
    # A first label and -100 behind it look like tags, but are of an answer that goes on.
    (
        {"labels": [-100, -100, 7, 8, 9, -100, -100, 12]},
        None,
        {5: [-100, -100, 7, 8], 9: [-100, -100, -100, 12]},
    ),
    ({"labels": TAGS}, None, {5: TAGS[:4], 9: [1]}),
    ({"labels": TAGS}, True, {5: [-100, 1, 0, 1]}),
    ({"labels": IDS}, None, {5: BEGUN}),
    ({"labels": IDS}, False, {5: IDS[:4], 9: [9]}),
    ({"labels": None}, False, {5: BEGUN}),
]


@pytest.mark.parametrize("packer", PACKERS)
@pytest.mark.parametrize(("columns", "next_token_labels", "learned"), LEARNED)
def test_pieces_of_four_tokens_learn_their_own_or_are_dropped_and_counted(
    packer, columns, next_token_labels, learned
):
    """`learned`: the labels of each piece that has any, by its first token.

    A next token's label is none at a piece's first token, whose predictor is in another piece.
    """
    options = {"next_token_labels": next_token_labels}
    given = {name: np.array(x, int) for name, x in columns.items() if x is not None}
    tokens = np.arange(5, 5 + len(next(iter(given.values()), IDS)))
    examples = [{"input_ids": tokens, **columns, **given}, [1, 2]]  # the second has no such column
    packed = packer(examples, 4, **options)
    batches = [fv.PackedCollator(**options)([x]) for row in packed for x in row]
    found = {int(x["input_ids"][0, 0]): x["labels"][0].tolist() for x in batches}
    assert found == learned | {1: [-100, 2]}
    assert packed.num_dropped == max(1, -(-len(tokens) // 4)) - len(learned)
    assert all(x.tolist() == columns[name] for name, x in given.items())  # as it was


@pytest.mark.parametrize("name", ["labels", "attention_mask", *LOSS_MASKS])
def test_columns_of_an_arrow_table_say_what_is_learned(name):
    values = [-100] * 9 + [14, 15, 16] if name == "labels" else MASK
    packed = fv.PackedDataset(of_arrow([{"input_ids": [*range(5, 17)], name: values}]), 4)
    assert (first_tokens(packed), packed.num_dropped) == ([[13]], 2)


@pytest.mark.pairwise(packer=PACKERS, batch=[1, 2], workers=[0, 2])
def test_trainer_steps_are_those_of_the_documents_alone(packer, batch, workers, tmp_path):
    docs, steps = [x for x in documents() if len(x) > 1], []
    rows = [{"input_ids": x, "completion_mask": [1] * len(x)} for x in docs]
    source, options = {
        fv.PackedDataset: (of_arrow, {"long": "truncate"}),
        fv.StreamPacker: (of_iterable, {"buffer": 6}),
    }[packer]

    class Seen(Trainer):
        def training_step(self, model, inputs, *args, **kwargs):
            parts = inputs["packed_layout"].split(inputs["input_ids"][0])
            steps.append([x.tolist() for x in parts if len(x)])
            return super().training_step(model, inputs, *args, **kwargs)

    arguments = settings(
        tmp_path, per_device_train_batch_size=batch, dataloader_num_workers=workers
    )
    trainer, recorder = recorded(
        Seen,
        model=fv.patch_model(new_model("qwen3"), "sdpa"),
        args=TrainingArguments(**arguments),
        train_dataset=packer(source(rows), 48, **options),
        data_collator=fv.PackedCollator(),
    )
    trainer.train()
    assert len(recorder.steps) == len(steps) == 2
    for step, seen in zip(recorder.steps, steps, strict=True):
        assert all(x in docs for x in seen)
        check_step(step, new_model("qwen3"), seen)


@pytest.mark.parametrize(
    ("packer", "options", "strategy"),
    [
        (fv.PackedDataset, {}, "random"),
        (fv.PackedDataset, {"rows_per_step": 2}, "sequential"),
        (fv.StreamPacker, {}, "random"),
    ],
)
def test_trainer_sets_the_epoch(packer, options, strategy, tmp_path, monkeypatch):
    seen, packed = [], packer([[number] * 20 for number in range(6)], 64, **options)
    own = packed.set_epoch
    monkeypatch.setattr(packed, "set_epoch", lambda epoch: seen.append(epoch) or own(epoch))
    arguments = settings(
        tmp_path, max_steps=3, per_device_train_batch_size=1, train_sampling_strategy=strategy
    )
    trainer = Trainer(
        fv.patch_model(new_model("qwen3"), "sdpa"),
        TrainingArguments(**arguments),
        train_dataset=packed,
        data_collator=fv.PackedCollator(),
    )
    trainer.train()
    assert sorted(set(seen)) == [0, 1]  # two rows an epoch


GOOD = {"input_ids": [1, 2, 3]}


@pytest.mark.parametrize("packer", PACKERS)
@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        ({"train": [GOOD]}, {}, "dataset must be an? .* of tokenized examples, got dict; pass one"),
        ("text", {}, "dataset must be an? .* of tokenized examples, got str; "),
        ([], {}, "dataset must contain at least one example; "),
        ([[1], [2]], {}, "dataset must contain .* with labels that are not -100, .* 2 examples"),
        ([1, 2, 3], {}, "example 0 must be a tokenized document: .*got int; "),
        ([GOOD, {"labels": [1]}], {}, "example 1 must .* have input_ids, got labels; "),
        ([GOOD, GOOD | {"text": "a"}], {}, "example 1 must .*got 'text'; drop it"),
        ([GOOD, GOOD | {"labels": [1, 2]}], {}, r"example 1 must .*labels must have .* \[2\]; "),
        ([GOOD, {"input_ids": [1, -2]}], {}, "example 1 must .*at least 0, got -2; "),
        ([GOOD, GOOD | {"labels": [-100, -1, 3]}], {}, "example 1 must .* or -100 .* got -1; "),
        ([GOOD, "text"], {}, "example 1 must .* got str; "),
        ([GOOD, [[1, 2], [3, 4]]], {}, "example 1 must .*one document, got a list of 2; flatten "),
        ([[GOOD, GOOD]], {}, "example 0 must .*got a list of 2; .*for d in fv.tokenize_chat"),
        ([(np.array([1]), np.array([2]))], {}, "example 0 must .*one document, got a list of 2; "),
        ([np.array([[1, 2], [3, 4]])], {}, "example 0 must .*one document, got 2 rows; "),
        ([["a", "b"]], {}, "example 0 must .*must be integers, got <U1; "),
        ([GOOD, GOOD | {"seq_lengths": [3]}], {}, "example 1 must .*got seq_lengths, "),
        ([GOOD], {"extra": ["weight"]}, "example 0 must .*must have weight, got input_ids; "),
        ([GOOD], {"extra": "weight"}, "extra must be names of columns, got 'weight'; "),
        ([GOOD], {"tokens": 0}, "tokens must be an integer of at least 1, got 0; "),
        ([GOOD], {"long": "cut"}, "long must be split, truncate or drop, got 'cut'; "),
        (
            [GOOD],
            {"next_token_labels": 1},
            "next_token_labels must be True, False or None, got 1; ",
        ),
    ],
)
def test_what_is_refused(packer, dataset, options, message):
    """`example n` in a message: the words of the packer, which name it."""
    name = r"dataset\[{}\]" if packer is fv.PackedDataset else "example {} of dataset"
    message = re.sub(r"example (\d)", lambda found: name.format(found[1]), message)
    with pytest.raises(ValueError, match=f"^{message}") as raised:
        list(packer(dataset, **{"tokens": 8, **options}))
    sentence = str(raised.value)
    assert sentence.endswith(".")
    assert not re.search(r"\. |\n", sentence)
