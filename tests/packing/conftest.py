"""What tests of packing under accelerate and Trainer share."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from transformers import Trainer, TrainingArguments

import flexvarlen as fv
from tests.contract_oracle import check_step
from tests.contract_training import recorded, settings
from tests.tiny_models import new_model


@pytest.fixture
def check_trainer_steps(tmp_path) -> Callable[..., None]:
    """Two steps of Trainer on a dataset of rows learn what their documents teach one by one."""

    def check(dataset, docs, *, batch, workers):
        steps = []

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
            train_dataset=dataset,
            data_collator=fv.PackedCollator(),
        )
        trainer.train()
        assert len(recorder.steps) == len(steps) == 2
        for step, seen in zip(recorder.steps, steps, strict=True):
            assert all(x in docs for x in seen)
            check_step(step, new_model("qwen3"), seen)

    return check
