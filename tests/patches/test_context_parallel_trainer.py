"""Processes that share rows in Trainer and SFTTrainer log, and learn, what one process does."""

from __future__ import annotations

import re

import datasets
import numpy as np
import pytest
import torch
import trl
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

import flexvarlen as fv
from flexvarlen.patches.context_parallel_trainer import is_padded, why_not_context_parallel
from flexvarlen.patches.shard_collator import ShardCollator
from tests.patches.context_parallel_ranks import (
    HAS_MESHES,
    MESHES,
    ROWS,
    RUNS,
    WORLD,
    errors,
    experts,
    learned,
    resumed,
    rows_of_mesh,
    step_on_mesh,
    trained,
    trainer_of,
)
from tests.ranks import Ranks
from tests.slow import with_slow
from tests.tiny_models import new_model

SPEED = ("_runtime", "_per_second", "total_flos")
TOKENS = ("num_tokens", "eval_num_tokens", "num_input_tokens_seen")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """What the first of four processes returns."""
    folder = str(tmp_path_factory.mktemp("ranks"))
    with Ranks(WORLD) as ranks:
        yield lambda case, *arguments: ranks.run(case, *arguments, folder)[0]


@pytest.fixture
def made_again(made):
    """From the checkpoint of a run, which comes first."""
    made(learned, "accumulated")
    return made(resumed)


@pytest.fixture
def _as_it_was(fresh_accelerate):
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def values(log):
    return {name: x for name, x in log.items() if name not in TOKENS and not name.endswith(SPEED)}


MESHED = pytest.mark.skipif(not HAS_MESHES, reason="this transformers has no meshes of experts")
OF_RUNS = {
    "grouped": pytest.mark.slow,  # as flattened, in another order
    "expert_parallel": [MESHED, pytest.mark.slow],
    "sft_packing_lora": pytest.mark.slow,  # as sft_padding_free; LoRA as in test_distributed.py
}


@pytest.mark.usefixtures("_as_it_was")
@pytest.mark.parametrize("name", [pytest.param(name, marks=OF_RUNS.get(name, ())) for name in RUNS])
def test_logs_and_weights_are_those_of_one_process(made, name, tmp_path):
    (logs, weights), (expected, weights_alone) = (
        made(learned, name),
        trained(trainer_of(name, str(tmp_path), alone=True)),
    )
    assert len(logs) == len(expected) > 2
    for number, (got, wanted) in enumerate(zip(logs, expected, strict=True)):
        assert values(got) == pytest.approx(values(wanted), rel=1e-5)
        for count in {*TOKENS} & {*wanted}:  # each row is padded to a multiple of the ranks
            assert 0 <= got[count] - wanted[count] < 4 * WORLD * (number + 1), count
    torch.testing.assert_close(weights, weights_alone, rtol=1e-4, atol=1e-5)


@MESHED
@pytest.mark.parametrize("mesh", with_slow(MESHES, ["fsdp 4, ep 4", "fsdp 2, tp 2"]))
def test_a_step_on_a_mesh_of_transformers_is_that_of_one_process(made, mesh):
    """Pairs of ranks share a row; experts, weights and heads lie on other groups of ranks."""
    loss, gradients = made(step_on_mesh, mesh)
    model = fv.patch_model(experts(output_router_logits=True).train(), "sdpa")
    expected = torch.stack([model(**row).loss for row in rows_of_mesh(mesh)]).sum()
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients.pop(name), parameter.grad, rtol=1e-4, atol=1e-5)
    assert not gradients


def test_resumes_in_the_middle_of_an_epoch(made, made_again):
    whole, weights_of_whole = made(learned, "accumulated")
    logs, weights = made_again["run"]
    after = [values(log) for log in whole[:-1] if log["step"] > 3]  # the last one sums up the run
    again = [values(log) for log in logs[:-1] if log["step"] > 3]
    assert len(again) == len(after) > 1
    for got, wanted in zip(again, after, strict=True):
        assert got == pytest.approx(wanted)
    torch.testing.assert_close(weights, weights_of_whole)
    assert made_again["examples_of_a_step"] == 2 * ROWS
    assert made_again["seeds_of_workers"] == [0, 0, 1, 1]


def test_a_loader_may_be_prepared_again(made_again):
    assert made_again["batches"] == [3, 3, 3]  # of six rows, for each of two groups


ERRORS = {
    "ranks": "context_parallel must divide the number of processes, got 3 with 4",
    "smoothing": "does not support label_smoothing_factor;",
    "own count": "does not support average_tokens_across_devices=False;",
    "rebalanced": "does not support train_sampling_strategy='batch_rebalance';",
    "tensor parallel": r"must have one rank of each tensor-parallel group, .*got ranks \[0, 1\]",
    "padded": "context_parallel shares packed rows, got batches that are padded",
    "dispatched": "but accelerate's dispatch_batches",
    "evaluated first": r"train\(\) must come before evaluate\(\)",
    "evaluated first, compiled": r"train\(\) must come before evaluate\(\)",
    "fewer rows": "the processes of a group must load the same row; seed the dataset",
    "twice": "a trainer with context_parallel cannot be patched twice",
    "predict": "predictions need whole rows",
    "isolation": "IsolationCallback verifies whole rows",
    "other rows": "the processes of a group must load the same row; seed the dataset",
    "other rows later": "the processes of a group must load the same row; seed the dataset",
    "padded batches": r"must be one packed row with labels, got input_ids \[2, 2\];",
    "patched again": "must not be patched again or unpatched",
}


@pytest.mark.parametrize("case", ERRORS)
def test_sentences_of_what_cannot_be(made, case):
    assert re.search(ERRORS[case], made(errors)[case])


def test_trainers_of_padded_batches_are_refused():
    trainers = ("DPOTrainer", "RewardTrainer", "GRPOTrainer")
    assert all(is_padded(object.__new__(getattr(trl, name))) for name in trainers)


def test_options_of_padded_batches_are_refused(tmp_path):
    trainer = trainer_of("packed", str(tmp_path), alone=True)
    with pytest.raises(ValueError, match="cannot be combined with unpad_to_multiple_of"):
        fv.patch_trainer(trainer, context_parallel=2, share_prefixes=True)
    with pytest.raises(ValueError, match="got 2 with 1; start more with torchrun"):
        fv.patch_trainer(trainer, context_parallel=2)


def test_losses_of_other_counts_are_refused(tmp_path, monkeypatch):
    """An encoder's takes the mean over the labels of a process; a user's may too."""
    monkeypatch.setattr(TrainingArguments, "world_size", 2)
    args = TrainingArguments(output_dir=str(tmp_path), report_to=[])
    trainer = Trainer(model=new_model("bert"), args=args)
    assert "does not support an encoder;" in why_not_context_parallel(trainer, 2)
    trainer = Trainer(model=new_model("llama"), args=args)
    trainer.compute_loss = lambda model, inputs, **_: model(**inputs).loss
    assert "does not support a compute_loss of Trainer;" in why_not_context_parallel(trainer, 2)


def test_loader_workers_shard():
    rows = [[np.arange(2, 9), np.arange(3, 7)], [np.arange(5, 15)]]
    collate = [ShardCollator(fv.PackedCollator(), rank, 2, 0) for rank in (0, 1)]
    shards = [
        list(DataLoader(rows, batch_size=2, collate_fn=each, num_workers=workers))
        for each in collate
        for workers in (0, 1)
    ]
    for here, in_worker in (shards[:2], shards[2:]):
        assert here[0].keys() == in_worker[0].keys()
        assert torch.equal(here[0]["input_ids"], in_worker[0]["input_ids"])
    batches = [shards[0][0], shards[2][0]]
    assert batches[0]["row_checksum"] == batches[1]["row_checksum"]
    assert torch.cat([x["input_ids"][0] for x in batches]).numel() == 22


def test_a_row_shorter_than_a_convolution_is_padded():
    shards = [ShardCollator(fv.PackedCollator(), rank, 2, 0)([[5, 6]]) for rank in (0, 1)]
    assert [x["input_ids"].tolist() for x in shards] == [[[5, 6, 0]], [[0, 0, 0]]]


def test_groups_wait_as_long_as_the_trainer_says(made_again):
    assert made_again["timeout_s"] == 900


def test_trees_are_refused():
    tree = fv.PackedLayout.from_tree([4, 2, 2], [-1, 0, 0])
    batch = {"input_ids": torch.ones(1, 8, dtype=torch.int64), "packed_layout": tree}
    with pytest.raises(NotImplementedError, match="context_parallel does not support trees"):
        ShardCollator(lambda _: batch, 0, 2, 0)([])
