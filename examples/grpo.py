"""Reinforcement learning with GRPO on packed rows: `accelerate launch examples/grpo.py --help`.

TRL pads prompts on the left and completions on the right. After `fv.patch_trainer` the policy, the
reference model (`--beta` above 0) and the reward model score the real tokens as one packed row;
sampling is transformers' own, with its cache. Each line of `--data` is a JSON object with the text
"prompt". The reward is the share of distinct words, or a model's score, as from `reward.py`.

Or each line is a recorded rollout of an agent: "messages", "task", "reward", perhaps "tools". Then
nothing is sampled or padded, and no other model runs: all turns of a task's rollouts are one tree,
each weighed by the advantage of its rollout, its reward compared with the others of the task.

    accelerate launch examples/grpo.py               # a small Qwen3, on Python's help topics
    accelerate launch examples/grpo.py --model ./my-model --data prompts.jsonl --reward-model reward
    accelerate launch examples/grpo.py --model ./my-model --data rollouts.jsonl
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from datasets import Dataset
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Trainer
from transformers.models.qwen3 import Qwen3Config
from trl import GRPOConfig, GRPOTrainer

import flexvarlen as fv
from flexvarlen.verify.corpus import read_documents, train_tokenizer

SMALL = dict(hidden_size=256, intermediate_size=768, num_hidden_layers=4, head_dim=64)
HEADS = dict(num_attention_heads=4, num_key_value_heads=2)


def sample_prompts(count: int = 512) -> list[dict[str, str]]:
    """The beginnings of texts, of very different lengths."""
    rng, topics = random.Random(0), read_documents()
    cuts = [int(2 ** rng.uniform(2, 7)) for _ in range(count)]
    return [{"prompt": " ".join(rng.choice(topics).split()[:cut])} for cut in cuts]


def save_small_model(folder: Path) -> str:
    """An untrained Qwen3 of 6M parameters and its tokenizer, saved in a folder."""
    words = train_tokenizer(read_documents(), 8192)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<end>", pad_token="<pad>"
    )
    config = Qwen3Config(vocab_size=len(tokenizer), tie_word_embeddings=True, **SMALL, **HEADS)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def distinct_words(completions: list[str], **_: Any) -> list[float]:
    """The share of a completion's words that are distinct."""
    words = [completion.split() for completion in completions]
    return [len(set(each)) / max(len(each), 1) for each in words]


def turns_of(rollouts: list[dict[str, Any]], tokenizer: Any) -> list[tuple[Any, float]]:
    """Each turn of the rollouts of a task, with the advantage of its rollout."""
    rewards = torch.tensor([float(each["reward"]) for each in rollouts])
    advantages = (rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-4)
    return [
        (turn, advantage)
        for each, advantage in zip(rollouts, advantages.tolist(), strict=True)
        for turn in fv.conversation_samples(each["messages"], tokenizer, tools=each.get("tools"))
    ]


def collate(tasks: list[list[tuple[Any, float]]]) -> dict[str, Any]:
    """The turns of whole tasks as a row of trees, and what the loss of each token counts."""
    turns, advantages = zip(*(pair for task in tasks for pair in task), strict=True)
    shared = fv.share_prefixes(turns)
    weights = torch.zeros(shared.layout.total_tokens)
    for turn, advantage, path in zip(turns, advantages, shared.paths, strict=True):
        learned = torch.tensor(turn["labels"][1:]) != -100
        weights[path[:-1][learned]] += advantage
    batch = {"input_ids": shared.input_ids, "packed_layout": shared.layout}
    weights /= shared.label_counts.sum()
    return batch | {"shift_labels": shared.shift_labels[0], "weights": weights}


class RolloutTrainer(Trainer):
    """GRPO's step on rollouts of the policy itself, whose probability ratios are 1."""

    def compute_loss(self, model: Any, inputs: dict[str, Any], *_: Any, **__: Any) -> torch.Tensor:
        labels, weights = inputs.pop("shift_labels"), inputs.pop("weights")
        logits = model(**inputs).logits[0].float()
        return (cross_entropy(logits, labels, reduction="none") * weights).sum()


def main(
    data: Annotated[Path | None, typer.Option(help="A JSON-lines file.")] = None,
    model: Annotated[str | None, typer.Option(help="A folder or a hub name.")] = None,
    reward_model: Annotated[str | None, typer.Option(help="A folder or a hub name.")] = None,
    steps: int = 10,
    prompts: Annotated[int, typer.Option(help="Prompts or tasks per rank and step.")] = 2,
    generations: Annotated[int, typer.Option(help="Completions of a prompt.")] = 4,
    max_new_tokens: Annotated[int, typer.Option(help="Longest completion, in tokens.")] = 64,
    beta: Annotated[float, typer.Option(help="Weight of the KL term.")] = 0.04,
    learning_rate: float = 1e-5,
    backend: str = "auto",
    padded: Annotated[bool, typer.Option("--padded", help="Keep the padding.")] = False,
    seed: int = 0,
    out: Path = Path("grpo"),
) -> None:
    """Train a causal language model on rewards of its own completions."""
    on_gpu = torch.cuda.is_available()
    torch.manual_seed(seed)
    name = model or save_small_model(out / "untrained")  # TRL loads the reference from there
    rows = sample_prompts()
    if data is not None:
        lines = data.read_text(encoding="utf-8").split("\n")
        rows = [json.loads(line) for line in lines if line.strip()]
    network = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(name)
    args = GRPOConfig(
        str(out),
        max_steps=steps,
        per_device_train_batch_size=prompts * generations,
        num_generations=generations,
        max_completion_length=max_new_tokens,
        beta=beta,
        learning_rate=learning_rate,
        logging_steps=max(steps // 10, 1),
        bf16=on_gpu,
        use_cpu=not on_gpu,
        save_strategy="no",
        report_to=[],
        seed=seed,
    )
    if "messages" in rows[0]:
        tasks = defaultdict(list)
        for row in rows:
            tasks[row["task"]].append(row)
        args.per_device_train_batch_size = prompts
        trainer = RolloutTrainer(
            fv.patch_model(network, backend),
            args,
            train_dataset=[turns_of(rollouts, tokenizer) for rollouts in tasks.values()],
            data_collator=collate,
            processing_class=tokenizer,
        )
    else:
        trainer = GRPOTrainer(
            network,
            reward_funcs=reward_model or distinct_words,
            args=args,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
        )
        if not padded:
            fv.patch_trainer(trainer, backend)
    trainer.train()
    trainer.save_model(str(out))
    trainer.accelerator.print(f"Trained model in {out}.")


if __name__ == "__main__":
    typer.run(main)
