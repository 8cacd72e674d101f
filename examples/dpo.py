"""Learn preferences with DPO on packed rows: `accelerate launch examples/dpo.py --help`.

TRL pads each batch of chosen and rejected answers to its longest. `fv.patch_trainer` makes the
policy and the reference model run the real tokens as one packed row; losses and gradients are those
of the padded run. Each line of `--data` is a JSON object with the texts "prompt", "chosen" and
"rejected". With `--lora` the model without its adapter is the reference.

    accelerate launch examples/dpo.py                # a small Qwen3, on Python's help topics
    accelerate launch examples/dpo.py --padded       # as TRL runs it: the same losses
    accelerate launch examples/dpo.py --model ./my-model --data pairs.jsonl --lora 16
"""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config
from trl import DPOConfig, DPOTrainer

import flexvarlen as fv
from flexvarlen.verify.corpus import read_documents, train_tokenizer

SMALL = dict(hidden_size=256, intermediate_size=768, num_hidden_layers=4, head_dim=64)
HEADS = dict(num_attention_heads=4, num_key_value_heads=2)


def sample_pairs(count: int = 512) -> list[dict[str, str]]:
    """Preferences of very different lengths: a text over the same words in another order."""
    rng, topics, pairs = random.Random(0), read_documents(), []
    for _ in range(count):
        words = rng.choice(topics).split()
        answer = words[8 : 8 + int(2 ** rng.uniform(3, 8))]
        mixed = rng.sample(answer, len(answer))
        chosen, rejected = (" " + " ".join(each) for each in (answer, mixed))
        pairs.append({"prompt": " ".join(words[:8]), "chosen": chosen, "rejected": rejected})
    return pairs


def tokenizer_and_model(name: str | None, dtype: torch.dtype) -> Any:
    """From a folder or the hub; without a name an untrained Qwen3 of 6M parameters."""
    if name is not None:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
        return AutoTokenizer.from_pretrained(name), model
    words = train_tokenizer(read_documents(), 8192)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<end>", pad_token="<pad>"
    )
    config = Qwen3Config(vocab_size=len(tokenizer), tie_word_embeddings=True, **SMALL, **HEADS)
    return tokenizer, AutoModelForCausalLM.from_config(config, dtype=dtype)


def main(
    data: Annotated[Path | None, typer.Option(help="A JSON-lines file.")] = None,
    model: Annotated[str | None, typer.Option(help="A folder or a hub name.")] = None,
    lora: Annotated[int, typer.Option(help="Rank of LoRA; 0 trains all weights.")] = 0,
    steps: int = 20,
    batch: Annotated[int, typer.Option(help="Pairs per rank and step.")] = 8,
    max_length: Annotated[int, typer.Option(help="Tokens of a prompt and its answer.")] = 1024,
    beta: float = 0.1,
    learning_rate: float = 1e-5,
    backend: str = "auto",
    padded: Annotated[bool, typer.Option("--padded", help="Keep the padding.")] = False,
    seed: int = 0,
    out: Path = Path("dpo"),
) -> None:
    """Train a causal language model on preferences."""
    on_gpu = torch.cuda.is_available()
    torch.manual_seed(seed)
    # frozen weights may be bf16; trained weights stay fp32
    dtype = torch.bfloat16 if lora and on_gpu else torch.float32
    tokenizer, policy = tokenizer_and_model(model, dtype)
    pairs = sample_pairs() if data is None else Dataset.from_json(str(data)).to_list()
    trainer = DPOTrainer(
        policy,
        ref_model=None if lora else copy.deepcopy(policy),
        args=DPOConfig(
            str(out),
            max_steps=steps,
            per_device_train_batch_size=batch,
            max_length=max_length,
            beta=beta,
            learning_rate=learning_rate,
            logging_steps=max(steps // 10, 1),
            bf16=on_gpu,
            use_cpu=not on_gpu,
            save_strategy="no",
            report_to=[],
            seed=seed,
        ),
        train_dataset=Dataset.from_list(pairs),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=lora, target_modules="all-linear") if lora else None,
    )
    if not padded:
        fv.patch_trainer(trainer, backend)
    trainer.train()
    trainer.save_model(str(out))  # with --lora, only the adapter
    trainer.accelerator.print(f"Trained model in {out}.")


if __name__ == "__main__":
    typer.run(main)
