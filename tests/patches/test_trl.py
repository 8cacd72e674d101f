"""TRL's SFT on packed batches learns, step by step, what the documents one by one teach."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from accelerate.state import AcceleratorState
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import flexvarlen as fv
from flexvarlen.verify.isolation.callback import IsolationCallback
from tests.contract_oracle import Step, check_step
from tests.contract_training import documents, recorded, settings
from tests.patches.forward.test_unpad import seen_tokens
from tests.tiny_models import VOCABULARY, exact_and_baseline, new_model, one_row

trl = pytest.importorskip("trl", reason="needs TRL: pip install -c constraints.txt trl")
datasets = pytest.importorskip("datasets", reason="needs datasets, which TRL brings along")


@pytest.fixture(autouse=True)
def _apart(monkeypatch):
    """Datasets are kept in memory, and mixed precision, a state of the process, is forgotten."""
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    datasets.disable_caching()
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()
    datasets.enable_caching()
    AcceleratorState._reset_state(reset_partial_state=True)


def tokenizer():
    """A word for each id; documents come as ids."""
    words = {f"t{i}": i for i in range(VOCABULARY)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="t1")),
        unk_token="t1",
        eos_token="t2",
        pad_token="t0",
    )


# SFTConfig itself turns on bf16 and gradient checkpointing.
PLAIN = {"bf16": False, "gradient_checkpointing": False, "shuffle_dataset": False}
PADDING_FREE = {"padding_free": True, "max_length": None}
PACKING = {"packing": True, "max_length": 64}


def sft(model, tmp_path, *, dataset=None, peft_config=None, **changes):
    """The trainer, its recorder, and the features of each micro-batch."""
    columns = {"input_ids": documents()} if dataset is None else dataset
    trainer, recorder = recorded(
        trl.SFTTrainer,
        model=model,
        args=trl.SFTConfig(**settings(tmp_path, **{**PLAIN, **changes})),
        train_dataset=datasets.Dataset.from_dict(columns),
        processing_class=tokenizer(),
        peft_config=peft_config,
    )
    collate, seen = trainer.data_collator, []
    trainer.data_collator = lambda features: (seen.append(features), collate(features))[1]
    return trainer, recorder, seen


def parts(feature: dict[str, Any], name: str) -> list[list[int]]:
    """What a feature holds, by document."""
    lengths = feature.get("seq_lengths") or [len(feature["input_ids"])]
    return [x.tolist() for x in torch.tensor(feature[name]).split(lengths)]


def check(recorder, seen, plain, *, rows=1, **how):
    """Each step against its documents one by one; how many there were."""
    count = 0
    assert len(recorder.steps) == 2
    for i, step in enumerate(recorder.steps):
        features = [x for batch in seen[i * rows : (i + 1) * rows] for x in batch]
        ids = [part for x in features for part in parts(x, "input_ids")]
        labels = [part for x in features for part in parts(x, "labels")]
        check_step(step, plain, ids, labels=labels, **how)
        count += len(ids)
    return count


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
    changes = WAYS[way]
    model = fv.patch_model(new_model("qwen3"), "sdpa")
    trainer, recorder, seen = sft(model, tmp_path, **changes)
    trainer.train()
    count = check(
        recorder,
        seen,
        new_model("qwen3"),
        rows=changes.get("gradient_accumulation_steps", 1),
        autocast=changes.get("bf16", False),
        smoothing=changes.get("label_smoothing_factor", 0.0),
    )
    assert count > 8 or way not in ("packing", "packing_defaults", "packing_split")


def as_one_of_two(way: str, folder: str) -> list[tuple[Step, Any]]:
    """What each step saw, the loss as the ranks' mean."""
    datasets.disable_caching()
    AcceleratorState._reset_state(reset_partial_state=True)
    model = fv.patch_model(new_model("qwen3"), "sdpa")
    rows = 2 if "packing" in WAYS[way] else 4  # a step has all four packed rows, or 8 documents
    changes = {**WAYS[way], "per_device_train_batch_size": rows}
    trainer, recorder, seen = sft(model, folder, **changes)
    trainer.train()
    found = []
    for step, features in zip(recorder.steps, seen, strict=False):  # a loader looks ahead
        loss = step.loss.clone()
        torch.distributed.all_reduce(loss)
        named = [
            {name.removeprefix("module."): x for name, x in each.items()}
            for each in (step.weights, step.gradients)
        ]
        found.append((Step(named[0], loss / 2, named[1]), features))
    return found


@pytest.mark.parametrize("way", ["padding_free", "packing", "packing_defaults"])
def test_two_processes(ranks, way, tmp_path):
    """Whose gradients DDP averages: rows of other lengths, with other numbers of labels."""
    of_ranks = ranks.run(as_one_of_two, way, str(tmp_path))
    assert len(of_ranks[0]) == 2
    for (step, mine), (other, others) in zip(*of_ranks, strict=True):
        assert mine != others
        for name, gradient in step.gradients.items():
            assert torch.equal(gradient, other.gradients[name]), name
        ids = [part for x in mine + others for part in parts(x, "input_ids")]
        check_step(step, new_model("qwen3"), ids, autocast=WAYS[way].get("bf16", False))


def test_padded_rows_share_their_prefix(tmp_path):
    model = fv.patch_model(new_model("qwen3"), "sdpa", unpad=True, share_prefixes=True)
    prompt = list(range(3, 43))
    texts = {"input_ids": [prompt + answer for answer in documents()]}
    trainer, recorder, seen = sft(model, tmp_path, dataset=texts, max_length=None)
    rows = seen_tokens(model)
    trainer.train()
    assert check(recorder, seen, new_model("qwen3")) == 8
    for (_, tokens), features in zip(rows, seen, strict=False):  # a loader looks ahead
        different = {tuple(x["input_ids"]) for x in features}
        assert tokens <= sum(map(len, different)) - len(prompt) * (len(different) - 1)


def test_no_document_sees_another_in_training(tmp_path, caplog, recwarn):
    """Nor does TRL make logits, or ask for a kernel of FlashAttention by its name."""
    model = fv.patch_model(new_model("qwen3"), "sdpa")
    trainer, _, _ = sft(model, tmp_path, **PACKING)
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
    trainer, recorder, seen = sft(model, tmp_path, dataset=dataset, **changes)
    trainer.train()
    assert any(-100 in x["labels"] for x in seen[0])
    check(recorder, seen, new_model("qwen3"))


def test_patched_after_the_trainer_was_made(tmp_path):
    """TRL sets a forward on the instance, to which unpatching gives the model back."""
    model = new_model("qwen3")
    trainer, recorder, seen = sft(model, tmp_path, **PADDING_FREE)
    of_trl = model.forward
    fv.patch_model(model, "sdpa")
    batch = one_row()  # labels that TRL's collator did not mask
    with torch.no_grad():
        out = model(batch.ids, attention_mask=batch.document_ids, labels=batch.ids)
    exact, _ = exact_and_baseline("qwen3", batch.order)
    assert out.loss.item() == pytest.approx(exact.loss.item(), rel=1e-5)
    trainer.train()
    check(recorder, seen, new_model("qwen3"))
    fv.unpatch_model(model)
    assert model.forward == of_trl


def _lora(model):
    torch.manual_seed(3)
    return peft.get_peft_model(model, LORA)


LORA = peft.LoraConfig(
    r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("how", ["peft_config", "peft_model", "patched_later"])
@pytest.mark.sampled(2)
def test_lora(how, checkpointing, tmp_path):
    model = new_model("qwen3")
    if how != "patched_later":
        fv.patch_model(model, "sdpa")
    trainer, recorder, seen = sft(
        model if how == "peft_config" else _lora(model),
        tmp_path,
        peft_config=LORA if how == "peft_config" else None,
        gradient_checkpointing=checkpointing,
        **PADDING_FREE,
    )
    if how == "patched_later":
        fv.patch_model(trainer.model, "sdpa")
    trainer.train()
    check(recorder, seen, _lora(new_model("qwen3")))


def test_the_name_alone(tmp_path):
    """As `model_init_kwargs={"attn_implementation": "flexvarlen_doc"}` of SFTConfig."""
    new_model("qwen3").save_pretrained(tmp_path / "model")
    named = {"attn_implementation": "flexvarlen_doc", "dtype": torch.float32}
    trainer, recorder, seen = sft(
        str(tmp_path / "model"), tmp_path, model_init_kwargs=named, **PACKING
    )
    assert trainer.model.config._attn_implementation == "flexvarlen_doc"
    trainer.train()
    check(recorder, seen, new_model("qwen3"))


def test_evaluates_generates_and_saves(tmp_path):
    model = fv.patch_model(new_model("qwen3"), "sdpa")
    trainer, _, _ = sft(model, tmp_path, **PADDING_FREE)
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
    losses, labels = 0.0, 0
    for document in documents()[:5]:
        ids = torch.tensor(document)[None]
        if len(document) > 1:
            with torch.no_grad():
                losses += plain(ids, labels=ids).loss.item() * (len(document) - 1)
            labels += len(document) - 1
    assert loss == pytest.approx(losses / labels, rel=1e-4)
