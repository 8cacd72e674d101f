"""Columns of a data set that tell documents reach the collator through Trainer, or raise."""

from __future__ import annotations

import inspect
from itertools import chain, pairwise

import pytest
import torch
from transformers import Trainer, TrainingArguments, default_data_collator

import flexvarlen as fv
from flexvarlen.packing import columns as columns_of_collator
from flexvarlen.patches.batch.unsupported_keywords import COLUMNS
from flexvarlen.patches.models.families import FAMILIES
from tests.contract_oracle import check_step
from tests.contract_training import documents, recorded, settings
from tests.tiny_models import lora, new_model

datasets = pytest.importorskip("datasets", reason="needs datasets: pip install datasets")

DOCUMENTS = documents()[:6]
ENDS = (0, 2, 4, 6)  # a row of two documents each


def completions(document):
    """The first third is a prompt."""
    third = len(document) // 3
    return [0] * third + [1] * (len(document) - third)


def learned(document):
    third = len(document) // 3
    return [-100] * third + document[third:]


def rows(columns):
    """Each row's documents in these columns."""
    made = []
    for first, last in pairwise(ENDS):
        row = DOCUMENTS[first:last]
        lengths = [len(document) for document in row]
        cumulative = torch.tensor([0, *lengths]).cumsum(0).tolist()
        values = {
            "input_ids": list(chain(*row)),
            "seq_lengths": lengths,
            "seq_idx": [i for i, n in enumerate(lengths) for _ in range(n)],
            "cu_seq_lens_q": cumulative,
            "completion_mask": list(chain(*map(completions, row))),
            "assistant_masks": list(chain(*map(completions, row))),
        }
        made.append({name: values[name] for name in ("input_ids", *columns)})
    return made


def arguments_of(model, tmp_path, dataset, collator):
    arguments = settings(tmp_path, per_device_train_batch_size=3, max_steps=1)
    return {
        "model": model,
        "args": TrainingArguments(**arguments),
        "train_dataset": dataset,
        "data_collator": collator,
    }


BOTH = ("seq_lengths", "completion_mask")
EACH = (("seq_lengths",), ("seq_idx",), ("cu_seq_lens_q",), ("seq_lengths", "assistant_masks"))


@pytest.mark.sampled(9)
@pytest.mark.parametrize("source", ["dataset", "list", "stream"])
@pytest.mark.parametrize(
    ("columns", "how"),
    [
        *((BOTH, how) for how in ("plain", "lora", "lora_first", "trainer_first")),
        *((columns, "plain") for columns in EACH),
    ],
)
def test_a_column_that_trainer_takes_away(columns, source, how, tmp_path):
    """Each row would be one document, and prompts would be trained on, without a word."""
    dataset = rows(columns)
    if source != "list":
        dataset = datasets.Dataset.from_list(dataset)
    if source == "stream":
        dataset = dataset.to_iterable_dataset()
    model = new_model("qwen3")
    plain = lora(new_model("qwen3")) if "lora" in how else new_model("qwen3")
    if how == "lora_first":
        model = fv.patch_model(lora(model), "sdpa")
    elif how != "trainer_first":
        fv.patch_model(model, "sdpa")
        model = lora(model) if how == "lora" else model
    trainer, recorder = recorded(
        Trainer, **arguments_of(model, tmp_path, dataset, fv.PackedCollator())
    )
    if how == "trainer_first":
        fv.patch_model(model, "sdpa")
    trainer.train()
    labels = [learned(x) for x in DOCUMENTS] if len(columns) > 1 else None
    check_step(recorder.steps[0], plain, DOCUMENTS, labels=labels)


@pytest.mark.parametrize("column", ["seq_lengths", "completion_mask", "assistant_masks"])
def test_a_column_that_reaches_the_model(column, tmp_path):
    """A collator that only stacks hands it on; nobody would read it."""
    dataset = [{"input_ids": x[:2], "labels": x[:2], column: [1, 1]} for x in DOCUMENTS[:2]]
    model = fv.patch_model(new_model("qwen3"), "sdpa")
    given = arguments_of(model, tmp_path, dataset, default_data_collator)
    with pytest.raises(ValueError, match=rf"{column}.*(would see|would be trained on)"):
        Trainer(**given).train()


def test_the_columns_are_those_of_the_collator():
    module = columns_of_collator
    read = {*module.KNOWN, *module.BOUNDARIES, *module.LOSS_MASKS}
    model = fv.patch_model(new_model("qwen3"), "sdpa")
    shown = inspect.signature(model.forward).parameters
    assert read <= set(shown)
    assert set(COLUMNS) <= read
    assert list(shown)[-1] == "kwargs"  # by which Trainer knows who takes num_items_in_batch


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_every_family_shows_them(family):
    """And its own arguments where they were, by place too."""
    model = new_model(family.model_type)
    before = inspect.signature(model.forward)
    fv.patch_model(model)
    after = inspect.signature(model.forward)
    assert set(COLUMNS) <= set(after.parameters)
    own = [x for name, x in after.parameters.items() if name not in COLUMNS]
    assert own == list(before.parameters.values())
    fv.unpatch_model(model)
    assert inspect.signature(model.forward) == before


def test_generate_still_refuses_what_nobody_reads():
    model = fv.patch_model(new_model("qwen3"), "sdpa")
    ids = torch.tensor([DOCUMENTS[0]])
    for name in ("seq_lengths", "completion_mask", "seq_lengthz"):
        with pytest.raises(ValueError, match=name):
            model.generate(ids, max_new_tokens=2, do_sample=False, **{name: torch.ones(1, 2)})
    layout = fv.PackedLayout.from_lengths([3, len(DOCUMENTS[0]) - 3])
    for more in ({}, {"num_beams": 2}, {"use_cache": False}):
        with pytest.raises(ValueError, match=r"packed|rows that hold several"):
            model.generate(ids, max_new_tokens=2, do_sample=False, packed_layout=layout, **more)
