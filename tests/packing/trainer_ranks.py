"""What test_trainer_ranks.py trains in one process, and in each of two: packed rows in Trainer.
Four rows are a step, of one process or of both.

    STEP: the documents of each rank, and the mean of the ranks' losses.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from accelerate.state import AcceleratorState, GradientState
from transformers import Trainer, TrainingArguments

import flexvarlen as fv
from tests.contract_training import settings
from tests.packing.sampler_ranks import of_all_ranks, world
from tests.tiny_models import VOCABULARY, new_model

TOKENS, ROWS_PER_STEP = 64, 4
ORDERED = {"train_sampling_strategy": "sequential"}
DISPATCHED = {"accelerator_config": {"dispatch_batches": True}}
SHARDED = {"accelerator_config": {"dispatch_batches": False}}
RUNS: dict[str, dict[str, Any]] = {
    "random": {},
    "balanced": ORDERED,
    "balanced-dispatched": ORDERED | DISPATCHED,
    "stream": {"max_steps": 4},  # which Trainer dispatches
    "stream-sharded": {"max_steps": 4} | SHARDED,
}
# After which step a run is resumed. If a map-style dataset is dispatched, accelerate then skips
# batches of one rank, where it should skip those of both.
STOPS = {"random": 5, "balanced": 5, "stream": 2, "stream-sharded": 2}
Steps = list[tuple[list[list[list[int]]], float]]


def examples() -> list[list[int]]:
    """Documents that fill 16 rows, some by one and some by many."""
    rng = np.random.default_rng(7)
    lengths = [2, 2, 3, 4, 5, 6, 8, 8, 10, 16] * 8 + [30, 34] * 4 + [60] * 4
    return [rng.integers(3, VOCABULARY, n).tolist() for n in lengths]


def dataset_of(run: str) -> Any:
    if run.startswith("stream"):
        return fv.StreamPacker(examples(), TOKENS, buffer=16)
    balanced = ROWS_PER_STEP if run.startswith("balanced") else None
    return fv.PackedDataset(examples(), TOKENS, rows_per_step=balanced)


class SeeingTrainer(Trainer):
    """Keeps the documents that it trains on, and their losses."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        tokens, positions = inputs["input_ids"][0], inputs["position_ids"][0]
        starts = (positions == 0).nonzero().ravel().tolist()[1:]
        parts = [part.tolist() for part in tokens.tensor_split(starts)]
        loss = super().training_step(model, inputs, num_items_in_batch)
        documents = [part for part in parts if any(part)]  # not the padding
        self.seen = [*getattr(self, "seen", ()), (documents, loss.item())]
        return loss


def trained(run: str, folder: str, checkpoint: str | None = None, **changes: Any) -> Steps:
    """STEPs of two epochs, or what follows on the checkpoint."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
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


def saved(name: str, folder: str) -> Steps:
    """As `trained`, with checkpoints."""
    return trained(name, folder, save_strategy="steps", save_steps=STOPS.get(name, 5))


def resumed(name: str, folder: str) -> Steps:
    """From a checkpoint of `saved`."""
    return trained(name, folder, f"{folder}/checkpoint-{STOPS[name]}")
