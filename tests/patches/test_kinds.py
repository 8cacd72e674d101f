"""Every kind of model under checkpointing, in Trainer and in TRL's SFT learns as documents alone.

What each kind does by itself is tested elsewhere: docs/compatibility.md says where.
"""

from __future__ import annotations

import pytest
import torch
from accelerate.utils import compile_regions
from transformers import Trainer, TrainingArguments

import flexvarlen as fv
from tests.contract_oracle import gradients_of
from tests.contract_training import recorded, settings
from tests.patches.kinds import CAUSAL_TEXT, KINDS, assert_learned_alone, examples, row_of
from tests.slow import with_slow

pytestmark = pytest.mark.filterwarnings(
    "ignore:flexvarlen. recurrent layers run one document after another"
)


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_checkpointing(kind):
    model = fv.patch_model(KINDS[kind].model(), "sdpa")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    loss = model(**row_of(kind)).loss
    loss.backward()
    assert_learned_alone(kind, loss.detach(), gradients_of(model))


def test_layers_compiled_one_by_one():
    """Of images and their text; other kinds have tests of whole graphs."""
    torch._dynamo.reset()
    model = compile_regions(KINDS["images"].model(), backend="eager")
    loss = fv.patch_model(model, "sdpa")(**row_of("images")).loss
    loss.backward()
    gradients = {name.replace("_orig_mod.", ""): x for name, x in gradients_of(model).items()}
    assert_learned_alone("images", loss.detach(), gradients)
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", KINDS)
def test_trainer(kind, tmp_path):
    arguments = settings(tmp_path, max_steps=1, per_device_train_batch_size=6)
    trainer, recorder = recorded(
        Trainer,
        model=fv.patch_model(KINDS[kind].model(), "sdpa"),
        args=TrainingArguments(**arguments),
        train_dataset=examples(kind),
        data_collator=fv.PackedCollator(next_token_labels=kind != "encoder"),
    )
    trainer.train()
    (step,) = recorder.steps
    assert_learned_alone(kind, step.loss, step.gradients)


@pytest.mark.parametrize("kind", with_slow(CAUSAL_TEXT, ["windows", "longrope"]))  # as test_trainer
def test_sft_of_trl(kind, tmp_path):
    """The loss of a router too, which TRL adds by itself."""
    pytest.importorskip("trl", reason="needs TRL: pip install -c constraints.txt trl")
    from tests.patches.test_trl import PADDING_FREE, sft

    ids = {"input_ids": [each["input_ids"] for each in examples(kind)]}
    sizes = {"max_steps": 1, "per_device_train_batch_size": 6}
    model = fv.patch_model(KINDS[kind].model(), "sdpa")
    trainer, recorder = sft(model, tmp_path, dataset=ids, **PADDING_FREE, **sizes)
    trainer.train()
    (step,) = recorder.steps
    assert_learned_alone(kind, step.loss, step.gradients)
