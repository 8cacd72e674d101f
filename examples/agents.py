"""Learn from recorded conversations of an agent: `accelerate launch examples/agents.py --help`.

Each line of `--data` is a JSON object, one rollout: "messages", the "task" that it attempts, its
"reward", and optionally "tools". All turns of all rollouts of a task become one tree, so that
common prefixes are computed once. As in GRPO, a rollout's advantage is its reward compared with the
others of its task. The loss is the policy gradient, without importance ratios and clipping: it
needs rollouts of the model itself, so the script passes over the file once; then record new ones.

    accelerate launch examples/agents.py --model ./my-model --data rollouts.jsonl
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

import flexvarlen as fv

Turn = tuple[dict[str, list[int]], float]
"""A sample, and the advantage of its rollout."""


def read_tasks(data: Path, tokenizer: Any) -> list[list[Turn]]:
    """The turns of each task's rollouts."""
    tasks = defaultdict(list)
    for line in data.read_text(encoding="utf-8").split("\n"):
        if line.strip():
            rollout = json.loads(line)
            tasks[rollout["task"]].append(rollout)
    return [turns_of(rollouts, tokenizer) for rollouts in tasks.values()]


def turns_of(rollouts: list[dict[str, Any]], tokenizer: Any) -> list[Turn]:
    """The turns of the rollouts of one task."""
    rewards = torch.tensor([float(each["reward"]) for each in rollouts])
    advantages = (rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-4)
    return [
        (turn, advantage)
        for each, advantage in zip(rollouts, advantages.tolist(), strict=True)
        for turn in fv.conversation_samples(each["messages"], tokenizer, tools=each.get("tools"))
    ]


def collate(tasks: list[list[Turn]]) -> dict[str, Any]:
    """The turns of some tasks, and the advantage of each."""
    turns, advantages = zip(*(turn for task in tasks for turn in task), strict=True)
    return {"turns": turns, "advantages": advantages}


class PolicyGradientTrainer(Trainer):
    """A Trainer whose loss weighs each label by the advantage of its rollout."""

    def compute_loss(self, model: Any, inputs: dict[str, Any], *_: Any, **__: Any) -> torch.Tensor:
        shared = fv.share_prefixes(inputs["turns"], device=self.args.device)
        with self.accelerator.autocast():
            logprobs = shared.unfold(fv.tree_logprobs(model, shared))
        parts = zip(inputs["advantages"], logprobs, shared.has_label, strict=True)
        return -sum(a * x[has_label].sum() for a, x, has_label in parts) / shared.label_counts.sum()


def main(
    model: Annotated[str, typer.Option(help="A folder or a hub name.")],
    data: Annotated[Path, typer.Option(help="A JSON-lines file of rollouts.")],
    tasks: Annotated[int, typer.Option(help="Tasks per rank and step.")] = 1,
    learning_rate: float = 1e-6,
    backend: str = "auto",
    seed: int = 0,
    out: Path = Path("agent"),
) -> None:
    """Train a causal language model on recorded rollouts and their rewards."""
    on_gpu = torch.cuda.is_available()
    tokenizer = AutoTokenizer.from_pretrained(model)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    trainer = PolicyGradientTrainer(
        fv.patch_model(policy, backend),
        TrainingArguments(
            str(out),
            num_train_epochs=1,
            per_device_train_batch_size=tasks,
            learning_rate=learning_rate,
            logging_steps=1,
            bf16=on_gpu,
            use_cpu=not on_gpu,
            save_strategy="no",
            report_to=[],
            seed=seed,
        ),
        train_dataset=read_tasks(data, tokenizer),
        data_collator=collate,
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_model(str(out))
    trainer.accelerator.print(f"Trained model in {out}.")


if __name__ == "__main__":
    typer.run(main)
