"""What two processes train by Trainer and SFTTrainer for test_distributed.py: rows of another
length on each rank, with another number of labels.
"""

from __future__ import annotations

from collections.abc import Iterator
from tempfile import TemporaryDirectory
from typing import Any

import datasets
import torch.distributed as dist
from torch.utils.data import IterableDataset
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

import flexvarlen as fv
from tests.contract_oracle import Step
from tests.contract_training import (
    documents,
    documents_of,
    forget_accelerate,
    recorded,
    settings,
)
from tests.patches.distributed_inputs import WORLD
from tests.patches.distributed_ranks import mean
from tests.patches.test_trl import WAYS, sft
from tests.ranks import of_all_ranks
from tests.tiny_models import new_model

SFT = {"sft padding_free": 4, "sft packing": 2, "sft packing_defaults": 2}
"""Examples in a rank's batch: a step has 8 documents, or all four packed rows."""


class Rows(IterableDataset):
    """Packed rows, of which accelerate loads those of both processes in the first."""

    def __iter__(self) -> Iterator[list[list[int]]]:
        lengths = [len(document) for document in documents()]
        for row in fv.pack(lengths, 64, strategy="in_order"):
            yield [documents()[i] for i in row]


COLLATORS: dict[str, Any] = {
    "flattened": DataCollatorWithFlattening(return_flash_attn_kwargs=True),
    "dispatched": fv.PackedCollator(total_tokens=64, capacity=16, max_seqlen_bound=64),
    "dispatched without a size": fv.PackedCollator(),
    "dispatched trees": fv.TreeCollator(total_tokens=64),
}


def trainer_of(run: str, folder: str) -> Any:
    """A trainer of two steps, and its recorder."""
    forget_accelerate()
    model = fv.patch_model(new_model("qwen3"), "sdpa")
    if run in SFT:
        datasets.disable_caching()
        changes = {**WAYS[run.split()[1]], "per_device_train_batch_size": SFT[run]}
        return sft(model, folder, **changes)
    flattened = run == "flattened"
    sizes = {} if flattened else {"per_device_train_batch_size": 1}
    return recorded(
        Trainer,
        model=model,
        args=TrainingArguments(**settings(folder, **sizes)),
        train_dataset=[{"input_ids": x} for x in documents()] if flattened else Rows(),
        data_collator=COLLATORS[run],
    )


def trained(run: str) -> list[tuple[Step, list[dict[str, Any]]]]:
    """Each step, the loss as the ranks' mean, and the documents of both ranks."""
    with TemporaryDirectory() as folder:
        trainer, recorder = trainer_of(run, folder)
        trainer.train()
    of_steps = recorder.documents_of_steps()
    if run == "dispatched":  # collated for both by the first
        of_steps = [[*documents_of([row])] for row in [*Rows()][dist.get_rank() :: WORLD]]
    found = []
    for step, own in zip(recorder.steps, of_steps, strict=False):
        weights, gradients = (
            {name.removeprefix("module."): x for name, x in named.items()}
            for named in (step.weights, step.gradients)
        )
        every = [document for of_rank in of_all_ranks(own) for document in of_rank]
        found.append((Step(weights, mean(step.loss), gradients), every))
    return found


def refused(run: str) -> str:
    """What both ranks raise, so that none waits for the other."""
    with TemporaryDirectory() as folder:
        trainer, _ = trainer_of(run, folder)
        trainer.data_collator = COLLATORS[run]  # which is asked as the training starts
        try:
            trainer.train()
        except ValueError as error:
            return str(error)
    return "nothing was raised"
