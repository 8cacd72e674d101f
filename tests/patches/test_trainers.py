"""`patch_trainer`: losses and gradients of TRL's trainers, and of Trainer, are the padded run's."""

from __future__ import annotations

import itertools

import pytest
import torch
from transformers import Trainer, TrainingArguments

import flexvarlen as fv
from flexvarlen.patches import trainers
from flexvarlen.patches.api import current_patch
from flexvarlen.patches.batch import shared_rows
from tests.contract_training import settings
from tests.patches.padded_trainers import (
    BASES,
    CASES,
    CHOSEN,
    GRPO,
    PROMPTS,
    SHORT,
    WHOLE,
    Case,
    check_run,
    check_shared,
    classifier,
    of_odd_length,
    policy,
    preferences,
    prompts,
    rows_seen,
    run,
    saved,
    trl,
)

pytestmark = pytest.mark.usefixtures("fresh_accelerate")
ALL = CASES | BASES


# Held by default by test_shared_prompts; a compiled Trainer by test_rows_of_fixed_shapes.
BREADTH = ("classification_compiled", "cpo", "gmpo", "gold", "iw_opd", "online_dpo", "sdft", "tpo")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in BREADTH else ()) for name in CASES],
)
def test_a_run_learns_what_the_padded_one_learns(name, tmp_path):
    check_run(CASES[name], tmp_path)


OF_TEXT = ("qwen3_windows", "phi3", "qwen3_5_text")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *itertools.product(
            ("reward", "dpo", "kto", "grpo", "rloo", "distillation"), (*OF_TEXT, "mixtral")
        ),
        ("reward", "modernbert"),
    ],
)
@pytest.mark.sampled(5)
def test_each_kind_of_model(name, kind, tmp_path):
    """No text reaches phi3's long frequencies, which a padded batch has for all rows or none."""
    check_run(ALL[name], tmp_path, kind=kind, learning_rate=0.01)


@pytest.mark.parametrize("name", ["dpo", "sft"])
def test_mlps_in_chunks(name, tmp_path):
    check_run(ALL[name], tmp_path, mlp_chunk_tokens=16, gradient_checkpointing=True)


IN_TWO_BATCHES = {"num_generations": 2, "steps_per_generation": 2}
SHARING = {
    **{name: {} for name in ("dpo", "kto", "reward", "language_model", "sft")},
    **{name: IN_TWO_BATCHES for name in ("grpo", "rloo", "gmpo", "sdft")},
    **{name: {"num_generations": 2} for name in ("gold", "iw_opd")},
    **{name: {} for name in ("cpo", "online_dpo", "tpo")},
}


@pytest.mark.filterwarnings("ignore:flexvarlen. recurrent layers run one document after another")
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, "qwen3") for name in SHARING if name not in ("language_model", "sft", "rloo")),
        ("dpo", "qwen3_5_text"),
        *(
            pytest.param(name, kind, marks=pytest.mark.slow)
            for name, kind in [
                *((name, "qwen3") for name in ("language_model", "sft", "rloo")),
                *((name, "qwen3_5_text") for name in ("kto", "grpo")),
                ("grpo", "mixtral"),
            ]
        ),
    ],
)
def test_shared_prompts(name, kind, tmp_path, monkeypatch):
    check_shared(ALL[name], tmp_path, monkeypatch, kind=kind, **SHARING[name])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["dpo", "grpo", "distillation", "classification"])
def test_in_bf16_as_trl_runs_by_default(name, tmp_path):
    """accelerate then wraps the forward of a model, ours inside; DistillationTrainer calls the base
    model, around which it wraps none.
    """
    changes = {"bf16": True, "gradient_checkpointing": True}
    logs, _, _ = run(ALL[name], tmp_path, patched=False, **changes)
    ours, _, rows = run(ALL[name], tmp_path, patched=True, **changes)
    assert 1 in rows
    if name != "grpo":  # it may sample other tokens
        assert ours[0]["loss"] == pytest.approx(logs[0]["loss"], rel=5e-2)


# ---- completions of a prompt ----


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


def test_a_batch_of_one_completion_of_each_prompt(tmp_path):
    trainer = GRPO.make(tmp_path, num_generations=3, generation_batch_size=12)
    with pytest.raises(ValueError, match=r"divisor in common with num_generations.* got 4 and 3"):
        fv.patch_trainer(trainer, "sdpa", share_prefixes=True)
    assert not fv.is_patched(trainer.model)


# ---- a trainer's other models ----


def test_models_that_score(tmp_path, monkeypatch):
    """Causal ones share prompts too; in an encoder rows share nothing."""
    monkeypatch.setattr(shared_rows, "MIN_SHARED_TOKENS", 1)
    found = []
    for patched in (False, True):
        scorers = [classifier(), classifier("modernbert")]
        rows = rows_seen(scorers[0])
        trainer = GRPO.make(tmp_path, rewards=scorers)
        if patched:
            fv.patch_trainer(trainer, "sdpa", share_prefixes=True)
            assert [current_patch(x).share_prefixes for x in scorers] == [True, False]
        rewards = trainer._calculate_rewards(
            [{"prompt": x} for x in PROMPTS[:2] * 2], PROMPTS[:2] * 2, CHOSEN[:4], [[3]] * 4
        )
        assert rows == [1 if patched else 4]
        found.append(rewards)
    assert found[0].std(dim=0).min() > 0
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


def test_a_reference_model_that_has_the_name_alone(tmp_path):
    """TRL loads it with the policy's attn_implementation; a hybrid needs the patch itself."""
    logs = []
    for patched in (False, True):
        model = saved(kind="lfm2")
        if patched:
            fv.patch_model(model, "sdpa", unpad=True)
        trainer = Case("DPO", preferences, WHOLE, model=lambda model=model, **_: model).make(
            tmp_path, max_steps=1
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
    trainer = GRPO.make(tmp_path, rewards=[scorer])
    with pytest.raises(NotImplementedError, match="mamba"):
        fv.patch_trainer(trainer)
    assert not fv.is_patched(trainer.model)
    fv.patch_model(trainer.model, "reference")
    with pytest.raises(NotImplementedError, match="mamba"):
        fv.patch_trainer(trainer)
    assert fv.is_patched(trainer.model)
    assert trainer.model.config._attn_implementation == "flexvarlen_reference"


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
    changes = {**SHORT, "teacher_model_server_url": "http://localhost:1"}
    name = "server_distillation.ServerDistillation"
    check_run(Case(name, prompts, changes, generates=True), tmp_path)


# ---- what cannot be patched ----


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"model_init": lambda: policy()}, "trainer must be made with model=, got model_init="),
        (
            {"model": torch.nn.Linear(2, 2)},
            "model must be, or wrap, a transformers PreTrainedModel",
        ),
    ],
)
def test_trainers_that_are_refused(given, words, tmp_path):
    trainer = Trainer(args=TrainingArguments(**settings(tmp_path)), **given)
    with pytest.raises(ValueError, match=words):
        fv.patch_trainer(trainer)


def test_no_trainer():
    with pytest.raises(ValueError, match="trainer must be a transformers Trainer"):
        fv.patch_trainer(policy())


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
    model = fv.patch_model(policy(), "sdpa", unpad=True)
    with pytest.raises(ValueError, match=r"got tree_kv_index=.*PackedLayout.from_tree"):
        model(**inputs, **trees)
