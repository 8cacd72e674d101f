"""`patch_trainer` with the trainers of TRL that have a teacher, or that are experimental."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from accelerate.state import AcceleratorState
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import flexvarlen as fv
from flexvarlen.patches import trainers
from flexvarlen.patches.api import current_patch
from flexvarlen.patches.batch import padded_batch
from tests.contract_training import settings
from tests.patches.test_trainers import (
    CHOSEN,
    LORA,
    PLAIN,
    PROMPTS,
    check_run,
    check_shared,
    classifier,
    grpo,
    policy,
    preferences,
    run,
    saved_policy,
    texts,
    tokenizer,
)
from tests.tiny_models import new_model

trl = pytest.importorskip("trl", reason="needs TRL: pip install -c constraints.txt trl")
datasets = pytest.importorskip("datasets", reason="needs datasets, which TRL brings along")


def saved(seed, kind):
    """A model that knows its folder, from which some trainers load a second one."""
    model = AutoModelForCausalLM.from_pretrained(saved_policy(kind), attn_implementation="eager")
    model.load_state_dict(policy(seed, kind).state_dict())
    return model


def prompts():
    return datasets.Dataset.from_dict({"prompt": PROMPTS, "privileged_context": CHOSEN})


def with_references():
    return preferences().add_column("reference", texts(8, 25, 5))


def chats():
    turns = zip(PROMPTS, CHOSEN, strict=True)
    roles = ("user", "assistant")
    messages = [[{"role": r, "content": x} for r, x in zip(roles, y, strict=True)] for y in turns]
    return datasets.Dataset.from_dict({"messages": messages})


def token_ids():
    """Of prompts and answers, as GOLD needs a byte-level tokenizer for texts."""
    prompt, answer = (tokenizer()(each)["input_ids"] for each in (PROMPTS, CHOSEN))
    both = list(zip(prompt, answer, strict=True))
    masks = [[0] * len(a) + [1] * len(b) for a, b in both]
    columns = {"prompt": PROMPTS, "input_ids": [a + b for a, b in both], "completion_mask": masks}
    return datasets.Dataset.from_dict(columns)


def of_odd_length(completions, **_):
    return [float(len(x) % 2) for x in completions]


class Case(NamedTuple):
    """A trainer, and what it is made with."""

    module: str
    name: str
    dataset: Callable[[], Any]
    settings: dict[str, Any]
    second: str = ""  # the argument that takes a second model
    rewards: bool = False
    generates: bool = False
    reads_padding: tuple[str, ...] = ()  # metrics
    lora: bool = False

    def make(self, folder, *, kind="qwen3", **changes):
        """The trainer."""
        found = pytest.importorskip(f"trl{self.module}")
        arguments = {self.second: saved(1, kind)} if self.second else {}
        arguments |= {"reward_funcs": [of_odd_length]} if self.rewards else {}
        arguments |= {"peft_config": LORA} if self.lora else {}
        tokens = tokenizer()
        tokens.padding_side = "left"  # A2PO samples from batches that it pads by this
        tokens.chat_template = "{% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}"
        return getattr(found, f"{self.name}Trainer")(
            model=saved(0, kind),
            args=getattr(found, f"{self.name}Config")(
                **settings(folder, **{**PLAIN, **self.settings, **changes})
            ),
            train_dataset=self.dataset(),
            processing_class=tokens,
            **arguments,
        )


SHORT = {"max_completion_length": 12}
GROUPS = {**SHORT, "num_generations": 2}
OF_LOGITS = ("logits/chosen", "logits/rejected")
OF_COMPLETIONS = tuple(
    f"objective/{name}" for name in ("kl", "entropy", "non_score_reward", "rlhf_reward")
)
CASES = {
    "rloo": Case("", "RLOO", prompts, {**GROUPS, "beta": 0.1}, rewards=True, generates=True),
    "distillation": Case(
        "", "Distillation", prompts, {**SHORT, "beta": 0.5}, "teacher_model", generates=True
    ),
    "distillation_lora": Case(
        "", "Distillation", prompts, SHORT, "teacher_model", generates=True, lora=True
    ),
    "gkd": Case(".experimental.gkd", "GKD", chats, {"lmbda": 0.0}, "teacher_model"),
    "gkd_on_policy": Case(
        ".experimental.gkd",
        "GKD",
        chats,
        {"lmbda": 1.0, "max_new_tokens": 12, "gradient_checkpointing": True},
        "teacher_model",
        generates=True,
    ),
    "cpo": Case(
        ".experimental.cpo", "CPO", preferences, {"max_length": 64}, reads_padding=OF_LOGITS
    ),
    "orpo": Case(
        ".experimental.orpo", "ORPO", preferences, {"max_length": 64}, reads_padding=OF_LOGITS
    ),
    "online_dpo": Case(
        ".experimental.online_dpo",
        "OnlineDPO",
        prompts,
        {"max_new_tokens": 40},  # so that some answers end before others
        "ref_model",
        rewards=True,
        generates=True,
        reads_padding=OF_COMPLETIONS,
    ),
    "tpo": Case(".experimental.tpo", "TPO", with_references, {}),
    "a2po": Case(
        ".experimental.a2po",
        "A2PO",
        prompts,
        {**SHORT, "num_value_samples": 2, "filter_all_incorrect": False},
        rewards=True,
        generates=True,
    ),
    "gmpo": Case(
        ".experimental.gmpo", "GMPO", prompts, {**GROUPS, "beta": 0.1}, rewards=True, generates=True
    ),
    "gold": Case(".experimental.gold", "GOLD", token_ids, {"lmbda": 0.0}, "teacher_model"),
    "iw_opd": Case(".experimental.iw_opd", "IWOPD", chats, SHORT, "teacher_model", generates=True),
    "sdft": Case(
        ".experimental.sdft", "SDFT", prompts, {**GROUPS, "distillation_topk": 5}, generates=True
    ),
    "sdft_adapters": Case(
        ".experimental.sdft",
        "SDFT",
        prompts,
        {**GROUPS, "distillation_topk": 5, "teacher_model_kind": "ema"},
        generates=True,
        lora=True,
    ),
    "sdpo": Case(".experimental.sdpo", "SDPO", prompts, GROUPS, rewards=True, generates=True),
}


@pytest.mark.parametrize("name", CASES)
def test_a_run_learns_what_the_padded_one_learns(name, tmp_path):
    case = CASES[name]
    reads = {"generates": case.generates, "reads_padding": case.reads_padding}
    check_run(case.make, {}, tmp_path, **reads)


@pytest.mark.parametrize("kind", ["qwen3_windows", "phi3", "qwen3_5_text", "mixtral"])
@pytest.mark.parametrize("name", ["rloo", "distillation"])
@pytest.mark.sampled(2)
def test_each_kind_of_model(name, kind, tmp_path):
    check_run(CASES[name].make, {"kind": kind, "learning_rate": 0.01}, tmp_path, generates=True)


HALVES, PAIRS = {"steps_per_generation": 2}, {"num_generations": 2}
SHARING = {
    **{"rloo": HALVES, "gmpo": HALVES, "sdft": HALVES, "gold": PAIRS, "iw_opd": PAIRS},
    **{"cpo": {}, "online_dpo": {}, "tpo": {}},
}


@pytest.mark.parametrize("name", SHARING)
@pytest.mark.sampled(5)
def test_shared_prompts(name, tmp_path, monkeypatch):
    case = CASES[name]
    check_shared(case.make, SHARING[name], tmp_path, monkeypatch, reads_padding=case.reads_padding)


def test_in_bf16_as_trl_runs_by_default(tmp_path, monkeypatch):
    """DistillationTrainer calls the base model, around which accelerate wraps no forward."""
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    make, changes = CASES["distillation"].make, {"bf16": True, "gradient_checkpointing": True}
    logs, _, _ = run(make, tmp_path / "padded", changes, patched=False)
    ours, _, rows = run(make, tmp_path / "packed", changes, patched=True)
    AcceleratorState._reset_state(reset_partial_state=True)
    assert 1 in rows
    assert ours[0]["loss"] == pytest.approx(logs[0]["loss"], rel=5e-2)


class OwnTrainer(trl.RLOOTrainer):
    """A user's, in a module that does not shuffle."""

    def _prepare_inputs(self, generation_batch):
        return super()._prepare_inputs(generation_batch)


def test_completions_of_a_prompt_stay_together(tmp_path):
    trainer = CASES["rloo"].make(tmp_path, steps_per_generation=2, max_steps=1)
    trainer.__class__ = OwnTrainer
    fv.patch_trainer(trainer, "sdpa", share_prefixes=True).train()
    for batch in trainer._buffered_inputs:
        assert torch.equal(batch["prompt_ids"][::2], batch["prompt_ids"][1::2])


def test_models_that_score(tmp_path, monkeypatch):
    """Causal ones share prompts too; in an encoder rows share nothing."""
    monkeypatch.setattr(padded_batch, "MIN_SHARED_TOKENS", 1)
    found = []
    for patched in (False, True):
        scorers = [classifier(), classifier(kind="modernbert")]
        torch.manual_seed(3)
        trainer = grpo(tmp_path, rewards=scorers)
        if patched:
            fv.patch_trainer(trainer, "sdpa", share_prefixes=True)
            assert [current_patch(x).share_prefixes for x in scorers] == [True, False]
        rewards = trainer._calculate_rewards(
            [{"prompt": x} for x in PROMPTS[:2] * 2], PROMPTS[:2] * 2, CHOSEN[:4], [[3]] * 4
        )
        found.append(rewards)
    assert found[0].std(dim=0).min() > 0
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


def test_each_model_is_found_once(tmp_path):
    """Also in lists, inside other modules, and where another one contains it."""
    trainer = Trainer(model=policy(), args=TrainingArguments(**settings(tmp_path)))
    inside, guide = torch.nn.Sequential(policy(1)), policy(2)
    scorers = (classifier(), torch.nn.Linear(2, 2), of_odd_length)
    trainer.first, trainer.teacher, trainer.again = trainer.model.model, inside, inside[0]
    trainer.scorers, trainer.judge = scorers, torch.nn.Linear(2, 2)
    trainer.loss = torch.nn.ModuleDict({"policy": trainer.model, "guide": guide})
    assert trainers._models(trainer) == [trainer.model, inside, guide, scorers[0]]
    assert fv.is_patched(fv.patch_trainer(trainer, "sdpa").teacher)


def test_a_policy_that_is_no_transformers_model(tmp_path):
    arguments = TrainingArguments(**settings(tmp_path))
    trainer = Trainer(model=torch.nn.Linear(2, 2), args=arguments)
    with pytest.raises(ValueError, match="must be, or wrap, a transformers PreTrainedModel"):
        fv.patch_trainer(trainer)


def test_trees_of_trl():
    """AsyncGRPOTrainer's, for its own attention: their branches would be documents."""
    packing = pytest.importorskip("trl.experimental.async_grpo.packing")
    row = packing.TreeRow()
    for answer in ([7, 8], [9]):
        ids = torch.tensor([3, 4, 5, *answer])
        mask, logps = (ids > 6).long(), torch.zeros(len(ids))
        sample = {"input_ids": ids, "completion_mask": mask, "old_log_probs": logps}
        row.add({**sample, "advantage": 1.0, "group_id": 0})
    packed = row.pack()
    inputs = {name: packed[name][None] for name in ("input_ids", "position_ids")}
    trees = {name: x for name, x in packed.items() if name.startswith("tree_")}
    model = fv.patch_model(new_model("qwen3"), "sdpa", unpad=True)
    with pytest.raises(ValueError, match=r"got tree_kv_index=.*PackedLayout.from_tree"):
        model(**inputs, **trees)


class Server:
    """In place of TRL's client of a vLLM server: a teacher that is sure of token 5."""

    def __init__(self, **_):
        pass

    def get_sequence_logprobs(self, sequences, prompt_lengths, **_):
        """For each token of the completions."""
        lengths = [len(ids) - n for ids, n in zip(sequences, prompt_lengths, strict=True)]
        names = {"actual_logprobs": -2.0, "logprobs": -0.5, "logprob_token_ids": 5}
        return {name: [[[value]] * n for n in lengths] for name, value in names.items()}


def test_a_teacher_behind_a_server(tmp_path, monkeypatch):
    monkeypatch.setattr("trl.generation.vllm_client.VLLMClient", Server)
    given = {**SHORT, "teacher_model_server_url": "http://localhost:1"}
    case = Case(".experimental.server_distillation", "ServerDistillation", prompts, given)
    check_run(case.make, {}, tmp_path, generates=True)
