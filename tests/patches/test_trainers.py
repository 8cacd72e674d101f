"""`patch_trainer`: losses and weights of TRL's trainers, and of Trainer, are the padded run's."""

from __future__ import annotations

import itertools
import tempfile
from functools import cache

import peft
import pytest
import torch
from accelerate.state import AcceleratorState
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    DataCollatorForSeq2Seq,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

import flexvarlen as fv
from flexvarlen.patches import trainers
from flexvarlen.patches.batch import padded_batch
from flexvarlen.patches.forward import padding
from tests.contract_training import settings
from tests.tiny_models import VOCABULARY, config_of

trl = pytest.importorskip("trl", reason="needs TRL: pip install -c constraints.txt trl")
datasets = pytest.importorskip("datasets", reason="needs datasets, which TRL brings along")

PLAIN = {"bf16": False, "gradient_checkpointing": False, "optim": "sgd", "learning_rate": 0.1}
LORA = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)


def tokenizer():
    words = {f"t{i}": i for i in range(VOCABULARY)}
    inner = Tokenizer(WordLevel(words, unk_token="t1"))
    inner.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="t1", eos_token="t2", pad_token="t0"
    )


def texts(count, longest, seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    draw = [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]
    return [" ".join(f"t{i}" for i in ids) for ids in draw]


PROMPTS, CHOSEN, REJECTED = texts(8, 20, 0), texts(8, 30, 1), texts(8, 30, 2)


def preferences():
    columns = {"prompt": PROMPTS, "chosen": CHOSEN, "rejected": REJECTED}
    return datasets.Dataset.from_dict(columns)


def unpaired():
    labels = [i % 2 == 0 for i in range(8)]
    prompts = [PROMPTS[i // 4] for i in range(8)]
    columns = {"prompt": prompts, "completion": CHOSEN, "label": labels}
    return datasets.Dataset.from_dict(columns)


def policy(seed=0, kind="qwen3"):
    """TRL asks a mixture of experts for its router's loss by itself."""
    torch.manual_seed(seed)
    config = config_of(kind, router_aux_loss_coef=0.5)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


@cache
def saved_policy(kind="qwen3"):
    """A folder: GRPOTrainer loads its reference model anew."""
    folder = tempfile.mkdtemp()
    policy(kind=kind).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def classifier(labels=1, kind="qwen3"):
    torch.manual_seed(1)
    config = config_of(kind, num_labels=labels, output_router_logits=kind == "mixtral")
    return AutoModelForSequenceClassification.from_config(config, attn_implementation="eager")


def dpo(folder, *, model=None, kind="qwen3", **changes):
    lora = changes.pop("peft_config", None)
    return trl.DPOTrainer(
        model=model or policy(kind=kind),
        ref_model=None if lora else policy(1, kind),  # its own, so that margins are not 0
        args=trl.DPOConfig(**settings(folder, **{**PLAIN, "max_length": None, **changes})),
        train_dataset=preferences(),
        eval_dataset=preferences(),
        processing_class=tokenizer(),
        peft_config=lora,
    )


def kto(folder, *, kind="qwen3", **changes):
    return trl.KTOTrainer(
        model=policy(kind=kind),
        ref_model=policy(1, kind),
        args=trl.KTOConfig(**settings(folder, **{**PLAIN, "max_length": None, **changes})),
        train_dataset=unpaired(),
        processing_class=tokenizer(),
    )


def reward(folder, *, kind="qwen3", **changes):
    return trl.RewardTrainer(
        model=classifier(kind=kind),
        args=trl.RewardConfig(**settings(folder, **{**PLAIN, "max_length": None, **changes})),
        train_dataset=preferences(),
        eval_dataset=preferences(),
        processing_class=tokenizer(),
    )


def grpo(folder, *, rewards=None, kind="qwen3", **changes):
    sizes = {"num_generations": 2, "max_completion_length": 12, "beta": 0.1, "temperature": 1.0}
    lengths = [lambda completions, **_: [float(len(x) % 7) for x in completions]]
    return trl.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(saved_policy(kind), attn_implementation="eager"),
        reward_funcs=rewards or lengths,
        args=trl.GRPOConfig(**settings(folder, **{**PLAIN, **sizes, **changes})),
        train_dataset=datasets.Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=tokenizer(),
        reward_processing_classes=[tokenizer() for _ in rewards] if rewards else None,
    )


def classification(folder, **changes):
    tokens, kinds = tokenizer(), [i % 3 for i in range(8)]
    ids = [tokens(text)["input_ids"] for text in CHOSEN]
    columns = {"input_ids": ids, "attention_mask": [[1] * len(x) for x in ids], "labels": kinds}
    dataset = datasets.Dataset.from_dict(columns)
    arguments = settings(folder, **{**PLAIN, **changes})
    return Trainer(
        model=classifier(labels=3),
        args=TrainingArguments(**arguments),
        train_dataset=dataset,
        eval_dataset=dataset,
        data_collator=DataCollatorWithPadding(tokens),
    )


def language_model(folder, **changes):
    """Batches of four with one beginning; Trainer counts their labels over two of them."""
    tokens = tokenizer()
    ids = [tokens(f"{PROMPTS[i // 4]} {CHOSEN[i]}")["input_ids"] for i in range(8)]
    changes = {**PLAIN, "gradient_accumulation_steps": 2, **changes}
    return Trainer(
        model=policy(),
        args=TrainingArguments(**settings(folder, **changes)),
        train_dataset=datasets.Dataset.from_dict({"input_ids": ids, "labels": ids}),
        data_collator=DataCollatorForSeq2Seq(tokens),
    )


def tokens_seen(model):
    """The number of rows of each forward of the embeddings."""
    rows = []
    embeddings = model.get_input_embeddings()
    embeddings.register_forward_hook(lambda _, __, out: rows.append(out.shape[0]))
    return rows


CASES = {
    "dpo_accumulation": (
        dpo,
        {"gradient_accumulation_steps": 2, "gradient_checkpointing": True, "ld_alpha": 0.5},
    ),
    "dpo_precomputed": (dpo, {"precompute_ref_log_probs": True}),
    "dpo_lora": (dpo, {"peft_config": LORA}),
    "kto": (kto, {}),
    "reward_checkpointing": (reward, {"gradient_checkpointing": True}),
    "grpo_iterations": (grpo, {"num_iterations": 2, "steps_per_generation": 2}),
    "classification": (classification, {}),
    "classification_compiled": (classification, {"torch_compile_backend": "aot_eager"}),
}


def run(make, folder, changes, *, patched, share_prefixes=False):
    """What a training logs, and the weights that it leaves."""
    torch.manual_seed(3)
    trainer = make(folder, **changes)
    rows = tokens_seen(trainer.model)
    others = [getattr(trainer, name, None) for name in ("ref_model", "teacher_model")]
    others = [tokens_seen(x) for x in others if x not in (None, trainer.model)]
    if patched:
        assert fv.patch_trainer(trainer, "sdpa", share_prefixes=share_prefixes) is trainer
    elif share_prefixes and trainers._completions_of_block(trainer) > 1:
        trainers._shuffle_blocks(trainer, 2)  # the padded run takes the same batches
    trainer.train()
    assert not patched or all(1 in seen for seen in others if seen)
    if trainer.eval_dataset is not None:
        trainer.evaluate()
    logs = [
        {k: v for k, v in log.items() if isinstance(v, float) and not k.endswith(_CLOCK)}
        for log in trainer.state.log_history
    ]
    weights = {name: p.detach() for name, p in trainer.model.named_parameters()}
    return logs, weights, rows


_CLOCK = ("runtime", "per_second", "time", "_flos", "epoch")


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.slow if "compiled" in case else ()) for case in CASES],
)
def test_a_run_learns_what_the_padded_one_learns(case, tmp_path):
    make, changes = CASES[case]
    check_run(make, changes, tmp_path, generates=make is grpo)


OF_TEXT = ("qwen3_windows", "phi3", "qwen3_5_text")


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        *itertools.product((reward, dpo, kto, grpo), (*OF_TEXT, "mixtral")),
        (reward, "modernbert"),
    ],
)
@pytest.mark.sampled(5)
def test_each_kind_of_model(make, kind, tmp_path):
    """No text reaches phi3's long frequencies, which a padded batch has for all rows or none."""
    changes = {"kind": kind, "learning_rate": 0.01}
    check_run(make, changes, tmp_path, generates=make is grpo)


def check_run(make, changes, tmp_path, *, generates=False, reads_padding=()):
    """A patched run against the padded one, but for the metrics that read padding."""
    logs, weights, _ = run(make, tmp_path / "padded", changes, patched=False)
    ours, found, rows = run(make, tmp_path / "packed", changes, patched=True)
    assert len(ours) == len(logs) > 1
    differ = set()
    for expected, log in zip(logs, ours, strict=True):
        assert log.keys() == expected.keys()
        close = {k: log[k] == pytest.approx(x, rel=1e-4, abs=1e-5) for k, x in expected.items()}
        differ |= {name for name, is_close in close.items() if not is_close}
    assert differ == set(reads_padding)
    for name, weight in weights.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-4, atol=1e-6, msg=name)
    assert rows.count(1) >= 2 if generates else set(rows) == {1}  # generation keeps its rows


IN_TWO_BATCHES = {"num_generations": 2, "steps_per_generation": 2}


@pytest.mark.filterwarnings("ignore:flexvarlen. recurrent layers run one document after another")
@pytest.mark.parametrize(
    ("make", "kind"),
    [*((make, "qwen3") for make in (dpo, kto, reward, grpo, language_model))]
    + [(make, "qwen3_5_text") for make in (dpo, kto, grpo)]
    + [(grpo, "mixtral")],
)
def test_shared_prompts(make, kind, tmp_path, monkeypatch):
    changes = IN_TWO_BATCHES if make is grpo else {}
    changes |= {} if make is language_model else {"kind": kind}
    check_shared(make, changes, tmp_path, monkeypatch)


def check_shared(make, changes, tmp_path, monkeypatch, *, reads_padding=()):
    """A run whose batches share prompts against the padded one, and that each of them does."""
    monkeypatch.setattr(padded_batch, "MIN_SHARED_TOKENS", 1)  # the tests' prompts are short
    shared = []
    share = padded_batch.share_prefixes_of_rows

    def noting(padded, *args, **kwargs):
        found = share(padded, *args, **kwargs)
        shared.append(sum(padded.layout.lengths) - sum(found.layout.lengths))
        return found

    monkeypatch.setattr(padding, "share_prefixes_of_rows", noting)
    logs, weights, _ = run(make, tmp_path / "p", changes, patched=False, share_prefixes=True)
    ours, found, _ = run(make, tmp_path / "t", changes, patched=True, share_prefixes=True)
    for expected, log in zip(logs, ours, strict=True):
        kept = log.keys() - set(reads_padding)
        assert {k: log[k] for k in kept} == pytest.approx(
            {k: expected[k] for k in kept}, rel=1e-4, abs=1e-5
        )
    for name, weight in weights.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-4, atol=1e-6, msg=name)
    assert min(shared) > 0, "a batch holds no two answers to one prompt"


def test_groups_stay_together():
    batch = {"a": torch.arange(8), "b": [f"t{i}" for i in range(8)], "c": None, "d": torch.ones(())}
    orders = {tuple(trainers._shuffled(batch, 2)["a"][::2].tolist()) for _ in range(20)}
    assert len(orders) > 1
    found = trainers._shuffled(batch, 2)
    groups = found["a"].view(4, 2)
    assert (groups[:, 1] == groups[:, 0] + 1).all()
    assert sorted(groups[:, 0].tolist()) == [0, 2, 4, 6]
    assert found["b"] == [f"t{i}" for i in found["a"]]
    assert found["c"] is None
    assert found["d"] == 1


def test_a_batch_of_one_completion_of_each_prompt(tmp_path):
    trainer = grpo(tmp_path, num_generations=3, generation_batch_size=12)
    with pytest.raises(ValueError, match=r"divisor in common with num_generations.* got 4 and 3"):
        fv.patch_trainer(trainer, "sdpa", share_prefixes=True)
    assert not fv.is_patched(trainer.model)


@pytest.mark.parametrize("make", [dpo, reward, grpo, classification])
def test_in_bf16_as_trl_runs_by_default(make, tmp_path, monkeypatch):
    """accelerate then wraps the forward of a model, ours inside."""
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    changes = {"bf16": True, "gradient_checkpointing": True}
    logs, _, _ = run(make, tmp_path / "padded", changes, patched=False)
    ours, _, rows = run(make, tmp_path / "packed", changes, patched=True)
    AcceleratorState._reset_state(reset_partial_state=True)
    assert 1 in rows
    if make is not grpo:  # it may sample other tokens
        assert ours[0]["loss"] == pytest.approx(logs[0]["loss"], rel=5e-2)


def test_a_reward_model_of_grpo(tmp_path):
    logs = []
    for patched in (False, True):
        scorer = classifier()
        rows = tokens_seen(scorer)
        torch.manual_seed(3)
        trainer = grpo(tmp_path / str(patched), rewards=[scorer])
        if patched:
            fv.patch_trainer(trainer, "sdpa")
        trainer.train()
        logs.append(trainer.state.log_history[0]["reward"])
        assert {1} == set(rows) if patched else min(rows) > 1
    assert logs[1] == pytest.approx(logs[0], rel=1e-4)


def test_a_reference_model_that_has_the_name_alone(tmp_path):
    """TRL loads it with the policy's attn_implementation; a hybrid needs the patch itself."""
    logs = []
    for patched in (False, True):
        model = AutoModelForCausalLM.from_pretrained(
            saved_policy("lfm2"), attn_implementation="eager"
        )
        if patched:
            fv.patch_model(model, "sdpa", unpad=True)
        trainer = trl.DPOTrainer(
            model=model,
            args=trl.DPOConfig(**settings(tmp_path, **PLAIN, max_length=None, max_steps=1)),
            train_dataset=preferences(),
            processing_class=tokenizer(),
        )
        if patched:
            with pytest.raises(NotImplementedError, match=r"of flexvarlen.*patch_trainer"):
                trainer.train()
            fv.patch_trainer(trainer, "sdpa")
        trainer.train()
        logs.append([log["loss"] for log in trainer.state.log_history if "loss" in log])
    assert logs[1] == pytest.approx(logs[0], rel=1e-4)


def test_a_reward_model_that_cannot_be_patched(tmp_path):
    """Nothing stays half patched, and what was patched before stays so."""
    scorer = classifier()
    scorer.config.model_type = "mamba"
    trainer = grpo(tmp_path, rewards=[scorer])
    with pytest.raises(NotImplementedError, match="mamba"):
        fv.patch_trainer(trainer)
    assert not fv.is_patched(trainer.model)
    fv.patch_model(trainer.model, "reference")
    with pytest.raises(NotImplementedError, match="mamba"):
        fv.patch_trainer(trainer)
    assert fv.is_patched(trainer.model)
    assert trainer.model.config._attn_implementation == "flexvarlen_reference"


def test_a_model_that_is_made_when_training_starts(tmp_path):
    arguments = TrainingArguments(**settings(tmp_path, **PLAIN))
    trainer = Trainer(model_init=lambda: policy(), args=arguments)
    with pytest.raises(ValueError, match="got model_init="):
        fv.patch_trainer(trainer)


def test_no_trainer():
    with pytest.raises(ValueError, match="trainer must be a transformers Trainer"):
        fv.patch_trainer(policy())
