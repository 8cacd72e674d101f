"""Train a reward model on packed rows: `accelerate launch examples/reward.py --help`.

TRL's RewardTrainer pads each batch of answers; after `fv.patch_trainer` the model runs the real
tokens as one packed row, with the losses and gradients of the padded run. Afterwards the held-out
answers are scored from packed batches: a patched classifier returns a score per document. Each
line of `--data` is a JSON object with the texts "prompt", "chosen" and "rejected".

    accelerate launch examples/reward.py             # a small Qwen3, on Python's help topics
    accelerate launch examples/reward.py --model ./my-model --data pairs.jsonl
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from datasets import Dataset
from trl import RewardConfig, RewardTrainer

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
        chosen, rejected = (" " + " ".join(x) for x in (answer, rng.sample(answer, len(answer))))
        pairs.append({"prompt": " ".join(words[:8]), "chosen": chosen, "rejected": rejected})
    return pairs


def tokenizer_and_model(name: str | None) -> Any:
    """From a folder or the hub; without a name an untrained Qwen3 of 6M parameters."""
    models = transformers.AutoModelForSequenceClassification
    if name is not None:
        model = models.from_pretrained(name, num_labels=1, dtype=torch.float32)
        return transformers.AutoTokenizer.from_pretrained(name), model
    words = train_tokenizer(read_documents(), 8192)
    special = {"eos_token": "<end>", "pad_token": "<pad>"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special)
    config = transformers.Qwen3Config(vocab_size=len(tokenizer), num_labels=1, **SMALL, **HEADS)
    return tokenizer, models.from_config(config)


@torch.no_grad()
def scores(model: Any, documents: list[list[int]], tokens_per_row: int) -> torch.Tensor:
    """`[num_docs]`: the score of each document, from packed rows of limited size."""
    result = torch.empty(len(documents))
    collate = fv.PackedCollator(pad_token_id=model.config.pad_token_id)
    for indices in fv.pack([len(ids) for ids in documents], tokens_per_row):
        batch = collate([documents[index] for index in indices])
        layout = batch["packed_layout"].to(model.device)
        logits = model(batch["input_ids"].to(model.device), packed_layout=layout).logits
        result[indices] = logits[:, 0].float().cpu()  # [documents of the row, 1]
    return result


def main(
    data: Annotated[Path | None, typer.Option(help="A JSON-lines file.")] = None,
    model: Annotated[str | None, typer.Option(help="A folder or a hub name.")] = None,
    steps: int = 20,
    batch: Annotated[int, typer.Option(help="Pairs per rank and step.")] = 8,
    max_length: Annotated[int, typer.Option(help="Tokens of a prompt and its answer.")] = 1024,
    learning_rate: float = 1e-4,
    backend: str = "auto",
    padded: Annotated[bool, typer.Option("--padded", help="Keep the padding.")] = False,
    seed: int = 0,
    out: Path = Path("reward"),
) -> None:
    """Train a model that scores answers."""
    on_gpu = torch.cuda.is_available()
    torch.manual_seed(seed)
    tokenizer, scorer = tokenizer_and_model(model)
    pairs = sample_pairs() if data is None else Dataset.from_json(str(data)).to_list()
    held_out = pairs[: max(len(pairs) // 8, 1)]
    trainer = RewardTrainer(
        scorer,
        args=RewardConfig(
            str(out),
            max_steps=steps,
            per_device_train_batch_size=batch,
            max_length=max_length,
            learning_rate=learning_rate,
            logging_steps=max(steps // 10, 1),
            bf16=on_gpu,
            use_cpu=not on_gpu,
            save_strategy="no",
            report_to=[],
            seed=seed,
        ),
        train_dataset=Dataset.from_list(pairs[len(held_out) :]),
        processing_class=tokenizer,
    )
    if not padded:
        fv.patch_trainer(trainer, backend)
    trainer.train()
    trainer.save_model(str(out))
    if not padded:
        names, end = ("chosen", "rejected"), tokenizer.eos_token
        texts = [pair["prompt"] + pair[name] + end for name in names for pair in held_out]
        documents = [ids[:max_length] for ids in tokenizer(texts).input_ids]
        chosen, rejected = scores(scorer.eval(), documents, max(4096, max_length)).chunk(2)
        share = (chosen > rejected).float().mean().item()
        trainer.accelerator.print(f"Orders {share:.0%} of {len(held_out)} held-out pairs rightly.")
    trainer.accelerator.print(f"Trained model in {out}.")


if __name__ == "__main__":
    typer.run(main)
