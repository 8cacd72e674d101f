"""Train a model of text and images on packed chats, with LoRA; `--help` lists the options.

Each line of `--data` is a JSON object with `messages`; the `content` of a message is a string or a
list of `{"type": "text", "text": ...}` and `{"type": "image", "path": ...}`. Only the assistant's
answers are trained on. Every tenth chat is held out.

    accelerate launch examples/image_chat_sft.py --model Qwen/Qwen3-VL-4B-Instruct --data x.jsonl
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from peft import LoraConfig, get_peft_model

import flexvarlen as fv


class Documents(Sequence[dict[str, Any]]):
    """The documents of chats; images are processed each time that a document is read."""

    def __init__(self, chats: list[dict[str, Any]], processor: Any) -> None:
        self.chats, self.processor = chats, processor
        counts = [len(self.of(chat)) for chat in chats]
        self.documents = [(i, k) for i, count in enumerate(counts) for k in range(count)]

    def of(self, chat: dict[str, Any]) -> list[dict[str, Any]]:
        """All documents of a chat: several where the template rewrites earlier answers."""
        return fv.tokenize_chat(chat["messages"], self.processor, tools=chat.get("tools"))

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: Any) -> Any:
        chat, number = self.documents[index]
        return self.of(self.chats[chat])[number]


def read_chats(data: Path) -> list[dict[str, Any]]:
    """The chats of a JSON-lines file."""
    lines = data.read_text(encoding="utf-8").split("\n")
    chats = [json.loads(line) for line in lines if line.strip()]
    if len(chats) < 2:
        raise typer.BadParameter(f"{data} needs two chats, as one is held out, got {len(chats)}.")
    return chats


def load_model(name: str, lora: int) -> Any:
    """A model with an adapter on the linear layers of its text model."""
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    model = transformers.AutoModelForImageTextToText.from_pretrained(name, dtype=dtype)
    adapter = LoraConfig(
        r=lora,
        target_modules="all-linear",
        exclude_modules=r".*(vision|visual|projector|merger).*",
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, adapter)


def main(
    model: Annotated[str, typer.Option(help="A folder or a hub name.")],
    data: Annotated[Path, typer.Option(help="A JSON-lines file.")],
    lora: Annotated[int, typer.Option(help="Rank of LoRA.")] = 16,
    tokens: Annotated[int, typer.Option(help="Tokens per row; longer chats are dropped.")] = 8192,
    patches: Annotated[int | None, typer.Option(help="Image patches per row, at most.")] = None,
    rows: Annotated[int, typer.Option(help="Rows per rank and step.")] = 1,
    workers: Annotated[int, typer.Option(help="Processes that read images.")] = 0,
    checkpointing: Annotated[bool, typer.Option("--checkpointing")] = False,
    epochs: float = 1,
    learning_rate: float = 2e-4,
    out: Path = Path("image_chat"),
) -> None:
    """Train on the answers of chats with images."""
    if not data.is_file():
        raise typer.BadParameter(f"--data must be a file, got {data}")
    arguments = transformers.TrainingArguments(
        str(out),
        per_device_train_batch_size=1,  # a packed row
        per_device_eval_batch_size=1,
        gradient_accumulation_steps=rows,
        num_train_epochs=epochs,
        learning_rate=learning_rate,
        logging_steps=10,
        bf16=torch.cuda.is_available(),
        dataloader_num_workers=workers,
        label_names=["labels"],  # Trainer finds none in a model of PEFT
        prediction_loss_only=True,
        save_strategy="no",
    )
    processor = transformers.AutoProcessor.from_pretrained(model)
    chats = read_chats(data)
    held_out, trained = chats[::10], [chat for i, chat in enumerate(chats) if i % 10]
    train, test = (
        fv.PackedDataset(Documents(x, processor), tokens, long="drop", max_patches=patches)
        for x in (trained, held_out)
    )
    network = load_model(model, lora)
    if checkpointing:
        network.gradient_checkpointing_enable({"use_reentrant": False})
    trainer = transformers.Trainer(
        fv.patch_model(network),
        arguments,
        train_dataset=train,
        eval_dataset=test,
        data_collator=fv.PackedCollator(processor, model=network),
        processing_class=processor,
        callbacks=[fv.IsolationCallback()],
    )
    trainer.accelerator.print(f"Documents longer than a row, left out: {train.num_long}.")
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    trainer.save_model(str(out))  # the adapter and the processor
    trainer.accelerator.print(f"Mean loss of held-out rows: {before:.4f}, then {after:.4f}.")


if __name__ == "__main__":
    typer.run(main)
