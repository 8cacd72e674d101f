"""Trainer with flattened batches learns, step by step, what the documents one by one teach."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from accelerate.utils import concatenate, send_to_device
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    DataCollatorWithFlattening,
    PhiConfig,
    Trainer,
    TrainingArguments,
)

import flexvarlen as fv
from flexvarlen.verify.isolation.callback import IsolationCallback
from tests.contract_oracle import by_document
from tests.contract_training import (
    check_steps,
    documents,
    recorded,
    settings,
)
from tests.tiny_models import config_of, lora, new_model

pytestmark = pytest.mark.usefixtures("fresh_accelerate")


class Dropping(DataCollatorWithFlattening):
    """Hands over neither the longest document nor the positions."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        batch = super().__call__(*args, **kwargs)
        dropped = ("max_length_q", "max_length_k", "position_ids")
        return {name: x for name, x in batch.items() if name not in dropped}


def flattening(*options: str, **others: Any) -> DataCollatorWithFlattening:
    return DataCollatorWithFlattening(**{f"return_{name}": True for name in options}, **others)


FLASH, SEQ_IDX = "flash_attn_kwargs", "seq_idx"
SIZES = {"total_tokens": 64, "capacity": 8, "max_seqlen_bound": 64}


def learned(document):
    """A document with labels; the first third is not learned."""
    third = len(document) // 3
    return {"input_ids": document, "labels": [-100] * third + document[third:]}


def rows(of=learned):
    """Lists of documents, each of at most 64 tokens in all."""
    packed = fv.pack([len(x) for x in documents()], SIZES["total_tokens"], strategy="in_order")
    return [[of(documents()[i]) for i in row] for row in packed]


def given(tmp_path, collator, dataset=None, **changes):
    """Arguments of a trainer beside the model."""
    return {
        "args": TrainingArguments(**settings(tmp_path, **changes)),
        "train_dataset": [{"input_ids": x} for x in documents()] if dataset is None else dataset,
        "data_collator": collator,
    }


def check(model, tmp_path, collator, *, plain=None, dataset=None, how=None, **changes):
    """Two steps of a patched model, each held against its documents one by one."""
    made = given(tmp_path, collator, dataset, **changes)
    trainer, recorder = recorded(Trainer, model=model, **made)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=dataset is not None):
        trainer.train()
    check_steps(recorder, plain or new_model("qwen3"), **(how or {}))


ACCUMULATION = {"gradient_accumulation_steps": 2}
CHECKPOINTING = {"gradient_checkpointing": True}
REENTRANT = {"gradient_checkpointing_kwargs": {"use_reentrant": True}}
FLATTENED: dict[str, tuple[DataCollatorWithFlattening, dict[str, Any]]] = {
    "plain": (flattening(), {}),
    "cache_asked_for": (flattening(FLASH), {"use_cache": True}),
    "label_smoothing": (
        flattening(FLASH),
        {"label_smoothing_factor": 0.1, **ACCUMULATION, "bf16": True},
    ),
    "boundaries_alone": (flattening(FLASH, return_position_ids=False), ACCUMULATION),
    "seq_idx": (flattening(SEQ_IDX), {"average_tokens_across_devices": False}),
    "seq_idx_alone": (flattening(SEQ_IDX, return_position_ids=False), CHECKPOINTING),
    "all": (flattening(FLASH, SEQ_IDX), {**CHECKPOINTING, **ACCUMULATION, "bf16": True}),
    "positions_from_2": (flattening(position_ids_start=2), {**CHECKPOINTING, **REENTRANT}),
    "no_max_length": (Dropping(return_flash_attn_kwargs=True), {"bf16": True}),
    "one_document_a_batch": (flattening(), {"per_device_train_batch_size": 1}),
    "torch_compile": (flattening(), {"torch_compile": True, "torch_compile_backend": "eager"}),
}


# Lengths that differ compile several times; test_rows_of_fixed_shapes compiles once.
SLOW = {"torch_compile": pytest.mark.slow}


@pytest.mark.parametrize(
    ("way", "kind"),
    [pytest.param(way, "qwen3", marks=SLOW.get(way, ())) for way in FLATTENED]
    + [(way, "qwen2_windows") for way in ("plain", "all")],
)
def test_each_way_of_training(way, kind, tmp_path):
    collator, changes = FLATTENED[way]
    how = {
        "first": 2 if way == "positions_from_2" else 0,
        "autocast": changes.get("bf16", False),
        "smoothing": changes.get("label_smoothing_factor", 0.0),
    }
    model = fv.patch_model(new_model(kind), "sdpa")
    check(model, tmp_path, collator, plain=new_model(kind), how=how, **changes)


ROW_WAYS: dict[str, dict[str, Any]] = {
    "accumulation": ACCUMULATION,
    "all_at_once": {**ACCUMULATION, "bf16": True, "gradient_checkpointing": True},
    "torch_compile": {"torch_compile": True, "torch_compile_backend": "eager"},
    "lora": {},
}


@pytest.mark.parametrize("way", ROW_WAYS)
@pytest.mark.sampled(2)
def test_rows_of_fixed_shapes(way, tmp_path):
    """The loss is the mean over the labels of all rows of a step, as Trainer counts them."""
    changes = {"per_device_train_batch_size": 1, **ROW_WAYS[way]}
    layers = {"num_hidden_layers": 1} if way == "torch_compile" else {}  # half the time
    plain = new_model("qwen3", **layers)
    model = fv.patch_model(new_model("qwen3", **layers), "sdpa")
    if way == "lora":
        model, plain = lora(model), lora(plain)
    how = {"autocast": changes.get("bf16", False)}
    collator = fv.PackedCollator(**SIZES)
    check(model, tmp_path, collator, plain=plain, dataset=rows(), how=how, **changes)


@pytest.mark.parametrize("way", ["cache_asked_for", "boundaries_alone"])
def test_a_model_that_is_not_patched_fails_the_oracle(way, tmp_path):
    """transformers sees documents in position_ids alone, and only without a cache."""
    collator, changes = FLATTENED[way]
    with pytest.raises(AssertionError, match="exceeds"):
        check(new_model("qwen3"), tmp_path, collator, **changes)


def test_a_separator_that_is_a_token_is_not_learned(tmp_path):
    """It would have the last token of a document foresee it. Trainer counts it as a label."""
    model = fv.patch_model(new_model("qwen3"), "sdpa")
    dataset = [{"input_ids": x} for x in documents()[:4]]
    how = {"num_labels": sum(map(len, documents()[:4])) - 1}
    check(model, tmp_path, flattening(separator_id=5), dataset=dataset, how=how)


def test_labels_of_the_dataset(tmp_path):
    """Prompts are not learned; one document has nothing else."""
    model = fv.patch_model(new_model("qwen3"), "sdpa")
    dataset = [learned(x) for x in documents()]
    dataset[1]["labels"] = [-100] * len(dataset[1]["input_ids"])
    check(model, tmp_path, flattening(), dataset=dataset)


@pytest.mark.parametrize("bf16", [False, True])
def test_evaluation_and_prediction(bf16, tmp_path):
    """In eval mode, where a model makes a cache: it is not among what was predicted."""
    dataset = [{"input_ids": x} for x in documents()[:4]]
    trainer = Trainer(
        model=fv.patch_model(new_model("qwen3"), "sdpa"),
        args=TrainingArguments(**settings(tmp_path, per_device_eval_batch_size=4, bf16=bf16)),
        eval_dataset=dataset,
        data_collator=DataCollatorWithFlattening(),
    )
    loss = trainer.evaluate()["eval_loss"]
    predicted = trainer.predict(dataset)
    plain = new_model("qwen3")
    expected = by_document(plain, documents()[:4], autocast=bf16).loss.item()
    assert loss == pytest.approx(expected, rel=2e-2 if bf16 else 1e-4)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        logits = [plain(torch.tensor([x])).logits[0].float() for x in documents()[:4]]
    ours = torch.as_tensor(predicted.predictions)[0].float()
    tolerance = 0.2 if bf16 else 1e-3  # logits reach 15, and a leak moves them by more than 1
    torch.testing.assert_close(ours, torch.cat(logits), rtol=0, atol=tolerance)


def test_rows_are_trained_on_and_evaluated(tmp_path):
    """A row a batch; of an evaluation Trainer gives the mean of the rows' mean losses."""
    model, collator = fv.patch_model(new_model("qwen3"), "sdpa"), fv.PackedCollator(**SIZES)
    sizes = {"per_device_train_batch_size": 1, "max_steps": 1}
    callback = IsolationCallback()
    trainer = Trainer(
        model,
        eval_dataset=rows(list),
        callbacks=[callback],
        **given(tmp_path, collator, rows(list), per_device_eval_batch_size=1, **sizes),
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert callback.reports[0].num_docs > 1
    assert trainer.evaluate()["eval_loss"] != before
    means = [by_document(new_model("qwen3"), row).loss for row in rows(list)]
    assert before == pytest.approx(torch.stack(means).mean().item(), rel=1e-4)
    of_eight = Trainer(model, eval_dataset=rows(list), **given(tmp_path, collator, **sizes))
    with pytest.raises(
        ValueError, match=r"at most total_tokens=64 .* per_device_eval_batch_size=1"
    ):
        of_eight.evaluate()


def test_rows_are_resumed_within_an_epoch(tmp_path):
    """Trainer passes over the rows that were trained on; all that follows has the same bits."""
    changes = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "optim": "adamw_torch"}
    changes["per_device_train_batch_size"] = 1
    runs = []
    for checkpoint in (None, tmp_path / "checkpoint-2"):
        model = fv.patch_model(new_model("qwen3"), "sdpa")
        made = given(tmp_path, fv.PackedCollator(**SIZES), rows(list), **changes)
        trainer, recorder = recorded(Trainer, model=model, **made)
        trainer.train(resume_from_checkpoint=checkpoint)
        runs.append(recorder.steps)
    whole, resumed = runs
    assert len({step.loss.item() for step in whole}) == 4
    for step, again in zip(whole[2:], resumed, strict=True):
        assert torch.equal(step.loss, again.loss)
        for name in ("weights", "gradients"):
            torch.testing.assert_close(getattr(step, name), getattr(again, name), rtol=0, atol=0)
    assert "flexvarlen" not in (tmp_path / "checkpoint-2" / "config.json").read_text()


def test_boundaries_that_accelerate_cuts_are_a_sentence(tmp_path):
    """Of an IterableDataset it gives each process as many entries of each tensor as rows."""
    model = fv.patch_model(new_model("qwen3"), "sdpa")
    stream = fv.StreamPacker(documents(), SIZES["total_tokens"], buffer=4)
    collator = fv.PackedCollator(**{**SIZES, "capacity": 12}, boundaries="cu_seq_lens")
    plain = {"per_device_train_batch_size": 1, "max_steps": 1}
    with pytest.raises(ValueError, match=r'accelerator_config=\{"dispatch_batches": False\}'):
        Trainer(model, **given(tmp_path, collator, stream, **plain)).train()
    told = {"accelerator_config": {"dispatch_batches": False}}
    Trainer(model, **given(tmp_path, collator, stream, **plain, **told)).train()


LABELED = [{"input_ids": x, "labels": i % 3} for i, x in enumerate(documents()[:11])]
ROWS = [LABELED[:1], LABELED[1:2], LABELED[2:4], LABELED[4:5], LABELED[5:]]


def of_documents(examples):
    """What a classifier gets; an example is a document, or a row of them."""
    found = [x for each in examples for x in (each if isinstance(each, list) else [each])]
    batch = fv.PackedCollator()([x["input_ids"] for x in found])
    return {**batch, "labels": torch.tensor([x["labels"] for x in found])}


def predictor(tmp_path, size):
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config_of("llama", num_labels=3))
    arguments = settings(tmp_path, per_device_eval_batch_size=size, remove_unused_columns=False)
    return Trainer(
        model=fv.patch_model(model, "sdpa"),
        args=TrainingArguments(**arguments),
        data_collator=of_documents,
    )


def test_packed_rows_as_examples_lose_no_prediction(tmp_path):
    """Trainer cuts the last batch to the examples that are left, but gets documents."""
    expected = None
    for size in (1, 4, 11):
        trainer = predictor(tmp_path, size)
        found = trainer.predict(LABELED)
        expected = found.predictions if expected is None else expected
        assert found.predictions == pytest.approx(expected, abs=1e-5)
        assert len(found.label_ids) == len(found.predictions) == 11
    assert len(predictor(tmp_path, 1).predict(ROWS).predictions) == 11  # of whole batches: not cut
    for size, batch in ((2, "6 documents in a batch of 1"), (3, "7 documents in a batch of 2")):
        trainer = predictor(tmp_path, size)
        for _ in range(2):
            with pytest.raises(ValueError, match=f"an example must be one document .* got {batch}"):
                trainer.predict(ROWS)
            assert trainer.predict(LABELED).predictions == pytest.approx(expected, abs=1e-5)
        trainer.args.prediction_loss_only = True
        assert trainer.evaluate(ROWS)["eval_loss"] > 0


def test_packed_rows_as_examples_on_two_ranks_do_not_wait_forever(tmp_path, monkeypatch):
    """A rank with more predictions than another would, in the gather."""
    trainer = predictor(tmp_path, 2)
    seen, step = [], trainer.prediction_step
    trainer.prediction_step = lambda *args, **kw: seen.append(step(*args, **kw)[1]) or (None,) * 3
    cls = type(trainer.accelerator)
    monkeypatch.setattr(cls, "num_processes", 2)
    trainer.evaluation_loop(trainer.get_eval_dataloader(LABELED[:8]), "test", False)
    assert [len(x) for x in seen] == [2, 2]  # of this rank
    with pytest.raises(ValueError, match="got 3 documents in a batch of 2 examples"):
        trainer.evaluation_loop(trainer.get_eval_dataloader(ROWS[1:5]), "test", False)


@pytest.mark.parametrize(
    ("kind", "collator"),
    [
        *((kind, fv.PackedCollator) for kind in ("bert", "qwen3_5_text", "qwen3")),
        ("qwen3", fv.TreeCollator),
    ],
)
def test_an_unpatched_model_that_would_mix_documents(kind, collator, tmp_path):
    """Without a check, it would train across documents; a dense causal one finds them itself."""
    model, made = new_model(kind), given(tmp_path, collator(), max_steps=1)
    made["eval_dataset"] = made["train_dataset"]
    finds = kind == "qwen3" and collator is fv.PackedCollator
    for run in (Trainer.train, Trainer.evaluate, Trainer.train):
        if finds:
            run(Trainer(model, **made))
        else:
            with pytest.raises(ValueError, match=r"must be patched .* flexvarlen.patch_model"):
                run(Trainer(model, **made))
    if collator is fv.PackedCollator:
        Trainer(fv.patch_model(model, "sdpa"), **made).train()


def test_an_unpatched_model_of_an_unknown_type(tmp_path):
    """It may be right, as dense causal ones are: a warning, once."""
    config = PhiConfig(
        vocab_size=97, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=512,
    )  # fmt: skip
    made = given(tmp_path, fv.PackedCollator(), max_steps=1)
    with pytest.warns(UserWarning, match="may see one another in an unpatched PhiForCausalLM"):
        Trainer(AutoModelForCausalLM.from_config(config), **made).train()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*may see one another")
        Trainer(AutoModelForCausalLM.from_config(config), **made).train()


def test_predictions_of_a_model_that_is_not_patched(tmp_path):
    """After a classifier was patched, Trainer's step is guarded for all models."""
    fv.patch_model(AutoModelForSequenceClassification.from_config(config_of("llama")), "sdpa")
    model = AutoModelForSequenceClassification.from_config(config_of("llama", num_labels=3))
    trainer = Trainer(model, TrainingArguments(**settings(tmp_path)))
    data = [{"input_ids": x, "labels": 1} for x in documents()[:1] * 3]
    assert trainer.predict(data).predictions.shape == (3, 3)
    assert not trainer.predict(data, ignore_keys=["logits"]).predictions


def test_accelerate_moves_a_layout_and_joins_none():
    """Nothing is lost in silence where it puts the batches of processes together."""
    batch = fv.PackedCollator(**SIZES)(rows()[:1])
    moved = send_to_device(batch, torch.device("meta"), non_blocking=True)["packed_layout"]
    assert moved.cu_seqlens.is_meta
    assert moved.lengths == batch["packed_layout"].lengths
    with pytest.raises(TypeError, match="Can only concatenate tensors"):
        concatenate([batch, batch])
