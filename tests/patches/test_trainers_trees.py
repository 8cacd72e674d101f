"""`patch_trainer` with `tokens_per_part`: a step is one tree, and learns what the padded one does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import flexvarlen as fv
from flexvarlen.patches import tree_trainer
from tests.patches.padded_trainers import (
    CASES,
    DPO,
    GRPO,
    LORA,
    REWARD,
    check_run,
    preferences,
    run,
    trl,
)

pytestmark = pytest.mark.usefixtures("fresh_accelerate")

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
    "rloo_lora": CASES["rloo"].varied(**ANSWERS, peft_config=LORA, num_iterations=2),
    "gmpo": CASES["gmpo"].varied(**ANSWERS),
    "dpo": PAIRS,
    "dpo_weighted": PAIRS.varied(use_weighting=True, ld_alpha=0.5, max_steps=1),
    "dpo_lora": PAIRS.varied(peft_config=LORA, gradient_accumulation_steps=3, **EPOCH),
    "kto": CASES["kto"].varied(**ACCUMULATED),
}


@pytest.mark.parametrize("tokens_per_part", [WHOLE, SMALL])
@pytest.mark.parametrize("name", STEPS)
def test_a_step_learns_what_the_padded_one_learns(name, tokens_per_part, tmp_path):
    check_run(STEPS[name], tmp_path, share_prefixes=True, tokens_per_part=tokens_per_part)


@pytest.mark.parametrize("name", OTHERS)
def test_settings(name, tmp_path):
    check_run(OTHERS[name], tmp_path, share_prefixes=True, tokens_per_part=SMALL)
