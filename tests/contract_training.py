"""Trainers that remember what each optimizer step saw: weights, documents, loss, gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from tests.contract_oracle import Step, gradients_of, snapshot
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


class Recorder(TrainerCallback):
    """Keeps a `Step` for each optimizer step."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.losses: list[Tensor] = []
        self._weights: dict[str, Tensor] = {}

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
        self._weights, self.losses = snapshot(model), []

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any
    ) -> None:
        loss = torch.stack(self.losses).sum()
        self.steps.append(Step(self._weights, loss, gradients_of(model)))


def recorded(trainer_class: type, **arguments: Any) -> tuple[Any, Recorder]:
    """A trainer of the class, and the recorder of its steps."""
    recorder = Recorder()

    class RecordedTrainer(trainer_class):  # type: ignore[misc]
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            loss = super().training_step(*args, **kwargs)
            recorder.losses.append(loss.detach())
            return loss

    return RecordedTrainer(callbacks=[recorder], **arguments), recorder
