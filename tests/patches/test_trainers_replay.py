"""`patch_trainer` of GRPO whose rollouts carry an engine's experts: every forward replays them."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch

import flexvarlen as fv
from flexvarlen.patches import trainers
from flexvarlen.patches.batch import shared_rows
from tests.patches.forward.padded_runs import assert_gradients_close
from tests.patches.forward.replay_runs import forced
from tests.patches.padded_trainers import GRPO, LORA, Gradients
from tests.slow import with_slow
from tests.tiny_models import VOCABULARY, tokenizer

pytestmark = pytest.mark.usefixtures("fresh_accelerate")
KIND = "qwen3_moe"
SETTINGS = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "num_generations": 2,
    "max_steps": 2,
    "router_aux_loss_coef": 0.0,
}
CASES = {
    "plain": {},
    "iterations": {"num_iterations": 2, "steps_per_generation": 4},
    "checkpoints": {"gradient_checkpointing": True, "beta": 0.0},
    "lora": {"peft_config": LORA},
}
OPTIONS = {
    "unpad": {},
    "sharing": {"share_prefixes": True},
    "one_tree": {"share_prefixes": True, "tokens_per_part": 30},
}


def answers(prompts):
    """For each its ids, an answer's and, for both, what an engine records."""
    rng = torch.Generator().manual_seed(7)
    rows = []
    for prompt in prompts:
        ids = tokenizer()(prompt)["input_ids"]
        count = int(torch.randint(1, 12, (), generator=rng))
        answer = torch.randint(3, VOCABULARY, (count,), generator=rng).tolist()
        of_prompt = torch.Generator().manual_seed(sum(ids))  # alike for the answers of one prompt
        scores = [torch.rand(len(ids), 2, 4, generator=of_prompt)]
        scores.append(torch.rand(count, 2, 4, generator=rng))
        record = torch.cat(scores).argsort(-1)[:-1, :, :2].to(torch.uint8)
        rows.append((ids, answer, record))
    return rows


class Engine:
    """`rollout_func`; remembers the routes of what it returned, by its tokens."""

    def __init__(self, column=True):
        self.routes, self.column, self.forced = {}, column, ExitStack()

    def __call__(self, prompts, trainer):
        rows = answers(prompts)
        sizes = {"num_experts": 4, "num_layers": 2, "top_k": 2}
        routes = [fv.engine_routes(x, len(a) + len(b), **sizes) for a, b, x in rows]
        for (a, b, _), each in zip(rows, routes, strict=True):
            self.routes[(*a, *b)] = each
        found = {
            "prompt_ids": [a for a, _, _ in rows],
            "completion_ids": [b for _, b, _ in rows],
            "logprobs": [[0.0] * len(b) for _, b, _ in rows],
        }
        return found | ({"routed_experts": routes} if self.column else {})

    def force(self, model):
        """Let an unpatched model's routers take the experts of the rows that it gets."""
        given = []
        base = next(x for x in model.modules() if type(x).__name__ == "Qwen3MoeModel")
        base.register_forward_pre_hook(
            lambda _, args, kwargs: given.append((kwargs["input_ids"], kwargs["attention_mask"])),
            with_kwargs=True,
        )

        def choose(index, logits):
            ids, mask = given[-1]
            experts = logits.topk(2).indices.view(*ids.shape, 2).clone()
            for row, real in enumerate(mask.bool()):
                routes = self.routes[tuple(ids[row, real].tolist())][:, index].long()
                experts[row, real] = torch.where(routes < 0, experts[row, real], routes)
            return experts.flatten(0, 1)

        self.forced.enter_context(forced(base, KIND, choose))


def learned(folder, patched, options, case, column=True, **changes):
    """Logs and gradients of each step."""
    torch.manual_seed(3)
    trainer = GRPO.varied(**SETTINGS, **case).make(folder, kind=KIND, **changes)
    trainer.rollout_func = engine = Engine(column)
    gradients = Gradients()
    trainer.add_callback(gradients)
    if patched:
        fv.patch_trainer(trainer, "sdpa", **options)
    else:
        for model in (trainer.model, trainer.ref_model):
            if model is not None and column:
                engine.force(model)
        if options.get("share_prefixes"):
            size = trainers._completions_of_block(trainer, "tokens_per_part" in options)
            if size > 1:
                trainers._shuffle_blocks(trainer, size)
    trainer.train()
    names = ("loss", "kl", "entropy", "aux_loss")
    logs = [{k: x for k, x in log.items() if k in names} for log in trainer.state.log_history]
    return logs, gradients.steps


@pytest.fixture(autouse=True)
def _short_prefixes(monkeypatch):
    monkeypatch.setattr(shared_rows, "MIN_SHARED_TOKENS", 1)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("case", with_slow(CASES, ["lora", "checkpoints"]))  # as "iterations" does
def test_learns_what_forced_routers_teach(case, option, tmp_path):
    given = (OPTIONS[option], CASES[case])
    logs, gradients = learned(tmp_path / "plain", False, *given)
    ours, found = learned(tmp_path / "ours", True, *given)
    for a, b in zip(ours, logs, strict=True):
        assert a == pytest.approx(b, rel=1e-3, abs=1e-5)
    assert len(found) == len(gradients) > 0
    for a, b in zip(found, gradients, strict=True):
        assert_gradients_close(a, b, 1e-3, 1e-5)


def test_the_choice_matters(tmp_path):
    """A rollout without experts teaches something else."""
    _, without = learned(tmp_path / "a", True, {}, {}, column=False)
    _, found = learned(tmp_path / "b", True, {}, {})
    name = "model.layers.0.mlp.gate.weight"
    assert (without[0][name] - found[0][name]).norm() > 0.1 * found[0][name].norm()


def test_the_loss_of_routers(tmp_path):
    logs, _ = learned(tmp_path, True, {}, {}, router_aux_loss_coef=0.1)
    assert logs[0]["aux_loss"] > 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: x[:1], "must be a list with what fv.engine_routes"),
        (lambda x: [each[:-1] for each in x], "must have a row for each of"),
    ],
)
def test_refused(change, words, tmp_path):
    trainer = GRPO.varied(**SETTINGS).make(tmp_path, kind=KIND)
    engine = Engine()

    def rollout(prompts, trainer):
        found = engine(prompts, trainer)
        return found | {"routed_experts": change(found["routed_experts"])}

    trainer.rollout_func = rollout
    fv.patch_trainer(trainer, "sdpa")
    with pytest.raises(ValueError, match=words):
        trainer.train()


def test_another_order_of_what_trl_returns_is_read(tmp_path):
    trainer = GRPO.varied(**SETTINGS).make(tmp_path, kind=KIND)
    trainer.rollout_func = Engine()
    trainer._generate = lambda prompts: ({}, [], [], [], [], [])
    fv.patch_trainer(trainer, "sdpa")
    with pytest.raises(NotImplementedError, match=r"trl .* has no GRPOTrainer\._generate\(\)\[5\]"):
        trainer._generate(["a"])
