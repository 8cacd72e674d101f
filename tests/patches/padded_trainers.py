"""Trainers of padded batches, of transformers and of TRL, and their runs with `patch_trainer` and
without: both must log the same values and have the same gradients in each step.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import peft
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    DataCollatorForSeq2Seq,
    DataCollatorWithPadding,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import flexvarlen as fv
from flexvarlen.patches import trainers
from flexvarlen.patches.batch import shared_rows
from flexvarlen.patches.forward import padding
from tests.contract_oracle import gradients_of
from tests.contract_training import settings
from tests.tiny_models import VOCABULARY, config_of, tokenizer

trl = pytest.importorskip("trl", reason="needs TRL: pip install -c constraints.txt trl")
datasets = pytest.importorskip("datasets", reason="needs datasets, which TRL brings along")

PLAIN = {"bf16": False, "gradient_checkpointing": False, "optim": "sgd", "learning_rate": 0.1}
LORA = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)

# ---- texts ----


def texts(count, longest, seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    draw = [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]
    return [" ".join(f"t{i}" for i in ids) for ids in draw]


PROMPTS, CHOSEN, REJECTED = texts(8, 20, 0), texts(8, 30, 1), texts(8, 30, 2)


def preferences():
    return {"prompt": PROMPTS, "chosen": CHOSEN, "rejected": REJECTED}


def with_references():
    return {**preferences(), "reference": texts(8, 25, 5)}


def unpaired():
    prompts = [PROMPTS[i // 4] for i in range(8)]
    return {"prompt": prompts, "completion": CHOSEN, "label": [i % 2 == 0 for i in range(8)]}


def prompts():
    return {"prompt": PROMPTS, "privileged_context": CHOSEN}


def chats():
    turns = zip(PROMPTS, CHOSEN, strict=True)
    roles = ("user", "assistant")
    messages = [[{"role": r, "content": x} for r, x in zip(roles, y, strict=True)] for y in turns]
    return {"messages": messages}


def token_ids():
    """Of prompts and answers, as GOLD needs a byte-level tokenizer for texts."""
    prompt, answer = (tokenizer()(each)["input_ids"] for each in (PROMPTS, CHOSEN))
    both = list(zip(prompt, answer, strict=True))
    masks = [[0] * len(a) + [1] * len(b) for a, b in both]
    return {"prompt": PROMPTS, "input_ids": [a + b for a, b in both], "completion_mask": masks}


def three_classes():
    encoded = tokenizer()(CHOSEN)
    labels = [i % 3 for i in range(8)]
    return {**{name: encoded[name] for name in ("input_ids", "attention_mask")}, "labels": labels}


def two_beginnings():
    """Batches of four have one beginning."""
    ids = tokenizer()([f"{PROMPTS[i // 4]} {CHOSEN[i]}" for i in range(8)])["input_ids"]
    return {"input_ids": ids, "labels": ids}


# ---- models ----


def policy(seed=0, kind="qwen3"):
    """TRL asks a mixture of experts for its router's loss by itself."""
    torch.manual_seed(seed)
    config = config_of(kind, router_aux_loss_coef=0.5)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


@cache
def saved_policy(kind="qwen3"):
    """A folder."""
    folder = tempfile.mkdtemp()
    policy(kind=kind).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


@cache
def _original(seed, kind):
    model = policy(seed, kind)
    model.config._name_or_path = model.name_or_path = saved_policy(kind)
    return model


def saved(seed=0, kind="qwen3"):
    """A policy that knows its folder, from which some trainers load a second one."""
    return copy.deepcopy(_original(seed, kind))


def classifier(kind="qwen3", labels=1):
    torch.manual_seed(1)
    config = config_of(kind, num_labels=labels, output_router_logits=kind == "mixtral")
    return AutoModelForSequenceClassification.from_config(config, attn_implementation="eager")


def of_length(completions, **_):
    return [float(len(x) % 7) for x in completions]


def of_odd_length(completions, **_):
    return [float(len(x) % 2) for x in completions]


# ---- trainers ----


@dataclass(frozen=True)
class Case:
    """A trainer, and what it is made with.

    Attributes:
        trainer: of TRL, as "DPO", or of its experimental ones, as "gkd.GKD"; "" is transformers'.
        second: the argument that takes a second model, whose weights are others: else margins
            are 0.
        generates: such batches keep their rows.
        reads_padding: metrics that change with the padding.
    """

    trainer: str
    dataset: Callable[[], dict[str, Any]]
    settings: dict[str, Any] = field(default_factory=dict)
    second: str = ""
    model: Callable[..., Any] = saved
    rewards: Callable[..., Any] | None = None
    collator: Callable[..., Any] | None = None
    evaluates: bool = False
    generates: bool = False
    reads_padding: tuple[str, ...] = ()

    def varied(self, **changes: Any) -> Case:
        return replace(self, settings={**self.settings, **changes})

    def make(self, folder, *, kind="qwen3", rewards=None, **changes):
        """The trainer."""
        given = {**PLAIN, **self.settings, **changes}
        arguments = {"peft_config": given.pop("peft_config")} if "peft_config" in given else {}
        if self.second and not (self.second == "ref_model" and arguments):
            arguments[self.second] = self.model(1, kind=kind)
        if rewards:
            tokens = [tokenizer() for _ in rewards]
            arguments |= {"reward_funcs": rewards, "reward_processing_classes": tokens}
        elif self.rewards:
            arguments["reward_funcs"] = [self.rewards]
        dataset = datasets.Dataset.from_dict(self.dataset())
        if self.evaluates:
            arguments["eval_dataset"] = dataset
        made, config = Trainer, TrainingArguments
        if self.trainer:
            module, _, name = self.trainer.rpartition(".")
            found = pytest.importorskip(f"trl.experimental.{module}") if module else trl
            made, config = getattr(found, f"{name}Trainer"), getattr(found, f"{name}Config")
            arguments["processing_class"] = tokenizer("left")  # A2PO pads its samples by this
        else:
            arguments["data_collator"] = self.collator(tokenizer())
        return made(
            model=self.model(kind=kind),
            args=config(**settings(folder, **given)),
            train_dataset=dataset,
            **arguments,
        )


SHORT = {"max_completion_length": 12}
GROUPS = {**SHORT, "num_generations": 2}
WHOLE = {"max_length": None}
OF_LOGITS = ("logits/chosen", "logits/rejected")
OF_COMPLETIONS = tuple(
    f"objective/{name}" for name in ("kl", "entropy", "non_score_reward", "rlhf_reward")
)
TEACHER = "teacher_model"
DPO = Case("DPO", preferences, WHOLE, "ref_model", evaluates=True)
REWARD = Case("Reward", preferences, WHOLE, model=classifier, evaluates=True)
GRPO = Case(
    "GRPO",
    prompts,
    {**GROUPS, "beta": 0.1, "temperature": 1.0},
    rewards=of_length,
    generates=True,
)
DISTILLATION = Case("Distillation", prompts, SHORT, TEACHER, generates=True)
GKD = Case("gkd.GKD", chats, {"lmbda": 0.0}, TEACHER)
SDFT = Case("sdft.SDFT", prompts, {**GROUPS, "distillation_topk": 5}, generates=True)
CLASSIFICATION = Case(
    "",
    three_classes,
    model=partial(classifier, labels=3),
    collator=DataCollatorWithPadding,
    evaluates=True,
)
BASES = {
    "dpo": DPO,
    "reward": REWARD,
    "grpo": GRPO,
    "sft": Case("SFT", two_beginnings, WHOLE),
    # Trainer counts the labels of two batches.
    "language_model": Case(
        "", two_beginnings, {"gradient_accumulation_steps": 2}, collator=DataCollatorForSeq2Seq
    ),
}
CASES = {
    "dpo_accumulation": DPO.varied(
        gradient_accumulation_steps=2, gradient_checkpointing=True, ld_alpha=0.5
    ),
    "dpo_precomputed": DPO.varied(precompute_ref_log_probs=True),
    "dpo_lora": DPO.varied(peft_config=LORA),
    "kto": Case("KTO", unpaired, WHOLE, "ref_model"),
    "reward_checkpointing": REWARD.varied(gradient_checkpointing=True),
    "grpo_iterations": GRPO.varied(num_iterations=2, steps_per_generation=2),
    "classification": CLASSIFICATION,
    "classification_compiled": CLASSIFICATION.varied(torch_compile_backend="aot_eager"),
    "rloo": Case("RLOO", prompts, {**GROUPS, "beta": 0.1}, rewards=of_odd_length, generates=True),
    "distillation": DISTILLATION.varied(beta=0.5),
    "distillation_lora": DISTILLATION.varied(peft_config=LORA),
    "gkd": GKD,
    "gkd_on_policy": replace(
        GKD.varied(lmbda=1.0, max_new_tokens=12, gradient_checkpointing=True), generates=True
    ),
    "cpo": Case("cpo.CPO", preferences, {"max_length": 64}, reads_padding=OF_LOGITS),
    "orpo": Case("orpo.ORPO", preferences, {"max_length": 64}, reads_padding=OF_LOGITS),
    "online_dpo": Case(
        "online_dpo.OnlineDPO",
        prompts,
        {"max_new_tokens": 40},  # so that some answers end before others
        "ref_model",
        rewards=of_odd_length,
        generates=True,
        reads_padding=OF_COMPLETIONS,
    ),
    "tpo": Case("tpo.TPO", with_references),
    "a2po": Case(
        "a2po.A2PO",
        prompts,
        {**SHORT, "num_value_samples": 2, "filter_all_incorrect": False},
        rewards=of_odd_length,
        generates=True,
    ),
    "gmpo": Case(
        "gmpo.GMPO", prompts, {**GROUPS, "beta": 0.1}, rewards=of_odd_length, generates=True
    ),
    "gold": Case("gold.GOLD", token_ids, {"lmbda": 0.0}, TEACHER),
    "iw_opd": Case("iw_opd.IWOPD", chats, SHORT, TEACHER, generates=True),
    "sdft": SDFT,
    "sdft_adapters": SDFT.varied(teacher_model_kind="ema", peft_config=LORA),
    "sdpo": Case("sdpo.SDPO", prompts, GROUPS, rewards=of_odd_length, generates=True),
}

# ---- runs ----

_CLOCK = ("runtime", "per_second", "time", "_flos", "epoch")


def rows_seen(model):
    """The number of rows of each forward of the embeddings."""
    rows = []
    embeddings = model.get_input_embeddings()
    embeddings.register_forward_hook(lambda _, __, out: rows.append(out.shape[0]))
    return rows


class Gradients(TrainerCallback):
    """The gradients of each optimizer step."""

    def __init__(self):
        self.steps = []

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        self.steps.append(gradients_of(model))


def run(
    case,
    folder,
    *,
    patched,
    share_prefixes=False,
    tokens_per_part=None,
    mlp_chunk_tokens=None,
    **changes,
):
    """What a training logs, the gradients of each step, and the rows of each forward."""
    torch.manual_seed(3)
    trainer = case.make(folder / str(patched), **changes)
    gradients = Gradients()
    trainer.add_callback(gradients)
    rows = rows_seen(trainer.model)
    others = [getattr(trainer, name, None) for name in ("ref_model", "teacher_model")]
    others = [rows_seen(x) for x in others if x not in (None, trainer.model)]
    if patched:
        options = {
            "share_prefixes": share_prefixes,
            "tokens_per_part": tokens_per_part,
            "mlp_chunk_tokens": mlp_chunk_tokens,
        }
        assert fv.patch_trainer(trainer, "sdpa", **options) is trainer
    elif share_prefixes:  # the padded run takes the same batches
        size = trainers._completions_of_block(trainer, tokens_per_part is not None)
        if size > 1:
            trainers._shuffle_blocks(trainer, size)
    trainer.train()
    assert not patched or all(1 in seen for seen in others if seen)
    if trainer.eval_dataset is not None:
        trainer.evaluate()
    logs = [
        {k: v for k, v in log.items() if isinstance(v, float) and not k.endswith(_CLOCK)}
        for log in trainer.state.log_history
    ]
    return logs, gradients.steps, rows


def _close(name, found, expected):
    """Whether a logged value is the padded run's.

    Many are differences: of scores, or of sums of 100 or so, which fp32 rounds to 8e-6.
    """
    is_strict = name.endswith(("loss", "grad_norm"))
    return found == pytest.approx(expected, rel=1e-5, abs=1e-6 if is_strict else 1e-5)


def _check_gradients(step, exact):
    """Of one step, to 1e-5 of each parameter's norm: the padded run's own are as far from fp64's.

    Some are sums of much larger terms of both signs (biases of keys, the decay of a gated delta
    rule): what fp32 rounds there goes by the norm of all.
    """
    assert step.keys() == exact.keys()
    of_all = torch.stack([x.norm() for x in exact.values()]).norm()
    for name, gradient in exact.items():
        error, norm = (step[name] - gradient).norm(), gradient.norm()
        assert error <= 1e-5 * norm + 1e-6 * of_all, name


def check_run(case, folder, **changes):
    """A patched run against the padded one, but for the metrics that read padding."""
    logs, exact, _ = run(case, folder, patched=False, **changes)
    ours, found, rows = run(case, folder, patched=True, **changes)
    assert len(ours) == len(logs) > 1
    differ = set()
    for expected, log in zip(logs, ours, strict=True):
        assert log.keys() == expected.keys()
        differ |= {name for name, x in expected.items() if not _close(name, log[name], x)}
    if changes.get("share_prefixes"):
        assert differ <= set(case.reads_padding), differ
    else:
        assert differ == set(case.reads_padding)
        assert rows.count(1) >= 2 if case.generates else set(rows) == {1}
    assert any(gradient.any() for step in exact for gradient in step.values())
    for step, expected in zip(found, exact, strict=True):
        _check_gradients(step, expected)


def check_shared(case, folder, monkeypatch, **changes):
    """A run whose batches share prompts against the padded one, and that each of them does."""
    monkeypatch.setattr(shared_rows, "MIN_SHARED_TOKENS", 1)  # the tests' prompts are short
    shared = []
    share = shared_rows.share_prefixes_of_rows

    def noting(padded, *args, **kwargs):
        found = share(padded, *args, **kwargs)
        shared.append(sum(padded.layout.lengths) - sum(found.layout.lengths))
        return found

    monkeypatch.setattr(padding, "share_prefixes_of_rows", noting)
    check_run(case, folder, share_prefixes=True, **changes)
    assert min(shared) > 0, "a batch holds no two answers to one prompt"
