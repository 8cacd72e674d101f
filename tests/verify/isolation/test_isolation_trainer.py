"""`IsolationCallback` in a real Trainer."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset
from transformers import DataCollatorWithFlattening, Trainer, TrainerState, TrainingArguments

import flexvarlen as fv
from flexvarlen.parallel.sharded_parameters import is_sharded
from flexvarlen.verify.isolation.callback import IsolationCallback, several_documents
from flexvarlen.verify.models import build_model
from tests.contract_training import settings
from tests.patches.models import images
from tests.tiny_models import new_model

LENGTHS = (5, 11, 3, 8, 7, 4, 9, 6)


def examples():
    generator = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(3, 1024, (n,), generator=generator)} for n in LENGTHS]


def patched():
    return fv.patch_model(build_model("llama")[0], "sdpa")


@pytest.fixture
def train(tmp_path):
    def train(model, *callbacks, dataset=None, collate=None, **options):
        sizes = {"max_steps": 4, "per_device_train_batch_size": 2} | options
        trainer = Trainer(
            model,
            TrainingArguments(**settings(tmp_path, **sizes)),
            train_dataset=examples() if dataset is None else dataset,
            data_collator=collate or DataCollatorWithFlattening(),
            callbacks=list(callbacks),
        )
        trainer.train()
        return trainer

    return train


def test_patched_model_passes_before_training_and_each_second_step(train):
    callback = IsolationCallback(every=2)
    train(patched(), callback, bf16=True)
    assert sorted(callback.reports) == [0, 2, 4]
    assert {r.gradients for r in callback.reports.values()} == {"bits"}
    assert all(r.training and r.num_docs == 2 for r in callback.reports.values())


class Noisy(Dataset):
    """Examples of which each reading replaces a token, by every random generator."""

    def __len__(self):
        return len(LENGTHS)

    def __getitem__(self, index):
        ids = examples()[index]["input_ids"]
        ids[-1] = torch.randint(3, 300, ()) + random.randrange(300) + np.random.randint(300)
        return {"input_ids": ids}


def test_training_is_the_same_with_the_callback(train):
    """Data, dropout, gradients, weights."""
    losses, weights = [], []
    for callbacks in ([], [IsolationCallback(every=1)]):
        model, _ = build_model("llama")
        model.config.attention_dropout = 0.0
        mlp = model.model.layers[0].mlp
        model.model.layers[0].mlp = torch.nn.Sequential(mlp, torch.nn.Dropout(0.3))
        fv.patch_model(model, "sdpa")
        trainer = train(model, *callbacks, dataset=Noisy(), max_steps=2)
        losses.append([row["loss"] for row in trainer.state.log_history if "loss" in row])
        weights.append(model.state_dict())
    assert len(losses[0]) == 2
    assert losses[0] == losses[1]
    assert all(torch.equal(x, weights[1][name]) for name, x in weights[0].items())


def test_unpatched_sdpa_with_a_cache_ends_the_training(train):
    """Trainer sets use_cache=False, unless told otherwise: then transformers sees no documents."""
    model, _ = build_model("llama")
    weights = {name: x.clone() for name, x in model.state_dict().items()}
    with pytest.raises(fv.IsolationError) as caught:
        train(model, IsolationCallback(), use_cache=True)
    assert (caught.value.layer, caught.value.kind) == (0, "attention")
    assert all(torch.equal(x, weights[name]) for name, x in model.state_dict().items())
    callback = IsolationCallback()
    train(model, callback)
    assert callback.reports[0].gradients == "bits"


def test_leak_that_comes_later_is_found_by_every(train):
    model = patched()
    callback = IsolationCallback(every=3)

    class Break(IsolationCallback):
        def on_train_begin(self, *_args, **_kwargs):
            """Nothing."""

        def on_step_begin(self, _args, state, _control, **_kwargs):
            if state.global_step == 1:
                fv.unpatch_model(model)
                model.config.use_cache = True

    with pytest.raises(fv.IsolationError):
        train(model, Break(), callback)
    assert sorted(callback.reports) == [0]


class Stream(IterableDataset):
    """Examples that can only be iterated, once."""

    def __init__(self):
        self.iterator = iter(examples())

    def __iter__(self):
        return self.iterator


def test_stream_is_not_consumed(train):
    model = patched()
    with pytest.raises(ValueError, match="pass batch="):
        train(model, IsolationCallback(), dataset=Stream())
    stream = Stream()
    callback = IsolationCallback(batch=DataCollatorWithFlattening()(examples()[:3]))
    train(model, callback, dataset=stream, max_steps=1)
    assert callback.reports[0].num_docs == 3
    assert len(list(stream.iterator)) >= len(LENGTHS) - 4  # the loader looks one batch ahead


def test_the_options_choose_examples_and_documents(train):
    callback = IsolationCallback(examples=5, documents=2)
    train(patched(), callback, max_steps=1)
    assert sorted(callback.reports) == [0]
    assert (callback.reports[0].num_docs, len(callback.reports[0].documents)) == (5, 2)


@pytest.mark.parametrize(("is_main", "sharded"), [(False, False), (False, True), (True, False)])
def test_other_processes_run_it_only_where_parameters_are_sharded(
    monkeypatch, tmp_path, is_main, sharded
):
    model = patched().eval()
    monkeypatch.setattr("flexvarlen.verify.isolation.callback.is_sharded", lambda _: sharded)
    callback = IsolationCallback()
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    state = TrainerState(is_world_process_zero=is_main)
    loader = loader_of(examples())
    callback.on_train_begin(arguments, state, None, model=model, train_dataloader=loader)
    assert len(callback.reports) == (is_main or sharded)
    assert not model.training


@pytest.mark.parametrize("options", [{"every": 0}, {"examples": 0}])
def test_bad_option_is_one_sentence(options):
    with pytest.raises(ValueError, match="must be an integer of at least 1, got 0"):
        IsolationCallback(**options)


@pytest.mark.usefixtures("process_group")
def test_sharded_parameters_are_seen():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = patched()
    assert not is_sharded(model)
    mesh = init_device_mesh("cpu", (1,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert is_sharded(model)
    report = fv.verify_isolation(model, DataCollatorWithFlattening()(examples()[:3]))
    assert (report.layers, report.gradients) == (2, "bits")
    assert all(parameter.grad is None for parameter in model.parameters())
    model(**DataCollatorWithFlattening()(examples()[:3])).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def loader_of(dataset, collate=None):
    return torch.utils.data.DataLoader(
        dataset, batch_size=2, shuffle=True, collate_fn=collate or DataCollatorWithFlattening()
    )


ROWS = {"total_tokens": 16, "capacity": 4, "max_seqlen_bound": 16}
"""Of a `PackedCollator`: each example is a whole row, and no two fit."""


def row_of(*lengths):
    return [list(range(5, 5 + n)) for n in lengths]


@pytest.mark.parametrize("boundaries", ["packed_layout", "cu_seq_lens"])
def test_examples_that_are_whole_rows(boundaries, train):
    """As docs/packing.md has it: one a step, as the shapes have no room for two."""
    callback = IsolationCallback(every=1)
    train(
        patched(),
        callback,
        dataset=[row_of(16), row_of(9, 7), row_of(15)],
        collate=fv.PackedCollator(**ROWS, boundaries=boundaries),
        per_device_train_batch_size=1,
        max_steps=1,
    )
    assert [report.num_docs for report in callback.reports.values()] == [2, 2]


@pytest.mark.parametrize("before", [0, 1, 9])
def test_rows_of_one_document_are_passed_over(before):
    """Wherever the others begin: packing puts the longest documents first."""
    rows = [row_of(16)] * before + [row_of(9, 7)] * (10 - before)
    batch = several_documents(loader_of(rows, fv.PackedCollator(**ROWS)), 1)
    assert batch["packed_layout"].lengths == (9, 7)


def test_no_two_documents_fit():
    loader = loader_of([row_of(16)] * 5, fv.PackedCollator(**ROWS))
    with pytest.raises(ValueError, match=r"at least two documents, but .*; pass batch=") as e:
        several_documents(loader, 1)
    assert "total_tokens=16" in str(e.value.__cause__)


# ---- images ----


def examples_with_images():
    return [
        {
            "input_ids": x.ids,
            "mm_token_type_ids": x.types,
            **({"pixel_values": x.patches, "image_grid_thw": x.grid} if len(x.grid) else {}),
        }
        for x in images.documents()
    ]


@pytest.mark.parametrize("leaks", [False, True])
def test_documents_with_images(train, leaks, monkeypatch):
    """Planted: an image of the first document is added to one of the third."""
    model = fv.patch_model(new_model("qwen3_vl"), "sdpa")
    base, callback = model.model, IsolationCallback(examples=4)
    of_images = base.get_image_features

    def spill(*args, **kwargs):
        found = of_images(*args, **kwargs)
        first, second, *others = found.pooler_output
        found.pooler_output = (first, second + first.mean(0), *others)
        return found

    if leaks:
        monkeypatch.setattr(base, "get_image_features", spill)
    collate = fv.PackedCollator(model=model)
    options = {"dataset": examples_with_images(), "collate": collate, "max_steps": 1}
    if leaks:
        with pytest.raises(fv.IsolationError):
            train(model, callback, **options)
    else:
        train(model, callback, **options)
        assert callback.reports[0].gradients == "bits"
        assert callback.reports[0].num_docs == 4
