"""Train an embedding model on packed rows: `accelerate launch examples/embeddings.py --help`.

sentence-transformers pads each batch of texts. After `fv.patch_model(..., unpad=True)` its
transformer runs the real tokens as one packed row; losses and gradients are those of the padded
run. Each line of `--data` is a JSON object with the texts "anchor" and "positive"; all or none have
a "negative". Every tenth is held out. What is saved loads without flexvarlen.

    accelerate launch examples/embeddings.py --model answerdotai/ModernBERT-base --data pairs.jsonl
"""

from pathlib import Path
from typing import Annotated

import torch
import typer
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

import flexvarlen as fv


def read_pairs(data: Path) -> Dataset:
    """Texts that belong together, in the order in which the loss takes them."""
    lines = data.read_text(encoding="utf-8").split("\n")
    if (count := sum(map(bool, map(str.strip, lines)))) < 2:
        raise typer.BadParameter(f"{data} needs two pairs, as one is held out, got {count}.")
    pairs = Dataset.from_json(str(data))
    names = [name for name in ("anchor", "positive", "negative") if name in pairs.column_names]
    if names[:2] != ["anchor", "positive"]:
        raise typer.BadParameter(
            f"data must hold 'anchor' and 'positive', got {pairs.column_names}; rename the fields."
        )
    for name in names:
        if None in (texts := pairs[name][:]):
            raise typer.BadParameter(
                f"each object must hold {name!r}, got none in object "
                f"{texts.index(None) + 1} of {data}; add the text."
            )
    return pairs.select_columns(names)


def share_found(model: SentenceTransformer, pairs: Dataset, batch: int) -> float:
    """The share of anchors that are nearer to their own positive than to any other."""
    anchors, positives = (
        model.encode(pairs[name][:], batch_size=batch, convert_to_tensor=True)
        for name in ("anchor", "positive")
    )
    nearest = model.similarity(anchors, positives).argmax(1)
    return (nearest.cpu() == torch.arange(len(pairs))).float().mean().item()


def main(
    model: Annotated[str, typer.Option(help="A folder or a hub name.")],
    data: Annotated[Path, typer.Option(help="A JSON-lines file.")],
    batch: Annotated[int, typer.Option(help="Pairs per rank and step; more teach more.")] = 128,
    max_length: Annotated[int, typer.Option(help="Tokens of a text.")] = 512,
    epochs: float = 1,
    learning_rate: float = 5e-5,
    backend: str = "auto",
    padded: Annotated[bool, typer.Option("--padded", help="Keep the padding.")] = False,
    out: Path = Path("embeddings"),
) -> None:
    """Train a model whose vectors of texts that belong together are close."""
    encoder = SentenceTransformer(model)
    encoder.max_seq_length = min(max_length, encoder.max_seq_length or max_length)
    if not padded:
        fv.patch_model(encoder[0].auto_model, backend, unpad=True)
    pairs = read_pairs(data)
    held_out = pairs.select(range(0, len(pairs), 10))
    arguments = SentenceTransformerTrainingArguments(
        str(out),
        per_device_train_batch_size=batch,
        num_train_epochs=epochs,
        learning_rate=learning_rate,
        warmup_steps=0.1,
        batch_sampler="no_duplicates",  # a text is no negative of itself
        logging_steps=10,
        bf16=torch.cuda.is_available(),
        save_strategy="no",
    )
    trainer = SentenceTransformerTrainer(
        encoder,
        arguments,
        train_dataset=pairs.select([i for i in range(len(pairs)) if i % 10]),
        loss=MultipleNegativesRankingLoss(encoder),
    )
    before = share_found(encoder, held_out, batch)
    trainer.train()
    after = share_found(encoder, held_out, batch)
    trainer.save_model(str(out))
    trainer.accelerator.print(
        f"Of {len(held_out)} held-out anchors {before:.0%} found their positive, then {after:.0%}. "
        f"Model in {out}: SentenceTransformer({str(out)!r})"
    )


if __name__ == "__main__":
    typer.run(main)
