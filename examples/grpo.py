"""Reinforcement learning with GRPO on packed rows: `accelerate launch examples/grpo.py --help`.

TRL pads prompts on the left and completions on the right. After `fv.patch_trainer` the policy, the
reference model (`--beta` above 0) and the reward model score the real tokens as one packed row;
sampling is transformers' own, with its cache. Each line of `--data` is a JSON object with the text
"prompt". The reward is the share of distinct words, or a model's score, as from `reward.py`.

    accelerate launch examples/grpo.py               # a small Qwen3, on Python's help topics
    accelerate launch examples/grpo.py --model ./my-model --data prompts.jsonl --reward-model reward
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config
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


def main(
    data: Annotated[Path | None, typer.Option(help="A JSON-lines file.")] = None,
    model: Annotated[str | None, typer.Option(help="A folder or a hub name.")] = None,
    reward_model: Annotated[str | None, typer.Option(help="A folder or a hub name.")] = None,
    steps: int = 10,
    prompts: Annotated[int, typer.Option(help="Prompts per rank and step.")] = 2,
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
    rows = sample_prompts() if data is None else Dataset.from_json(str(data)).to_list()
    trainer = GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32),
        reward_funcs=reward_model or distinct_words,
        args=GRPOConfig(
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
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(name),
    )
    if not padded:
        fv.patch_trainer(trainer, backend)
    trainer.train()
    trainer.save_model(str(out))
    trainer.accelerator.print(f"Trained model in {out}.")


if __name__ == "__main__":
    typer.run(main)
