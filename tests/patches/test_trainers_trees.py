"""`patch_trainer(tokens_per_part=...)`: a step is one tree, and learns what padded batches do."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import flexvarlen as fv
from flexvarlen.patches import tree_trainer
from flexvarlen.patches.batch import shared_rows
from tests.patches import tree_trainer_ranks as cases
from tests.patches.padded_trainers import (
    CASES,
    DPO,
    GRPO,
    LORA,
    REWARD,
    check_run,
    run,
    trl,
)
from tests.slow import with_slow

pytestmark = pytest.mark.usefixtures("fresh_accelerate", "short_prefixes")


@pytest.fixture
def short_prefixes(monkeypatch):
    """The tests' prompts are short."""
    monkeypatch.setattr(shared_rows, "MIN_SHARED_TOKENS", 1)


ACCUMULATED = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
ANSWERS = {**ACCUMULATED, "num_generations": 4}
"""Two prompts with four answers each, in four micro-batches."""
GROUPS = GRPO.varied(**ANSWERS)
EPOCH = {"max_steps": -1, "num_train_epochs": 1}
PAIRS = DPO.varied(**ACCUMULATED)
WHOLE, SMALL = 10_000, 30
STEPS = {
    "grpo": GROUPS,
    "grpo_no_reference": GROUPS.varied(beta=0.0, loss_type="grpo", temperature=0.7),
    "grpo_iterations": GROUPS.varied(num_iterations=2, max_steps=4),
    "rloo": CASES["rloo"].varied(**ANSWERS),
}
OTHERS = {
    "grpo_lora": GROUPS.varied(peft_config=LORA),
    "grpo_entropy_bonus": GROUPS.varied(entropy_coef=0.1, top_entropy_quantile=0.5),
    # Their log-probabilities have no gradient.
    "grpo_equal_rewards": replace(
        GROUPS.varied(beta=0.0, entropy_coef=0.1), rewards=lambda completions, **_: [1.0] * 8
    ),
    "grpo_checkpointing": GROUPS.varied(gradient_checkpointing=True, max_grad_norm=0.01),
    "grpo_generation_of_two_steps": GROUPS.varied(steps_per_generation=8, max_steps=4),
    # The epoch's last step has one micro-batch.
    "grpo_two_generations_a_step": GROUPS.varied(
        gradient_accumulation_steps=3, steps_per_generation=2, **EPOCH
    ),
    "grpo_across_steps": GROUPS.varied(
        gradient_accumulation_steps=3, steps_per_generation=4, **EPOCH
    ),
    "grpo_evaluation": replace(GROUPS.varied(max_steps=1), evaluates=True),
    "rloo_lora": CASES["rloo"].varied(
        **ANSWERS, peft_config=LORA, num_iterations=2, learning_rate=0.01
    ),
    "gmpo": CASES["gmpo"].varied(**ANSWERS),
    "dpo": PAIRS,
    "dpo_weighted": PAIRS.varied(use_weighting=True, ld_alpha=0.5, max_steps=1),
    "dpo_lora": PAIRS.varied(peft_config=LORA, gradient_accumulation_steps=3, **EPOCH),
    "kto": CASES["kto"].varied(**ACCUMULATED),
}


@pytest.mark.parametrize("tokens_per_part", with_slow([WHOLE, SMALL], [WHOLE]))
@pytest.mark.parametrize("name", with_slow(STEPS, ["grpo_no_reference"]))
def test_a_step_learns_what_the_padded_one_learns(name, tokens_per_part, tmp_path):
    check_run(STEPS[name], tmp_path, share_prefixes=True, tokens_per_part=tokens_per_part)


@pytest.mark.parametrize(
    "name",
    with_slow(
        OTHERS,
        {
            *("grpo_across_steps", "grpo_generation_of_two_steps", "grpo_equal_rewards", "gmpo"),
            *("dpo_weighted", "dpo_lora", "rloo_lora", "grpo_lora", "grpo_checkpointing"),
        },
    ),
)
def test_settings(name, tmp_path):
    check_run(OTHERS[name], tmp_path, share_prefixes=True, tokens_per_part=SMALL)


@pytest.mark.filterwarnings("ignore:flexvarlen. recurrent layers run one document after another")
@pytest.mark.parametrize("kind", ["cohere2", "qwen3_5_text"])
def test_kinds(kind, tmp_path):
    """One whose logits are scaled, and a hybrid."""
    changes = {"kind": kind, "learning_rate": 0.01, "max_steps": 1}
    check_run(GROUPS, tmp_path, share_prefixes=True, tokens_per_part=SMALL, **changes)


@pytest.mark.parametrize("tokens_per_part", with_slow([WHOLE, SMALL], [WHOLE]))
def test_under_autocast(tokens_per_part, tmp_path):
    """accelerate's: against trees of micro-batches, as the padded run samples other tokens."""
    changes = {"bf16": True, "max_steps": 1, "patched": True, "share_prefixes": True}
    logs, exact, _ = run(GROUPS, tmp_path / "each", **changes)
    ours, found, _ = run(GROUPS, tmp_path / "one", tokens_per_part=tokens_per_part, **changes)
    assert ours[0]["kl"] == pytest.approx(logs[0]["kl"], rel=1e-2)
    for name, gradient in exact[0].items():
        assert (found[0][name] - gradient).norm() <= 0.05 * gradient.norm(), name


def test_preferences_under_autocast(tmp_path):
    trainer = PAIRS.make(tmp_path, bf16=True, max_steps=1)
    fv.patch_trainer(trainer, "sdpa", share_prefixes=True, tokens_per_part=SMALL)
    dtypes = set()
    layer = trainer.model.model.layers[0].self_attn.q_proj
    layer.register_forward_hook(lambda _, __, out: dtypes.add(out.dtype))
    trainer.train()
    assert dtypes == {torch.bfloat16}


# ---- several processes ----

TWO = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
GROUPS_OF_TWO = GRPO.varied(**TWO, num_generations=4, beta=0.0)
UNDER_DDP = {
    "grpo": (GROUPS_OF_TWO, (SMALL, SMALL)),
    "grpo_lora": (GROUPS_OF_TWO.varied(beta=0.1, peft_config=LORA), (WHOLE, WHOLE)),
    # Of a step's two trees, one has two micro-batches.
    "grpo_two_generations_a_step": (
        GROUPS_OF_TWO.varied(gradient_accumulation_steps=3, steps_per_generation=2),
        (SMALL, WHOLE),
    ),
    "dpo": (DPO.varied(**TWO), (SMALL, WHOLE)),
    "dpo_lora": (DPO.varied(**TWO, peft_config=LORA), (WHOLE, WHOLE)),
}
"""Trainers, and the `tokens_per_part` of two ranks: with `WHOLE`, a tree is one part."""


@pytest.mark.parametrize(
    "name", with_slow(UNDER_DDP, [name for name in UNDER_DDP if name != "grpo"])
)
def test_ddp(ranks, name):
    """Each rank has other samples, and may have another number of parts; a step reduces once."""
    case, tokens_per_part = UNDER_DDP[name]
    parts = ranks.run(cases.learned, case, tokens_per_part)
    assert parts[0] != parts[1]
    for own, most in zip(parts, tokens_per_part, strict=True):
        assert max(tokens for tokens, _ in own) <= most
        assert sum(reduces for _, reduces in own) == 2  # steps
        assert own[-1][1]


UNDER_FSDP2 = {
    "grpo_two_generations_a_step": UNDER_DDP["grpo_two_generations_a_step"],
    "dpo": (DPO.varied(**TWO), (WHOLE, WHOLE)),
}


@pytest.mark.parametrize("name", with_slow(UNDER_FSDP2, ["dpo", "grpo_two_generations_a_step"]))
def test_fsdp2(ranks, name):
    case, tokens_per_part = UNDER_FSDP2[name]
    assert ranks.run(cases.learned, case.varied(**cases.FSDP2), tokens_per_part) == [[], []]


# ---- tokens that run ----


def tokens_run(trainer):
    """The tokens of each forward of the base model on a row of trees, and whether it learns."""
    seen = []

    def note(module, args, given):
        if given.get("packed_layout") is not None:
            seen.append((given["input_ids"].numel(), torch.is_grad_enabled()))

    trainer.model.model.register_forward_pre_hook(note, with_kwargs=True)
    return seen


def trained(tmp_path, tokens_per_part, **changes):
    """A trainer after its run, the tokens of its forwards, and those of a step's tree."""
    trainer = GROUPS.make(tmp_path, **{"beta": 0.0, "max_steps": 1, **changes})
    fv.patch_trainer(trainer, "sdpa", share_prefixes=True, tokens_per_part=tokens_per_part)
    seen = tokens_run(trainer)
    trainer.train()
    batches = [tree_trainer._completions(batch) for batch in trainer._buffered_inputs]
    rows = [sample for batch in batches for sample in batch.samples()]
    assert len(rows) == 8
    return trainer, seen, fv.share_prefixes(rows).layout.total_tokens


def test_each_token_runs_once_a_step(tmp_path):
    _, seen, tokens = trained(tmp_path, WHOLE)
    assert seen == [(tokens, True)]


def test_old_log_probabilities_are_those_of_one_tree(tmp_path):
    _, seen, tokens = trained(tmp_path, WHOLE, num_iterations=2, max_steps=2)
    assert seen == [(tokens, False), (tokens, True), (tokens, True)]


def test_each_token_runs_in_one_part(tmp_path):
    _, seen, tokens = trained(tmp_path, SMALL)
    learning = [n for n, learns in seen if learns]
    assert max(n for n, _ in seen) <= SMALL < sum(learning) == tokens
    without = sum(n for n, learns in seen if not learns)
    assert tokens <= without < 2 * tokens  # the values first; then segments that others continue


# ---- what cannot be served ----


@pytest.mark.parametrize(
    ("case", "options", "error", "words"),
    [
        (GROUPS, {"tokens_per_part": SMALL}, ValueError, "must be used with share_prefixes=True"),
        (GROUPS, {"tokens_per_part": 0}, ValueError, "tokens_per_part must be an integer"),
        (REWARD, {"tokens_per_part": SMALL}, ValueError, "KTOTrainer of TRL, got RewardTrainer"),
        (
            GROUPS.varied(cast_lm_head_to_fp32=True),
            {"tokens_per_part": SMALL},
            NotImplementedError,
            "cast_lm_head_to_fp32; leave tokens_per_part out",
        ),
    ],
)
def test_refusals(case, options, error, words, tmp_path):
    trainer = case.make(tmp_path)
    sharing = {} if "share_prefixes=True" in words else {"share_prefixes": True}
    with pytest.raises(error, match=words):
        fv.patch_trainer(trainer, "sdpa", **sharing, **options)
    assert not fv.is_patched(trainer.model)


@pytest.mark.parametrize("name", ["is_fsdp_enabled", "is_deepspeed_enabled"])
def test_fsdp1_and_deepspeed_are_refused(name, tmp_path, monkeypatch):
    trainer = GROUPS.make(tmp_path)
    monkeypatch.setattr(trainer, name, True)
    with pytest.raises(NotImplementedError, match="DeepSpeed or FSDP1: use DDP or FSDP2"):
        fv.patch_trainer(trainer, "sdpa", share_prefixes=True, tokens_per_part=SMALL)
    assert not fv.is_patched(trainer.model)


def test_a_routers_loss_is_refused(tmp_path):
    trainer = GROUPS.make(tmp_path, kind="mixtral")
    with pytest.raises(NotImplementedError, match="a router's loss: set router_aux_loss_coef=0"):
        fv.patch_trainer(trainer, "sdpa", share_prefixes=True, tokens_per_part=SMALL)


def test_images_are_refused(tmp_path):
    trainer = GROUPS.make(tmp_path)
    fv.patch_trainer(trainer, "sdpa", share_prefixes=True, tokens_per_part=SMALL)
    ids = torch.ones(2, 6, dtype=torch.int64)
    with pytest.raises(ValueError, match="batches of text alone, got a batch with pixel_values"):
        trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, ids, 2, pixel_values=torch.ones(2, 3), num_images=[1, 1]
        )


class TwoPasses(trl.GRPOTrainer):
    """A user's loss, of two passes of the policy."""

    def _compute_loss(self, model, inputs):
        return super()._compute_loss(model, inputs) + super()._compute_loss(model, inputs)


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_a_loss_of_two_passes_is_refused(micro_batches, tmp_path):
    changes = {"per_device_train_batch_size": 8 // micro_batches}
    trainer = GROUPS.make(tmp_path, gradient_accumulation_steps=micro_batches, **changes)
    trainer.__class__ = TwoPasses
    fv.patch_trainer(trainer, "sdpa", share_prefixes=True, tokens_per_part=SMALL)
    with pytest.raises(RuntimeError, match="run in their order, each once with gradients"):
        trainer.train()


def test_a_generation_whose_steps_split_groups(tmp_path):
    trainer = GROUPS.make(
        tmp_path, num_generations=3, gradient_accumulation_steps=2, generation_batch_size=12
    )
    with pytest.raises(ValueError, match=r"gradient_accumulation_steps must .*, got 4 and 3"):
        fv.patch_trainer(trainer, "sdpa", share_prefixes=True, tokens_per_part=SMALL)
