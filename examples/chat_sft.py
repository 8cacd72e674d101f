"""Train a chat model on packed rows, with LoRA: `accelerate launch examples/chat_sft.py --help`.

Each line of `--data` is a JSON object with `messages`; only the assistant's answers are trained on.
Every tenth chat is held out. What is saved needs no flexvarlen: `generate.py` lets it answer.

    accelerate launch examples/chat_sft.py --model Qwen/Qwen3-8B --data chats.jsonl --qlora
"""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import transformers
import typer
from peft import LoraConfig, get_peft_model
from torch.nn.functional import cross_entropy

import flexvarlen as fv


def read_chats(data: Path, tokenizer: Any) -> list[list[dict[str, list[int]]]]:
    """The documents of each chat of a JSON-lines file: tokens, and masks of the answers."""
    chats = []
    for number, line in enumerate(data.read_text(encoding="utf-8").split("\n"), 1):
        try:
            if line.strip():
                chat = json.loads(line)
                chats.append(fv.tokenize_chat(chat["messages"], tokenizer, tools=chat.get("tools")))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise typer.BadParameter(
                f"cannot train on line {number} of {data}: {error!r}"
            ) from error
    if len(chats) < 2:
        raise typer.BadParameter(f"{data} needs two chats, as one is held out, got {len(chats)}.")
    return chats


def load_model(name: str, lora: int, qlora: bool) -> Any:
    """A model with an adapter, over weights of 4 bits with `qlora`; without, if `lora` is 0."""
    on_gpu = torch.cuda.is_available()  # on a CPU, evaluating takes 4-bit weights' gradients away
    if qlora and not (lora and on_gpu and find_spec("bitsandbytes")):
        raise typer.BadParameter("--qlora needs a GPU, --lora, and: pip install bitsandbytes")
    dtype = torch.bfloat16 if lora and on_gpu else torch.float32  # trained weights stay fp32
    four = dict(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    options = {"quantization_config": transformers.BitsAndBytesConfig(**four)} if qlora else {}
    model = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=dtype, **options)
    adapter = LoraConfig(r=lora, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, adapter) if lora else model


def sum_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """`[1, 2]`: of a packed row; Trainer's own eval_loss is a mean of the rows' means."""
    losses = cross_entropy(logits[0, :-1].float(), labels[0, 1:], reduction="sum")
    return torch.stack([losses, (labels[0, 1:] != -100).sum()])[None]


def main(
    model: Annotated[str, typer.Option(help="A folder or a hub name.")],
    data: Annotated[Path, typer.Option(help="A JSON-lines file.")],
    lora: Annotated[int, typer.Option(help="Rank of LoRA; 0 trains all weights.")] = 16,
    qlora: Annotated[bool, typer.Option("--qlora", help="LoRA on 4-bit weights.")] = False,
    tokens: Annotated[int, typer.Option(help="Of a row; a longer chat is cut off.")] = 4096,
    rows: Annotated[int, typer.Option(help="Rows per rank and step.")] = 1,
    checkpointing: Annotated[bool, typer.Option("--checkpointing")] = False,
    epochs: float = 1,
    learning_rate: Annotated[float, typer.Option(help="About 1e-5 with --lora 0.")] = 2e-4,
    chat_template: Annotated[Path | None, typer.Option(help="A file; else the model's.")] = None,
    out: Path = Path("chat"),
) -> None:
    """Train on the answers of chats."""
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
        label_names=["labels"],  # Trainer finds none in a model of PEFT
        save_strategy="no",
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    if chat_template:
        tokenizer.chat_template = chat_template.read_text(encoding="utf-8")
    if not tokenizer.chat_template:
        raise typer.BadParameter("the model has no chat template; pass one: --chat-template")
    chats = read_chats(data, tokenizer)
    held_out = [document for chat in chats[::10] for document in chat]
    trained = [document for i, chat in enumerate(chats) if i % 10 for document in chat]
    train, test = (fv.PackedDataset(x, tokens, long="truncate") for x in (trained, held_out))
    network = load_model(model, lora, qlora)
    if checkpointing:
        network.gradient_checkpointing_enable({"use_reentrant": False})
    trainer = transformers.Trainer(
        fv.patch_model(network),
        arguments,
        train_dataset=train,
        eval_dataset=test,
        data_collator=fv.PackedCollator(tokenizer),
        processing_class=tokenizer,
        callbacks=[fv.IsolationCallback()],
        preprocess_logits_for_metrics=sum_losses,
        compute_metrics=lambda found: {"loss_per_token": np.divide(*found.predictions.sum(0))},
    )
    trainer.accelerator.print(f"Documents cut: {train.num_long}; left out: {train.num_dropped}.")
    before = trainer.evaluate()["eval_loss_per_token"]
    trainer.train()
    after = trainer.evaluate()["eval_loss_per_token"]
    trainer.save_model(str(out))  # with LoRA the adapter alone; and the tokenizer
    trainer.accelerator.print(f"Held-out loss per token: {before:.4f}, then {after:.4f}. In {out}.")


if __name__ == "__main__":
    typer.run(main)
