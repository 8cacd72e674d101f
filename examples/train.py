"""Train a causal language model on packed documents: `accelerate launch examples/train.py --help`.

One process or many, DDP or FSDP2: whatever accelerate was configured for. Documents are tokenized
and packed into rows of equal length (only those longer than a row are cut), and the ranks of a step
get rows of similar cost; with `--context-parallel` several ranks share a row. Each document is seen
once an epoch: ranks without a row in its last step get a row of padding, without loss. A run that
was killed continues with `--resume` at the same row; `--out` is a folder that all machines share.
Weights are in fp32; on CUDA the forward is in bf16, unless accelerate or `--precision` says
otherwise.

    accelerate launch examples/train.py --steps 100      # a small Llama, on Python's help topics
    accelerate launch examples/train.py --model Qwen/Qwen3-1.7B --data texts/ --tokens 16384
    accelerate launch examples/train.py --model Qwen/Qwen3-1.7B --data chats.jsonl
    accelerate launch examples/train.py --model ./my-model --data books/ --tokens 262144 \
        --context-parallel 2 --offload --loss-chunk-tokens 4096
"""

from __future__ import annotations

import json
import os
import shutil
import time
import zlib
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import gather_object, parse_flag_from_env, set_seed
from torch.distributed import new_subgroups
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast
from transformers.optimization import get_cosine_schedule_with_warmup

import flexvarlen as fv
from flexvarlen.verify.corpus import read_documents, train_tokenizer

DATA = (
    "A file, or a folder of them: text, or .jsonl, an object a line with text or messages (in the "
    "tokenizer's chat template, else their contents joined by newlines)."
)
SMALL = dict(hidden_size=384, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=6)


def read_texts(files: list[Path], tokenizer: Any) -> tuple[str, ...]:
    """Documents: of plain text, and of JSON lines with `text` or `messages`."""
    try:
        return read_documents(files, tokenizer)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def tokenizer_model_texts(name: str | None, files: list[Path]) -> Any:
    """From a folder or the hub; without a name an untrained Llama of 20M parameters."""
    if name is not None:
        tokenizer = AutoTokenizer.from_pretrained(name)
        texts = read_texts(files, tokenizer)
        return tokenizer, AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32), texts
    texts = read_texts(files, None)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=train_tokenizer(texts, 8192))
    config = LlamaConfig(vocab_size=len(tokenizer), tie_word_embeddings=True, **SMALL)
    return tokenizer, AutoModelForCausalLM.from_config(config, dtype=torch.float32), texts


def packed_rows(tokenizer: Any, texts: tuple[str, ...], tokens: int) -> list[list[list[int]]]:
    """Rows of documents; a document longer than a row is cut into several."""
    ends = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    documents = [ids + ends for ids in tokenizer(list(texts), add_special_tokens=False).input_ids]
    documents = [ids for ids in documents if ids]
    pieces = fv.split_long([len(ids) for ids in documents], tokens)
    rows = fv.pack([piece.tokens for piece in pieces], tokens)
    cut = [documents[piece.document][piece.start : piece.stop] for piece in pieces]
    return [[cut[index] for index in row] for row in rows]


def find_checkpoint(
    out: Path, settings: dict[str, int], resume: bool
) -> tuple[Path | None, dict[str, int]]:
    """The newest checkpoint of this run and its progress; None and step 0 in a fresh run."""
    found = sorted(out.glob("checkpoint-[0-9]*"), key=lambda path: int(path.name.split("-")[1]))
    if found and not resume:
        raise typer.BadParameter(f"out must hold no checkpoint, got {found[-1]}; pass --resume.")
    if resume and not found:
        raise typer.BadParameter(f"out must hold a checkpoint, got {out}; leave out --resume.")
    if not resume:
        return None, {"step": 0, "epoch": 0, "batch": 0, **settings}
    progress = json.loads((found[-1] / "progress.json").read_text())
    if (saved := {name: progress.get(name) for name in settings}) != settings:
        raise typer.BadParameter(
            f"settings must be the checkpoint's, {saved}, got {settings}; use them, or another "
            "--out."
        )
    return found[-1], progress


def save(accelerator: Accelerator, out: Path, progress: dict[str, int]) -> None:
    """Replace the checkpoint; a kill at any moment leaves a whole one."""
    older, partial = list(out.glob("checkpoint-[0-9]*")), out / "partial"
    if accelerator.is_main_process and partial.exists():
        shutil.rmtree(partial)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(partial))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        (partial / "progress.json").write_text(json.dumps(progress))
        partial.rename(out / f"checkpoint-{progress['step']}")
        for path in older:
            shutil.rmtree(path)


def main(
    data: Annotated[Path | None, typer.Option(help=DATA)] = None,
    model: Annotated[str | None, typer.Option(help="A folder or a hub name.")] = None,
    tokens: Annotated[int, typer.Option(help="Tokens in a row.")] = 4096,
    steps: int = 200,
    accumulate: Annotated[int, typer.Option(help="Rows per rank and step.")] = 1,
    context_parallel: Annotated[int, typer.Option(min=1, help="Ranks that share a row.")] = 1,
    learning_rate: float = 3e-4,
    backend: str = "auto",
    compile: Annotated[bool, typer.Option("--compile")] = False,
    checkpointing: Annotated[bool, typer.Option("--checkpointing")] = False,
    offload: Annotated[
        bool,
        typer.Option(
            "--offload", help="Checkpoint layers, and keep what they save in host memory."
        ),
    ] = False,
    loss_chunk_tokens: Annotated[
        int | None, typer.Option(help="Tokens whose logits exist at once.")
    ] = None,
    mlp_chunk_tokens: Annotated[
        int | None, typer.Option(help="Tokens that an MLP runs on at once.")
    ] = None,
    precision: Annotated[str | None, typer.Option(help="no, bf16, fp16.")] = None,
    save_every: int = 100,
    resume: Annotated[bool, typer.Option("--resume")] = False,
    seed: int = 0,
    out: Path = Path("trained"),
) -> None:
    """Train on packed documents."""
    on_gpu = torch.cuda.is_available() and not parse_flag_from_env("ACCELERATE_USE_CPU")
    if not precision and on_gpu and os.environ.get("ACCELERATE_MIXED_PRECISION", "no") == "no":
        precision = "bf16"
    accelerator = Accelerator(mixed_precision=precision)  # None: as accelerate was configured
    set_seed(seed)
    files = sorted(p for p in (data, *data.rglob("*")) if p.is_file()) if data else []
    if data and not files:
        raise typer.BadParameter(f"data must be or hold a file, got {data}; check the path.")
    tokenizer, network, texts = tokenizer_model_texts(model, files)
    rows = packed_rows(tokenizer, texts, tokens)
    ranks, pad = accelerator.num_processes, tokenizer.pad_token_id or 0
    groups, group_index = ranks // context_parallel, accelerator.process_index // context_parallel
    if groups * context_parallel != ranks or tokens % context_parallel:
        raise typer.BadParameter(
            f"context_parallel must divide the {ranks} processes and the {tokens} tokens of a row, "
            f"got {context_parallel}; pass a common divisor, or start more processes."
        )
    settings = {
        "processes": ranks,
        "context_parallel": context_parallel,
        "tokens": tokens,
        "accumulate": accumulate,
        "seed": seed,
        "rows": len(rows),
        "rows_crc32": zlib.crc32(json.dumps(rows).encode()),
    }
    if len({*gather_object([settings["rows_crc32"]])}) > 1:
        raise typer.BadParameter("data and model must be the same files for all processes.")
    checkpoint, progress = find_checkpoint(out, settings, resume)
    rows += [[[pad]]] * (-len(rows) % groups)  # a single token has no label
    lengths = [[len(document) for document in row] for row in rows]

    sharing = new_subgroups(context_parallel)[0] if context_parallel > 1 else None
    fv.patch_model(
        network,
        backend,
        sequence_parallel_group=sharing,
        loss_chunk_tokens=loss_chunk_tokens,
        mlp_chunk_tokens=mlp_chunk_tokens,
    )
    if checkpointing or offload:
        network.gradient_checkpointing_enable({"use_reentrant": False}, offload=offload)
    collate_row = fv.PackedCollator(
        total_tokens=tokens,
        capacity=max(map(len, lengths)),
        max_seqlen_bound=max(map(max, lengths)),
        pad_token_id=pad,
    )
    options, rank = fv.shard_options(network), accelerator.process_index % context_parallel

    def collate(documents: Any) -> dict[str, Any]:
        row = collate_row(documents)
        return fv.shard_batch(row, rank, context_parallel, **options) if sharing else row

    cost = fv.row_cost(network, padded=True)
    sampler = fv.BalancedSampler(lengths, num_replicas=groups, cost=cost, seed=seed)
    loader = DataLoader(rows, sampler=sampler, collate_fn=collate, pin_memory=on_gpu)
    weights = network.parameters()
    optimizer = torch.optim.AdamW(weights, learning_rate, betas=(0.9, 0.95), fused=on_gpu)
    schedule = get_cosine_schedule_with_warmup(optimizer, steps // 20, steps)
    network, optimizer = accelerator.prepare(network, optimizer)
    loader = prepare_data_loader(
        loader, accelerator.device, groups, group_index, put_on_device=True, non_blocking=on_gpu
    )
    compiled = torch.compile(network) if compile else network
    accelerator.register_for_checkpointing(schedule)
    if checkpoint:
        accelerator.load_state(str(checkpoint))
    if accelerator.is_main_process:
        (file := out / "log.jsonl").parent.mkdir(parents=True, exist_ok=True)
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        file.write_text("".join(x for x in lines if json.loads(x)["step"] <= progress["step"]))
    accelerator.print(
        f"{len(rows)} rows, {sum(map(sum, lengths)) / len(rows) / tokens:.1%} full; a step waits "
        f"{sampler.imbalance() - 1:.1%} for its slowest rank; {steps} steps"
    )

    network.train()
    begin = time.perf_counter()
    while progress["step"] < steps:
        loader.set_epoch(progress["epoch"])
        batches = iter(accelerator.skip_first_batches(loader, progress["batch"]))
        while progress["step"] < steps and (of_step := list(islice(batches, accumulate))):
            sums = backward(accelerator, network, compiled, of_step)
            accelerator.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            progress["step"] += 1
            progress["batch"] += len(of_step)
            begin = log(accelerator, out, progress["step"], sums, begin)
            if progress["step"] % save_every == 0 or progress["step"] == steps:
                save(accelerator, out, progress)
                begin = time.perf_counter()
        progress["epoch"], progress["batch"] = progress["epoch"] + 1, 0
    save_model(accelerator, network, tokenizer, out)
    accelerator.end_training()


def backward(
    accelerator: Accelerator, network: Any, compiled: Any, batches: list[Any]
) -> torch.Tensor:
    """Gradients of the mean over the predicted tokens of all rows and ranks.

    Args:
        network: the wrapped model.
        compiled: the same, perhaps compiled.
        batches: this rank's of the step.

    Returns:
        This rank's part of the loss, and its number of predicted tokens, `[2]`.
    """
    num_labels = torch.stack([(batch["labels"] != -100).sum() for batch in batches]).sum()
    count = accelerator.reduce(num_labels, "sum")
    loss = torch.zeros((), device=accelerator.device)
    for batch in batches:
        with nullcontext() if batch is batches[-1] else accelerator.no_sync(network):
            part = compiled(**batch | {"num_items_in_batch": count}).loss
            accelerator.backward(part * accelerator.num_processes)  # DDP takes the mean
        loss += part.detach()
    return torch.stack([loss, num_labels])


def save_model(accelerator: Accelerator, network: Any, tokenizer: Any, out: Path) -> None:
    """Save the model and its tokenizer, for `from_pretrained`."""
    is_main, state = accelerator.is_main_process, accelerator.get_state_dict(network)
    network = accelerator.unwrap_model(network)
    network.save_pretrained(out, is_main, state_dict=state, save_function=accelerator.save)
    if is_main:
        tokenizer.save_pretrained(out)
    accelerator.print(f"Trained model in {out}: AutoModelForCausalLM.from_pretrained({str(out)!r})")


def log(accelerator: Accelerator, out: Path, step: int, sums: torch.Tensor, begin: float) -> float:
    """Log loss, tokens and speed of all ranks since `begin`; return the time now."""
    loss, tokens = accelerator.reduce(sums, "sum").tolist()
    end = time.perf_counter()  # the device is done
    speed = tokens / (end - begin)
    line = {"step": step, "loss": loss, "tokens": int(tokens), "tokens_per_s": speed}
    if accelerator.is_main_process:
        with (out / "log.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        if step % 10 == 0 or step == 1:
            print(f"step {step}: loss {loss:.4f}, {speed:,.0f} tokens/s", flush=True)
    return end


if __name__ == "__main__":
    typer.run(main)
