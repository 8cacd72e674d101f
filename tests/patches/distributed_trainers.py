"""What two processes train by Trainer and SFTTrainer for test_distributed.py: rows of another
length on each rank, with another number of labels.
"""

from __future__ import annotations

from tempfile import TemporaryDirectory
from typing import Any

import datasets
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

import flexvarlen as fv
from tests.contract_oracle import Step
from tests.contract_training import documents, forget_accelerate, recorded, settings
from tests.patches.distributed_ranks import mean
from tests.patches.test_trl import WAYS, sft
from tests.ranks import of_all_ranks
from tests.tiny_models import new_model

SFT = {"sft padding_free": 4, "sft packing": 2, "sft packing_defaults": 2}
"""Examples in a rank's batch: a step has 8 documents, or all four packed rows."""

UNSENDABLE = {
    "dispatched without a size": fv.PackedCollator(),
    "dispatched trees": fv.TreeCollator(total_tokens=64),
}
"""Collators of a stream, whose batches accelerate loads in the first process."""


def trainer_of(run: str, folder: str) -> Any:
    """A trainer of two steps, and its recorder."""
    forget_accelerate()
    model = fv.patch_model(new_model("qwen3"), "sdpa")
    if run in SFT:
        datasets.disable_caching()
        changes = {**WAYS[run.split()[1]], "per_device_train_batch_size": SFT[run]}
        return sft(model, folder, **changes)
    return recorded(
        Trainer,
        model=model,
        args=TrainingArguments(**settings(folder)),
        train_dataset=[{"input_ids": x} for x in documents()],
        data_collator=DataCollatorWithFlattening(return_flash_attn_kwargs=True),
    )


def trained(run: str) -> list[tuple[Step, list[dict[str, Any]]]]:
    """Each step, the loss as the ranks' mean, and the documents of both ranks."""
    with TemporaryDirectory() as folder:
        trainer, recorder = trainer_of(run, folder)
        trainer.train()
    found = []
    for step, own in zip(recorder.steps, recorder.documents_of_steps(), strict=True):
        weights, gradients = (
            {name.removeprefix("module."): x for name, x in named.items()}
            for named in (step.weights, step.gradients)
        )
        every = [document for of_rank in of_all_ranks(own) for document in of_rank]
        found.append((Step(weights, mean(step.loss), gradients), every))
    return found


def refused(run: str) -> str:
    """What both ranks raise, so that none waits for the other."""
    forget_accelerate()
    with TemporaryDirectory() as folder:
        trainer = Trainer(
            fv.patch_model(new_model("qwen3"), "sdpa"),
            TrainingArguments(**settings(folder, per_device_train_batch_size=1)),
            train_dataset=fv.StreamPacker(documents(), 64),
            data_collator=UNSENDABLE[run],
        )
        try:
            trainer.train()
        except ValueError as error:
            return str(error)
    return "nothing was raised"
