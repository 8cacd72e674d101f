"""Train a causal language model on packed documents: `accelerate launch examples/train.py --help`.

One process or many, DDP or FSDP2: what accelerate was configured for. Documents are tokenized, put
together into rows of equal tokens (none is cut but those longer than a row), and rows of like cost
go to the ranks of a step. A run that was killed goes on with `--resume`, at the row it was at.

    accelerate launch examples/train.py --steps 100      # a small Llama, on Python's help topics
    accelerate launch examples/train.py --model Qwen/Qwen3-1.7B --data texts/ --tokens 16384
"""

from __future__ import annotations

import json
import time
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedTokenizerFast,
    get_cosine_schedule_with_warmup,
)

import flexvarlen as fv
from flexvarlen.equivalence.corpus import read_documents, train_tokenizer

SMALL = {
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
}
VOCABULARY = 8192


def tokenizer_and_model(name: str | None, texts: tuple[str, ...], dtype: torch.dtype) -> Any:
    """Those of a folder or the hub; without a name a Llama of 20M parameters, not trained yet."""
    if name is not None:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
        return AutoTokenizer.from_pretrained(name), model
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=train_tokenizer(texts, VOCABULARY))
    config = LlamaConfig(vocab_size=len(tokenizer), tie_word_embeddings=True, **SMALL)
    return tokenizer, AutoModelForCausalLM.from_config(config, dtype=dtype)


def packed_rows(tokenizer: Any, texts: tuple[str, ...], tokens: int) -> list[list[list[int]]]:
    """Rows of documents; a document longer than a row is cut into several."""
    ends = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    documents = [ids + ends for ids in tokenizer(list(texts), add_special_tokens=False).input_ids]
    documents = [ids for ids in documents if ids]
    pieces = fv.split_long([len(ids) for ids in documents], tokens)
    rows = fv.pack([piece.stop - piece.start for piece in pieces], tokens)
    return [
        [
            documents[piece.document][piece.start : piece.stop]
            for piece in map(pieces.__getitem__, row)
        ]
        for row in rows
    ]


class Progress:
    """Where a run is; accelerate saves it with the weights."""

    def __init__(self) -> None:
        self.step = self.epoch = self.batch = 0

    def state_dict(self) -> dict[str, int]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, int]) -> None:
        vars(self).update(state)


def main(
    data: Annotated[Path | None, typer.Option(help="A text file, or a folder of them.")] = None,
    model: Annotated[str | None, typer.Option(help="A folder or a hub name.")] = None,
    tokens: Annotated[int, typer.Option(help="Of a row.")] = 4096,
    steps: int = 200,
    accumulate: Annotated[int, typer.Option(help="Rows a rank and step.")] = 1,
    learning_rate: float = 3e-4,
    backend: str = "auto",
    compile: Annotated[bool, typer.Option("--compile")] = False,
    checkpointing: Annotated[bool, typer.Option("--checkpointing")] = False,
    save_every: int = 100,
    resume: Annotated[bool, typer.Option("--resume")] = False,
    seed: int = 0,
    out: Path = Path("trained"),
) -> None:
    """Train on packed documents."""
    accelerator = Accelerator()
    set_seed(seed)
    files = sorted(p for p in data.rglob("*") if p.is_file()) if data and data.is_dir() else [data]
    texts = read_documents([file for file in files if file is not None])
    on_gpu = accelerator.device.type == "cuda"
    dtype = torch.float32 if accelerator.mixed_precision != "no" or not on_gpu else torch.bfloat16
    tokenizer, network = tokenizer_and_model(model, texts, dtype)
    rows = packed_rows(tokenizer, texts, tokens)
    lengths = [[len(document) for document in row] for row in rows]

    fv.patch_model(network, backend)
    if checkpointing:
        network.gradient_checkpointing_enable({"use_reentrant": False})
    collate = fv.PackedCollator(
        total_tokens=tokens,
        capacity=max(map(len, lengths)),
        max_seqlen_bound=max(map(max, lengths)),
        pad_token_id=tokenizer.pad_token_id or 0,
    )
    sampler = fv.BalancedSampler(lengths, num_replicas=accelerator.num_processes, seed=seed)
    loader = DataLoader(rows, sampler=sampler, collate_fn=collate, pin_memory=on_gpu)
    optimizer = torch.optim.AdamW(
        network.parameters(), learning_rate, betas=(0.9, 0.95), fused=on_gpu
    )
    schedule = get_cosine_schedule_with_warmup(optimizer, steps // 20, steps)
    network, optimizer, loader = accelerator.prepare(network, optimizer, loader)
    called = torch.compile(network) if compile else network
    progress = Progress()
    accelerator.register_for_checkpointing(progress, schedule)
    if resume:
        accelerator.load_state(str(out / "checkpoint"))
    accelerator.print(
        f"{sum(map(sum, lengths)):,} tokens in {len(rows)} rows of {tokens:,}, "
        f"{sum(map(sum, lengths)) / len(rows) / tokens:.1%} full; a step waits "
        f"{sampler.imbalance() - 1:.1%} for its slowest rank's attention; {steps} steps"
    )

    network.train()
    while progress.step < steps:
        sampler.set_epoch(progress.epoch)
        batches = iter(accelerator.skip_first_batches(loader, progress.batch))
        while progress.step < steps and (group := list(islice(batches, accumulate))):
            begin = time.perf_counter()
            # Averaged over the tokens that are predicted, of all rows and ranks alike.
            here = torch.stack([(batch["labels"] != -100).sum() for batch in group]).sum()
            count = accelerator.reduce(here, "sum")
            loss = torch.zeros((), device=accelerator.device)
            for index, batch in enumerate(group):
                last = index == len(group) - 1
                with nullcontext() if last else accelerator.no_sync(network):
                    part = called(**batch, num_items_in_batch=count).loss
                    accelerator.backward(part * accelerator.num_processes)  # DDP takes the mean
                loss += part.detach()
            accelerator.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            progress.step += 1
            progress.batch += len(group)
            write(accelerator, out, progress.step, loss, here, time.perf_counter() - begin)
            if progress.step % save_every == 0 or progress.step == steps:
                accelerator.save_state(str(out / "checkpoint"))
        if progress.step < steps:
            progress.epoch, progress.batch = progress.epoch + 1, 0
    accelerator.unwrap_model(network).save_pretrained(
        out,
        is_main_process=accelerator.is_main_process,
        state_dict=accelerator.get_state_dict(network),
        save_function=accelerator.save,
    )
    if accelerator.is_main_process:
        tokenizer.save_pretrained(out)
    accelerator.print(f"Trained model in {out}: AutoModelForCausalLM.from_pretrained({str(out)!r})")
    accelerator.end_training()


def write(
    accelerator: Accelerator, out: Path, step: int, loss: Tensor, tokens: Tensor, seconds: float
) -> None:
    """A line of out/log.jsonl: the loss over all ranks, and their tokens that were predicted."""
    loss, tokens = accelerator.reduce(torch.stack([loss, tokens.to(loss)]), "sum").tolist()
    line = {"step": step, "loss": loss, "tokens": int(tokens), "tokens_per_s": tokens / seconds}
    if accelerator.is_main_process:
        out.mkdir(parents=True, exist_ok=True)
        with (out / "log.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        if step % 10 == 0 or step == 1:
            print(f"step {step}: loss {loss:.4f}, {line['tokens_per_s']:,.0f} tokens/s", flush=True)


if __name__ == "__main__":
    typer.run(main)
