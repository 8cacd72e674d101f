"""`loss_chunk_tokens` in Trainer, and below accelerate's wrappers."""

from __future__ import annotations

import pytest
import torch
from accelerate import Accelerator, cpu_offload
from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments

import flexvarlen as fv
from tests.contract_oracle import gradients_of
from tests.contract_training import settings
from tests.patches.forward.test_chunked_loss import CHUNK, assert_close, padded, rows
from tests.patches.forward.test_trees import samples
from tests.tiny_models import new_model, tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:num_items_in_batch counts labels")


class Kept(Trainer):
    """Keeps the gradients of its first step."""

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        vars(self).setdefault("learned", gradients_of(self.model))
        return loss


def trainer_of(folder, kind=Kept, **changes):
    """Of padded batches, in two of which one step learns."""
    arguments = settings(folder, gradient_accumulation_steps=2, eval_strategy="epoch", **changes)
    examples = [{"input_ids": x, "labels": x} for x in samples()]
    return kind(
        new_model("llama"),
        TrainingArguments(**arguments),
        train_dataset=examples,
        eval_dataset=examples,
        data_collator=DataCollatorForSeq2Seq(tokenizer(), padding=True),
    )


def test_trainer(tmp_path):
    """Its losses, those of evaluation too, and its weights."""
    found = []
    for chunk in (None, CHUNK):
        trainer = fv.patch_trainer(trainer_of(tmp_path), "sdpa", loss_chunk_tokens=chunk)
        trainer.train()
        losses = [x for log in trainer.state.log_history for k, x in log.items() if "loss" in k]
        found.append((torch.tensor(losses), trainer.learned))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-5, atol=0)
    assert len(found[0][0]) > 2
    assert_close(found[1][1], found[0][1])


def test_trainers_that_read_logits(tmp_path):
    smooth = trainer_of(tmp_path, label_smoothing_factor=0.1)
    with pytest.raises(ValueError, match="computes no logits, which label_smoothing_factor needs"):
        fv.patch_trainer(smooth, "sdpa", loss_chunk_tokens=CHUNK)
    trainer = fv.patch_trainer(trainer_of(tmp_path), "sdpa", loss_chunk_tokens=CHUNK)
    with pytest.raises(NotImplementedError, match="predictions need logits"):
        trainer.predict(trainer.eval_dataset)
    fv.patch_model(trainer.model, "sdpa", unpad=True)
    assert len(trainer.predict(trainer.eval_dataset).predictions) == len(samples())
    alone = trainer_of(tmp_path)
    fv.patch_model(alone.model, "sdpa", loss_chunk_tokens=CHUNK)
    with pytest.raises(NotImplementedError, match="predictions need logits"):
        alone.predict(alone.eval_dataset)
    of_trl = trainer_of(tmp_path, type("SFTTrainer", (Trainer,), {"__module__": "trl.trainer"}))
    with pytest.raises(ValueError, match="SFTTrainer's default loss computes no logits"):
        fv.patch_trainer(of_trl, "sdpa", loss_chunk_tokens=CHUNK)


def test_models_beside_the_policy(tmp_path):
    """A loss of several models reads the others' logits."""
    trainer = trainer_of(tmp_path)
    trainer.teacher = new_model("llama")
    fv.patch_trainer(trainer, "sdpa", loss_chunk_tokens=CHUNK)
    assert trainer.model(**padded()).logits is None
    assert trainer.teacher(**padded()).logits is not None


def test_patched_below_a_wrapper(fresh_accelerate):
    """accelerate's, which runs the forward alone under autocast."""
    dtypes = []
    for first in (None, {}, {"loss_chunk_tokens": CHUNK}):
        model = new_model("llama").train()
        if first is not None:
            fv.patch_model(model, "sdpa", **first)
        model = Accelerator(cpu=True, mixed_precision="bf16").prepare(model)
        fv.patch_model(model, "sdpa", loss_chunk_tokens=CHUNK)
        model.lm_head.register_forward_hook(lambda *given: dtypes.append(given[2].dtype))
        assert model(**rows()).logits is None
        assert set(dtypes) == {torch.bfloat16}
        fv.patch_model(model, "sdpa")
        assert model(**rows()).logits.shape[1] == 40


def test_an_offloaded_head():
    """accelerate puts another tensor in place of its weight at each call."""
    model = new_model("llama").requires_grad_(False)
    expected = fv.patch_model(model, "sdpa")(**rows()).loss
    fv.patch_model(model, "sdpa", loss_chunk_tokens=CHUNK)
    cpu_offload(model, torch.device("cpu"))
    torch.testing.assert_close(model(**rows()).loss, expected)


def test_evaluation_that_names_its_arguments(tmp_path):
    """As Seq2SeqTrainer does, of any model once one is patched."""
    trainer = fv.patch_trainer(trainer_of(tmp_path), "sdpa", loss_chunk_tokens=CHUNK)
    batch = next(iter(trainer.get_eval_dataloader()))
    loss, *rest = trainer.prediction_step(trainer.model, batch, prediction_loss_only=True)
    assert loss.isfinite()
    assert rest == [None, None]
