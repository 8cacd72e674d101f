"""TRL's SFT on packed batches learns, step by step, what the documents one by one teach."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import flexvarlen as fv
from flexvarlen.verify.isolation.callback import IsolationCallback
from tests.contract_oracle import by_document
from tests.contract_training import (
    check_steps,
    documents,
    recorded,
    settings,
)
from tests.tiny_models import VOCABULARY, exact_and_baseline, lora, new_model, one_row, tokenizer

trl = pytest.importorskip("trl", reason="needs TRL: pip install -c constraints.txt trl")
datasets = pytest.importorskip("datasets", reason="needs datasets, which TRL brings along")


@pytest.fixture(autouse=True)
def _apart(fresh_accelerate):
    """Datasets are kept in memory."""
    datasets.disable_caching()
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()
    datasets.enable_caching()


# SFTConfig itself turns on bf16 and gradient checkpointing.
PLAIN = {"bf16": False, "gradient_checkpointing": False, "shuffle_dataset": False}
PADDING_FREE = {"padding_free": True, "max_length": None}
PACKING = {"packing": True, "max_length": 64}


def sft(model, tmp_path, *, dataset=None, peft_config=None, **changes):
    """The trainer and its recorder."""
    return recorded(
        trl.SFTTrainer,
        model=model,
        args=trl.SFTConfig(**settings(tmp_path, **{**PLAIN, **changes})),
        train_dataset=datasets.Dataset.from_dict(dataset or {"input_ids": documents()}),
        processing_class=tokenizer(),
        peft_config=peft_config,
    )


def check(model, tmp_path, *, plain=None, **given):
    """Two steps, each held against its documents one by one; the recorder of them."""
    trainer, recorder = sft(model, tmp_path, **given)
    trainer.train()
    check_steps(
        recorder,
        plain or new_model("qwen3"),
        autocast=given.get("bf16", False),
        smoothing=given.get("label_smoothing_factor", 0.0),
    )
    return recorder


WAYS: dict[str, dict[str, Any]] = {
    "padding_free": PADDING_FREE,
    "padding_free_defaults": {**PADDING_FREE, "bf16": True, "gradient_checkpointing": True},
    "padding_free_multiple": {**PADDING_FREE, "pad_to_multiple_of": 32},
    "padding_free_reentrant": {
        **PADDING_FREE,
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
    "padding_free_accumulation": {**PADDING_FREE, "gradient_accumulation_steps": 2},
    "padding_free_smoothing": {**PADDING_FREE, "label_smoothing_factor": 0.1},
    "packing": PACKING,
    "packing_defaults": {**PACKING, "bf16": True, "gradient_checkpointing": True},
    "packing_one_row": {**PACKING, "per_device_train_batch_size": 1},
    "packing_split": {**PACKING, "packing_strategy": "bfd_split", "max_length": 24},
    "packing_wrapped": {**PACKING, "packing_strategy": "wrapped"},  # each row is one document
    "padded": {"max_length": None},
}


@pytest.mark.filterwarnings("ignore:.*label_smoothing_factor:FutureWarning")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.sampled(5)
def test_each_way_of_packing(way, tmp_path):
    model = fv.patch_model(new_model("qwen3"), "sdpa")
    recorder = check(model, tmp_path, **WAYS[way])
    count = sum(map(len, recorder.documents_of_steps()))
    assert count > 8 or way not in ("packing", "packing_defaults", "packing_split")


def test_no_document_sees_another_in_training(tmp_path, caplog, recwarn):
    """Nor does TRL make logits, or ask for a kernel of FlashAttention by its name."""
    model = fv.patch_model(new_model("qwen3"), "sdpa")
    trainer, _ = sft(model, tmp_path, **PACKING)
    callback, logits = IsolationCallback(), []
    trainer.add_callback(callback)
    trainer.train()
    assert callback.reports[0].num_docs > 2
    model.lm_head.register_forward_hook(lambda *_: logits.append(1))
    batch = next(iter(trainer.get_train_dataloader()))
    assert trainer.compute_loss(model, dict(batch)).isfinite()
    found = model(**batch, fused_lm_head=True).log_probs[0]
    assert not logits
    start, end = batch["cu_seq_lens_q"][1:3].tolist()
    assert end - start > 1
    batch["input_ids"][0, start:end] = (batch["input_ids"][0, start:end] + 1) % VOCABULARY
    changed = model(**batch, fused_lm_head=True).log_probs[0] != found
    inside = torch.arange(len(changed))
    inside = (inside >= start) & (inside < end - 1)  # of the second, what its tokens foretell
    assert changed[inside].all()
    assert not changed[~inside].any()
    said = [str(each.message) for each in recwarn] + caplog.messages
    assert not [each for each in said if "flash" in each.lower() or "attn_impl" in each]


def test_completions_alone_are_learned(tmp_path):
    model = fv.patch_model(new_model("qwen3"), "sdpa")
    masks = [[0] * (len(x) // 2) + [1] * (len(x) - len(x) // 2) for x in documents()]
    dataset = {"input_ids": documents(), "completion_mask": masks}
    changes = {**PADDING_FREE, "completion_only_loss": True}
    recorder = check(model, tmp_path, dataset=dataset, **changes)
    assert any(-100 in x["labels"] for x in recorder.documents_of_steps()[0])


def test_patched_after_the_trainer_was_made(tmp_path):
    """TRL sets a forward on the instance, to which unpatching gives the model back."""
    model = new_model("qwen3")
    trainer, recorder = sft(model, tmp_path, **PADDING_FREE)
    of_trl = model.forward
    fv.patch_model(model, "sdpa")
    batch = one_row()  # labels that TRL's collator did not mask
    with torch.no_grad():
        out = model(batch.ids, attention_mask=batch.document_ids, labels=batch.ids)
    exact, _ = exact_and_baseline("qwen3", batch.order)
    assert out.loss.item() == pytest.approx(exact.loss.item(), rel=1e-5)
    trainer.train()
    check_steps(recorder, new_model("qwen3"))
    fv.unpatch_model(model)
    assert model.forward == of_trl


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("how", ["peft_config", "peft_model", "patched_later"])
@pytest.mark.sampled(2)
def test_lora(how, checkpointing, tmp_path):
    model = new_model("qwen3")
    if how != "patched_later":
        fv.patch_model(model, "sdpa")
    plain = lora(new_model("qwen3"))
    trainer, recorder = sft(
        model if how == "peft_config" else lora(model),
        tmp_path,
        peft_config=plain.peft_config["default"] if how == "peft_config" else None,
        gradient_checkpointing=checkpointing,
        **PADDING_FREE,
    )
    if how == "patched_later":
        fv.patch_model(trainer.model, "sdpa")
    trainer.train()
    check_steps(recorder, plain)


def test_the_name_alone(tmp_path):
    """As `model_init_kwargs={"attn_implementation": "flexvarlen_doc"}` of SFTConfig."""
    new_model("qwen3").save_pretrained(tmp_path / "model")
    named = {"attn_implementation": "flexvarlen_doc", "dtype": torch.float32}
    trainer, recorder = sft(str(tmp_path / "model"), tmp_path, model_init_kwargs=named, **PACKING)
    assert trainer.model.config._attn_implementation == "flexvarlen_doc"
    trainer.train()
    check_steps(recorder, new_model("qwen3"))


def test_evaluates_generates_and_saves(tmp_path):
    model = fv.patch_model(new_model("qwen3"), "sdpa")
    trainer, _ = sft(model, tmp_path, **PADDING_FREE)
    trainer.train()
    dataset = datasets.Dataset.from_dict({"input_ids": documents()[:5]})
    loss = trainer.evaluate(dataset)["eval_loss"]
    trainer.save_model(tmp_path / "saved")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    assert plain.config._attn_implementation == "sdpa"
    model.eval()
    ids = torch.tensor(documents()[:5][3])[None]
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": 96}
    assert torch.equal(model.generate(ids, **settings), plain.generate(ids, **settings))
    assert loss == pytest.approx(by_document(plain, documents()[:5]).loss.item(), rel=1e-4)
