"""Trainer with flattened batches learns, step by step, what the documents one by one teach."""

from __future__ import annotations

import warnings
from typing import Any

import peft
import pytest
import torch
from accelerate.state import AcceleratorState
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
from tests.contract_oracle import check_step
from tests.contract_training import documents, recorded, settings
from tests.tiny_models import config_of, new_model


@pytest.fixture(autouse=True)
def _accelerate_as_it_was(monkeypatch):
    """Mixed precision and compilation are states of the process."""
    for name in ("ACCELERATE_MIXED_PRECISION", "ACCELERATE_DYNAMO_BACKEND"):
        monkeypatch.delenv(name, raising=False)
    torch._dynamo.reset()
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    torch._dynamo.reset()


class Collator(DataCollatorWithFlattening):
    """Keeps the documents of each micro-batch; `drop`s what it should not hand over."""

    def __init__(self, drop: tuple[str, ...] = (), **options: Any) -> None:
        super().__init__(**options)
        self.drop = drop
        self.seen: list[list[dict[str, list[int]]]] = []

    def __call__(self, features: list[dict[str, list[int]]], **kwargs: Any) -> dict[str, Any]:
        self.seen.append(features)
        batch = super().__call__(features, **kwargs)
        return {name: x for name, x in batch.items() if name not in self.drop}


def train(model, tmp_path, *, collator=None, dataset=None, **changes):
    """The recorder of all steps, the documents of each, and the trainer."""
    collator = Collator() if collator is None else collator
    trainer, recorder = recorded(
        Trainer,
        model=model,
        args=TrainingArguments(**settings(tmp_path, **changes)),
        train_dataset=[{"input_ids": x} for x in documents()] if dataset is None else dataset,
        data_collator=collator,
    )
    trainer.train()
    rows = changes.get("gradient_accumulation_steps", 1)
    by_step = [
        [feature for features in collator.seen[i * rows : (i + 1) * rows] for feature in features]
        for i in range(len(recorder.steps))
    ]
    assert len(by_step) == 2
    return recorder, by_step, trainer


def check(model, tmp_path, *, plain=None, how=None, **given):
    """Two steps of a patched model, each held against its documents one by one."""
    plain = new_model("qwen3") if plain is None else plain
    recorder, by_step, trainer = train(model, tmp_path, **given)
    for step, features in zip(recorder.steps, by_step, strict=True):
        own = {"labels": [x["labels"] for x in features]} if "labels" in features[0] else {}
        check_step(step, plain, [x["input_ids"] for x in features], **own, **(how or {}))
    return trainer


OPTIONS: dict[str, dict[str, Any]] = {
    "position_ids": {},
    "flash_attn_kwargs": {"return_flash_attn_kwargs": True},
    "flash_attn_kwargs_alone": {"return_flash_attn_kwargs": True, "return_position_ids": False},
    "seq_idx": {"return_seq_idx": True},
    "seq_idx_alone": {"return_seq_idx": True, "return_position_ids": False},
    "all": {"return_flash_attn_kwargs": True, "return_seq_idx": True},
    "position_ids_start": {"position_ids_start": 2},
    "no_max_length": {
        "return_flash_attn_kwargs": True,
        "drop": ("max_length_q", "max_length_k", "position_ids"),
    },
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("kind", ["qwen3", "qwen2_windows"])
@pytest.mark.sampled(4)
def test_each_option_of_the_collator(kind, option, tmp_path):
    model = fv.patch_model(new_model(kind), "sdpa")
    how = {"first": OPTIONS[option].get("position_ids_start", 0)}
    collator = Collator(**OPTIONS[option])
    check(model, tmp_path, plain=new_model(kind), collator=collator, how=how)


@pytest.mark.parametrize("way", ["flash_attn_kwargs_alone", "cache_asked_for"])
def test_a_model_that_is_not_patched_fails_the_oracle(way, tmp_path):
    """transformers sees documents in position_ids alone, and only without a cache."""
    with pytest.raises(AssertionError, match="exceeds"):
        check(
            new_model("qwen3"),
            tmp_path,
            collator=Collator(**OPTIONS.get(way, {})),
            **WAYS.get(way, {}),
        )


def test_a_separator_that_is_a_token_is_not_learned(tmp_path):
    """It would have the last token of a document foresee it. Trainer counts it as a label."""
    model = fv.patch_model(new_model("qwen3"), "sdpa")
    recorder, by_step, _ = train(model, tmp_path, collator=Collator(separator_id=5))
    for step, features in zip(recorder.steps, by_step, strict=True):
        ids = [x["input_ids"] for x in features]
        check_step(step, new_model("qwen3"), ids, num_labels=sum(map(len, ids)) - 1)


def test_labels_of_the_dataset(tmp_path):
    """Prompts are not learned; one document has nothing else."""
    model = fv.patch_model(new_model("qwen3"), "sdpa")
    dataset = [
        {"input_ids": x, "labels": [-100] * (len(x) // 3) + x[len(x) // 3 :]} for x in documents()
    ]
    dataset[1]["labels"] = [-100] * len(dataset[1]["input_ids"])
    check(model, tmp_path, dataset=dataset)


WAYS: dict[str, dict[str, Any]] = {
    "bf16": {"bf16": True},
    "accumulation": {"gradient_accumulation_steps": 2},
    "accumulation_bf16": {"gradient_accumulation_steps": 2, "bf16": True},
    "checkpointing": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
    },
    "checkpointing_reentrant": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
    "checkpointing_bf16_accumulation": {
        "gradient_checkpointing": True,
        "bf16": True,
        "gradient_accumulation_steps": 2,
    },
    "label_smoothing": {"label_smoothing_factor": 0.1},
    "label_smoothing_accumulation_bf16": {
        "label_smoothing_factor": 0.1,
        "gradient_accumulation_steps": 2,
        "bf16": True,
    },
    "torch_compile": {"torch_compile": True, "torch_compile_backend": "eager"},
    "cache_asked_for": {"use_cache": True},
    "one_document_a_batch": {"per_device_train_batch_size": 1},
    "not_scaled_across_devices": {"average_tokens_across_devices": False},
}


@pytest.mark.parametrize(
    ("way", "flash_kwargs"),
    [
        *((way, False) for way in WAYS),
        ("accumulation_bf16", True),
        ("checkpointing", True),
        ("label_smoothing", True),
        ("cache_asked_for", True),
    ],
)
@pytest.mark.sampled(4)
def test_each_way_of_training(way, flash_kwargs, tmp_path):
    changes = WAYS[way]
    how = {
        "autocast": changes.get("bf16", False),
        "smoothing": changes.get("label_smoothing_factor", 0.0),
    }
    collator = Collator(return_flash_attn_kwargs=flash_kwargs)
    model = fv.patch_model(new_model("qwen3"), "sdpa")
    check(model, tmp_path, collator=collator, how=how, **changes)


def _lora(model):
    torch.manual_seed(3)
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(model, config)


@pytest.mark.parametrize("bf16", [False, True])
def test_evaluation_and_prediction(bf16, tmp_path):
    """In eval mode, where a model makes a cache: it is not among what was predicted."""
    model, plain = fv.patch_model(new_model("qwen3"), "sdpa"), new_model("qwen3")
    dataset = [{"input_ids": x} for x in documents()[:4]]
    trainer = Trainer(
        model=model,
        args=TrainingArguments(**settings(tmp_path, per_device_eval_batch_size=4, bf16=bf16)),
        eval_dataset=dataset,
        data_collator=DataCollatorWithFlattening(),
    )
    loss = trainer.evaluate()["eval_loss"]
    predicted = trainer.predict(dataset)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        logits = [plain(torch.tensor([x])).logits[0].float() for x in documents()[:4]]
    ours = torch.as_tensor(predicted.predictions)[0].float()
    tolerance = 0.2 if bf16 else 1e-3  # logits reach 15, and a leak moves them by more than 1
    torch.testing.assert_close(ours, torch.cat(logits), rtol=0, atol=tolerance)
    losses = [
        torch.nn.functional.cross_entropy(x[:-1], torch.tensor(ids)[1:], reduction="sum")
        for x, ids in zip(logits, documents(), strict=False)
    ]
    expected = sum(losses).item() / sum(len(x) - 1 for x in documents()[:4])
    assert loss == pytest.approx(expected, rel=2e-2 if bf16 else 1e-4)


def test_a_checkpoint_is_resumed(tmp_path):
    """Two steps in one run and two in another are four in one."""
    runs = {}
    for name, stops in {"whole": [4], "resumed": [2, 4]}.items():
        for stop in stops:
            model = fv.patch_model(new_model("qwen3"), "sdpa")
            arguments = settings(tmp_path / name, max_steps=stop, save_strategy="steps")
            trainer = Trainer(
                model=model,
                args=TrainingArguments(**{**arguments, "save_steps": 2}),
                train_dataset=[{"input_ids": x} for x in documents()],
                data_collator=DataCollatorWithFlattening(),
            )
            trainer.train(resume_from_checkpoint=stop == 4 and len(stops) == 2)
        runs[name] = model
        config = (tmp_path / name / "checkpoint-2" / "config.json").read_text()
        assert "flexvarlen" not in config
    for ours, theirs in zip(*(run.parameters() for run in runs.values()), strict=True):
        assert torch.equal(ours, theirs)


# ---- rows of fixed shapes ----

SIZES = {"total_tokens": 64, "capacity": 8, "max_seqlen_bound": 64}


def learned(document):
    """A document with labels; the first third is not learned."""
    third = len(document) // 3
    return {"input_ids": document, "labels": [-100] * third + document[third:]}


def rows(of=learned):
    """Lists of documents, each of at most 64 tokens in all."""
    packed = fv.pack([len(x) for x in documents()], SIZES["total_tokens"], strategy="in_order")
    return [[of(documents()[i]) for i in row] for row in packed]


class SeeingTrainer(Trainer):
    """Keeps each batch as the model gets it, what its loss is divided by, and the loss."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        batch = dict(inputs)
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.seen = [*getattr(self, "seen", ()), (batch, num_items_in_batch, loss.item())]
        return loss


ROW_WAYS: dict[str, dict[str, Any]] = {
    "accumulation": {"gradient_accumulation_steps": 2, "max_steps": 2},
    "all_at_once": {"gradient_accumulation_steps": 2, "bf16": True, "gradient_checkpointing": True},
    "workers": {"dataloader_num_workers": 1, "dataloader_pin_memory": True},
    "torch_compile": {"torch_compile": True, "torch_compile_backend": "aot_eager"},
    "lora": {},
}


@pytest.mark.filterwarnings("ignore:.*pin_memory:UserWarning")
@pytest.mark.parametrize("way", ROW_WAYS)
@pytest.mark.sampled(2)
def test_rows_of_fixed_shapes(way, tmp_path):
    """The loss is the mean over the labels of all rows of a step, as Trainer counts them."""
    changes = ROW_WAYS[way]
    layers = {"num_hidden_layers": 1} if way == "torch_compile" else {}  # half the time
    plain = new_model("qwen3", **layers)
    model = fv.patch_model(new_model("qwen3", **layers), "sdpa")
    if way == "lora":
        model, plain = _lora(model), _lora(plain)
    trainer, recorder = recorded(
        SeeingTrainer,
        model=model,
        args=TrainingArguments(**settings(tmp_path, per_device_train_batch_size=1, **changes)),
        train_dataset=rows(),
        data_collator=fv.PackedCollator(**SIZES),
    )
    with torch._dynamo.config.patch(error_on_recompile=True):
        trainer.train()
    in_step = changes.get("gradient_accumulation_steps", 1)
    assert len(trainer.seen) == 2 * in_step
    for i, step in enumerate(recorder.steps):
        ids, of_step = [], trainer.seen[i * in_step : (i + 1) * in_step]
        for batch, _, _ in of_step:
            lengths = batch["packed_layout"].lengths
            assert batch["input_ids"].shape == (1, SIZES["total_tokens"])
            ids += [x.tolist() for x in batch["input_ids"][0, : sum(lengths)].split(lengths)]
        labels = [learned(x)["labels"] for x in ids]
        real = sum(label != -100 for each in labels for label in each[1:])
        assert {int(count) for _, count, _ in of_step} == {real}
        check_step(step, plain, ids, labels=labels, autocast=changes.get("bf16", False))


def test_rows_are_trained_on_and_evaluated(tmp_path):
    """A row a batch; of an evaluation Trainer gives the mean of the rows' mean losses."""
    plain = new_model("qwen3")
    given = {
        "model": fv.patch_model(new_model("qwen3"), "sdpa"),
        "train_dataset": rows(list),
        "eval_dataset": rows(list),
        "data_collator": fv.PackedCollator(**SIZES),
    }
    arguments = settings(tmp_path, per_device_train_batch_size=1, max_steps=1)
    callback = IsolationCallback()
    trainer = Trainer(
        args=TrainingArguments(**arguments, per_device_eval_batch_size=1),
        callbacks=[callback],
        **given,
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert callback.reports[0].num_docs > 1
    assert trainer.evaluate()["eval_loss"] != before
    means = []
    for row in rows(list):
        losses = []
        for document in (torch.tensor(x) for x in row if len(x) > 1):
            with torch.no_grad():
                logits = plain(document[None]).logits[0, :-1]
            losses.append(torch.nn.functional.cross_entropy(logits, document[1:], reduction="none"))
        means.append(torch.cat(losses).mean())
    assert before == pytest.approx(torch.stack(means).mean().item(), rel=1e-4)
    with pytest.raises(
        ValueError, match=r"at most total_tokens=64 .* per_device_eval_batch_size=1"
    ):
        Trainer(args=TrainingArguments(**arguments), **given).evaluate()  # 8 rows a batch


def stream():
    """Rows that are packed as the documents come, the same each time."""
    return fv.StreamPacker(documents(), SIZES["total_tokens"], buffer=4)


@pytest.mark.parametrize("dataset", [rows(list), stream()], ids=["rows", "stream"])
def test_rows_are_resumed_within_an_epoch(dataset, tmp_path):
    """Trainer passes over the rows that were trained on; losses and weights are the same bits."""
    runs = []
    for checkpoint in (None, tmp_path / "checkpoint-2"):
        changes = {
            "max_steps": 4,
            "save_strategy": "steps",
            "save_steps": 2,
            "optim": "adamw_torch",
        }
        trainer = SeeingTrainer(
            model=fv.patch_model(new_model("qwen3"), "sdpa"),
            args=TrainingArguments(**settings(tmp_path, per_device_train_batch_size=1, **changes)),
            train_dataset=dataset,
            data_collator=fv.PackedCollator(**SIZES),
        )
        trainer.train(resume_from_checkpoint=checkpoint)
        tokens = [batch["input_ids"].tolist() for batch, _, _ in trainer.seen]
        losses = [loss for _, _, loss in trainer.seen]
        runs.append((tokens, losses, list(trainer.model.parameters())))
    (tokens, losses, weights), (tokens_after, losses_after, weights_after) = runs
    assert len(set(losses)) == 4
    assert (tokens_after, losses_after) == (tokens[2:], losses[2:])
    for ours, theirs in zip(weights, weights_after, strict=True):
        assert torch.equal(ours, theirs)


def test_boundaries_that_accelerate_cuts_are_a_sentence(tmp_path):
    """Of an IterableDataset it gives each process as many entries of each tensor as rows."""
    given = {
        "model": fv.patch_model(new_model("qwen3"), "sdpa"),
        "train_dataset": stream(),
        "data_collator": fv.PackedCollator(**{**SIZES, "capacity": 12}, boundaries="cu_seq_lens"),
    }
    plain = settings(tmp_path, per_device_train_batch_size=1, max_steps=1)
    with pytest.raises(ValueError, match=r'accelerator_config=\{"dispatch_batches": False\}'):
        Trainer(args=TrainingArguments(**plain), **given).train()
    told = {"accelerator_config": {"dispatch_batches": False}}
    Trainer(args=TrainingArguments(**plain, **told), **given).train()


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
    given = {
        "args": TrainingArguments(**settings(tmp_path, max_steps=1)),
        "train_dataset": [{"input_ids": x} for x in documents()],
        "data_collator": collator(),
    }
    model = new_model(kind)
    given["eval_dataset"] = given["train_dataset"]
    finds = kind == "qwen3" and collator is fv.PackedCollator
    for run in (Trainer.train, Trainer.evaluate, Trainer.train):
        if finds:
            run(Trainer(model, **given))
        else:
            with pytest.raises(ValueError, match=r"must be patched .* flexvarlen.patch_model"):
                run(Trainer(model, **given))
    if collator is fv.PackedCollator:
        Trainer(fv.patch_model(model, "sdpa"), **given).train()


def test_an_unpatched_model_of_an_unknown_type(tmp_path):
    """It may be right, as dense causal ones are: a warning, once."""
    config = PhiConfig(
        vocab_size=97, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=512,
    )  # fmt: skip
    given = {
        "args": TrainingArguments(**settings(tmp_path, max_steps=1)),
        "train_dataset": [{"input_ids": x} for x in documents()],
        "data_collator": fv.PackedCollator(),
    }
    with pytest.warns(UserWarning, match="may see one another in an unpatched PhiForCausalLM"):
        Trainer(AutoModelForCausalLM.from_config(config), **given).train()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*may see one another")
        Trainer(AutoModelForCausalLM.from_config(config), **given).train()


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
