"""Trainers that remember what each optimizer step saw: weights, documents, loss, gradients."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, nn
from transformers import TrainerCallback

from tests.contract_oracle import Step, check_step, gradients_of, snapshot
from tests.tiny_models import VOCABULARY

LENGTHS = (7, 30, 1, 18, 3, 25, 12, 40, 1, 9, 16, 2, 33, 5, 21, 11)


def documents() -> list[list[int]]:
    """16 documents of token ids, of 1 to 40 tokens."""
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in LENGTHS]


def settings(folder: Any, **changes: Any) -> dict[str, Any]:
    """Arguments of plain SGD on the CPU: two steps of four documents, nothing clipped or saved."""
    return {
        "output_dir": str(folder),
        "max_steps": 2,
        "per_device_train_batch_size": 4,
        "learning_rate": 0.01,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "optim": "sgd",
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        **changes,
    }


def forget_accelerate() -> None:
    """Mixed precision, compilation and the number of processes are states of the process."""
    for name in [*os.environ]:
        if name.startswith(("ACCELERATE_DYNAMO", "ACCELERATE_MIXED_PRECISION")):
            del os.environ[name]
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


class Recorder(TrainerCallback):
    """Keeps a `Step` for each optimizer step, and the examples of each micro-batch."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.losses: list[Tensor] = []
        self.batches: list[list[Any]] = []
        self._weights: dict[str, Tensor] = {}
        self._batches_per_step = 1

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
        self._weights, self.losses = snapshot(model), []
        self._batches_per_step = args.gradient_accumulation_steps

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any
    ) -> None:
        loss = torch.stack(self.losses).sum()
        self.steps.append(Step(self._weights, loss, gradients_of(model)))

    def documents_of_steps(self) -> list[list[dict[str, list[int]]]]:
        """The documents of each step: "input_ids", and "labels" where there are any."""
        count = self._batches_per_step
        return [
            [*chain(*map(documents_of, self.batches[i * count : (i + 1) * count]))]
            for i in range(len(self.steps))
        ]


def documents_of(examples: list[Any]) -> Iterator[dict[str, list[int]]]:
    """The documents of a micro-batch: of rows in lists, or of dicts with "seq_lengths"."""
    for example in examples:
        if isinstance(example, list) and isinstance(example[0], int):
            yield {"input_ids": example}
        elif isinstance(example, list):
            yield from documents_of(example)
        else:
            lengths = example.get("seq_lengths") or [len(example["input_ids"])]
            names = [name for name in ("input_ids", "labels") if name in example]
            parts = (torch.tensor(example[name]).split(lengths) for name in names)
            for document in zip(*parts, strict=True):
                yield {name: x.tolist() for name, x in zip(names, document, strict=True)}


def recorded(trainer_class: type, **arguments: Any) -> tuple[Any, Recorder]:
    """A trainer of the class, and the recorder of its steps.

    Its collator is a function, so that nothing finds out its class as the training starts.
    """
    recorder = Recorder()

    class RecordedTrainer(trainer_class):  # type: ignore[misc]
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            loss = super().training_step(*args, **kwargs)
            recorder.losses.append(loss.detach())
            return loss

    trainer = RecordedTrainer(callbacks=[recorder], **arguments)
    collate = trainer.data_collator

    def noted(examples: list[Any]) -> Any:
        recorder.batches.append(copy.deepcopy(examples))
        return collate(examples)

    trainer.data_collator = noted
    return trainer, recorder


def check_steps(recorder: Recorder, plain: nn.Module, **how: Any) -> None:
    """Each of two steps is that of its documents one by one; `how` as in `check_step`."""
    assert len(recorder.steps) == 2
    for step, found in zip(recorder.steps, recorder.documents_of_steps(), strict=True):
        check_documents(step, plain, found, **how)


def check_documents(
    step: Step, plain: nn.Module, found: list[dict[str, list[int]]], **how: Any
) -> None:
    """The step is that of these documents, with their labels if they have any."""
    labels = [x["labels"] for x in found] if "labels" in found[0] else None
    check_step(step, plain, [x["input_ids"] for x in found], labels=labels, **how)
