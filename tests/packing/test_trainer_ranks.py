"""Packed rows in Trainer on two ranks: the steps of one process, each row once, and resumed.

Four rows are a step, of one process or of both.

    STEP: the documents of each rank, and the mean of the ranks' losses.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import Trainer, TrainingArguments

import flexvarlen as fv
from tests.contract_training import forget_accelerate, settings
from tests.ranks import of_all_ranks, world
from tests.tiny_models import VOCABULARY, new_model

TOKENS, ROWS_PER_STEP = 64, 4
ORDERED = {"train_sampling_strategy": "sequential"}
DISPATCHED = {"accelerator_config": {"dispatch_batches": True}}
SHARDED = {"accelerator_config": {"dispatch_batches": False}}
RUNS = {
    "random": {},
    "balanced": ORDERED,
    "balanced-dispatched": ORDERED | DISPATCHED,
    "stream": {"max_steps": 7},  # which Trainer dispatches; of two passes
    "stream-sharded": {"max_steps": 7} | SHARDED,
}
# After which step a run is resumed. If a map-style dataset is dispatched, accelerate then skips
# batches of one rank, where it should skip those of both.
STOPS = {"random": 5, "balanced": 5, "stream": 5, "stream-sharded": 5}


def examples():
    """Documents that fill 16 rows, some by one and some by many."""
    rng = np.random.default_rng(7)
    lengths = [2, 2, 3, 4, 5, 6, 8, 8, 10, 16] * 8 + [30, 34] * 4 + [60] * 4
    return [rng.integers(3, VOCABULARY, n).tolist() for n in lengths]


def dataset_of(run):
    if run.startswith("stream"):
        return fv.StreamPacker(examples(), TOKENS, buffer=16, passes=None)
    balanced = ROWS_PER_STEP if run.startswith("balanced") else None
    return fv.PackedDataset(examples(), TOKENS, rows_per_step=balanced)


class SeeingTrainer(Trainer):
    """Keeps the documents that it trains on, and their losses."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        tokens, positions = inputs["input_ids"][0], inputs["position_ids"][0]
        starts = (positions == 0).nonzero().ravel().tolist()[1:]
        parts = [part.tolist() for part in tokens.tensor_split(starts)]
        loss = super().training_step(model, inputs, num_items_in_batch)
        documents = [part for part in parts if any(part)]  # not the padding
        self.seen = [*getattr(self, "seen", ()), (documents, loss.item())]
        return loss


def trained(run, folder, checkpoint=None, **changes):
    """STEPs of two epochs, or what follows on the checkpoint."""
    forget_accelerate()
    batch = ROWS_PER_STEP // world()
    options = {"max_steps": -1, "num_train_epochs": 2, "per_device_train_batch_size": batch}
    options |= {"optim": "adamw_torch", "logging_strategy": "no"}
    trainer = SeeingTrainer(
        fv.patch_model(new_model("qwen3"), "sdpa"),
        TrainingArguments(**settings(folder, **options | RUNS[run] | changes)),
        train_dataset=dataset_of(run),
        data_collator=fv.PackedCollator(total_tokens=batch * TOKENS),
    )
    trainer.train(checkpoint)
    ranks = of_all_ranks(trainer.seen)
    return [
        ([documents for documents, _ in step], sum(loss for _, loss in step) / world())
        for step in zip(*ranks, strict=True)
    ]


def saved(name, folder):
    """As `trained`, with checkpoints."""
    return trained(name, folder, save_strategy="steps", save_steps=STOPS.get(name, 5))


def resumed(name, folder):
    """From a checkpoint of `saved`."""
    return trained(name, folder, f"{folder}/checkpoint-{STOPS[name]}")


EXAMPLES = sorted(examples())


@pytest.fixture(scope="module")
def made(ranks, tmp_path_factory):
    """STEPs of two processes, by the run, which leaves its checkpoints, or by one from these."""
    folder = tmp_path_factory.mktemp("ranks")
    return lambda name, case=saved: ranks.run(case, name, str(folder / name))[0]


@pytest.mark.usefixtures("fresh_accelerate")
@pytest.mark.parametrize("name", RUNS)
def test_steps_are_those_of_one_process(made, name, tmp_path):
    steps, alone = made(name), trained(name, str(tmp_path))
    assert len(steps) == len(alone) > 2
    for number, ((ranks, loss), ((documents,), expected)) in enumerate(
        zip(steps, alone, strict=True)
    ):
        assert [*ranks[0], *ranks[1]] == documents, number
        assert loss == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", [name for name in RUNS if not name.startswith("stream")])
def test_an_epoch_has_each_document_once(made, name):
    steps = made(name)
    half = len(steps) // 2
    assert half * 4 == len(dataset_of(name))
    for epoch in steps[:half], steps[half:]:
        assert sorted(x for ranks, _ in epoch for batch in ranks for x in batch) == EXAMPLES


def imbalance(steps):
    """Of the slowest rank's attention to that of the mean."""
    costs = torch.tensor(
        [[sum(len(x) ** 2 for x in batch) for batch in ranks] for ranks, _ in steps]
    ).double()
    return float(costs.amax(1).sum() / costs.mean(1).sum())


def test_ranks_have_equal_work(made):
    balanced = imbalance(made("balanced"))
    assert balanced < 1.1
    assert imbalance(made("random")) - 1 > 2 * (balanced - 1)
    assert imbalance(made("balanced-dispatched")) == balanced


@pytest.mark.parametrize("name", STOPS)
def test_resumed_steps_are_those_of_a_run_that_was_not_stopped(made, name):
    whole = made(name)
    steps = made(name, resumed)
    assert len(steps) > 1
    assert steps == whole[STOPS[name] :]
