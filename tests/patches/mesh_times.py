"""Times of steps that transformers' DistributedConfig divides over two GPUs.

Of a mixture of 3B parameters: rows packed by us against padded batches of the same documents in
transformers' own path, its weights sharded and its experts divided (`fsdp_size=2, ep_size=2`). Of a
dense model: a packed row under `tp_size=2` against the same row on one GPU. From the checkout, with
transformers 5.24:

    torchrun --nproc-per-node 2 -m tests.patches.mesh_times COMMIT

writes `mesh_times.jsonl`. A step is forward and backward; milliseconds are medians of the slower
rank, after a step that is not timed.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate.utils import send_to_device
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig

import flexvarlen as fv
from flexvarlen.bench.suites.model.geometries import GEOMETRIES
from flexvarlen.bench.suites.training.ranks import largest, seconds_of
from flexvarlen.measure import peak_memory_mib
from flexvarlen.measure.machine import environment
from tests.ranks import of_all_ranks

RECORDS = Path(__file__).with_suffix(".jsonl")

TOKENS = 16_384
PADDED = 4
"""Padded batches of a step, on each rank."""
REPEATS = 5

Batches = list[dict[str, Any]]

MIXTURE, DENSE = ("qwen3-30b-a3b", 4), ("qwen3-4b", 18)
"""Geometries, and numbers of layers: 3.1B and 2.2B parameters."""


def saved(geometry: str, layers: int, folder: str) -> None:
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        config = GEOMETRIES[geometry](layers)
        with torch.device("cuda"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(folder)
    dist.barrier()


def documents(rank: int) -> list[Tensor]:
    """Chats of TOKENS tokens in all: log-normal lengths, of which the last is cut."""
    rng = np.random.default_rng(rank)
    lengths = rng.lognormal(np.log(800) - 0.5, 1.0, 200).clip(16, 8192).astype(int)
    ends = np.minimum(lengths.cumsum(), TOKENS)
    lengths = np.diff(ends, prepend=0)
    return [torch.randint(1, 100_000, (n,)) for n in lengths[lengths > 1].tolist()]


def packed(texts: list[Tensor]) -> Batches:
    collate = fv.PackedCollator(total_tokens=TOKENS, capacity=128, max_seqlen_bound=TOKENS)
    return [send_to_device(collate([texts]), "cuda")]


def padded(texts: list[Tensor]) -> Batches:
    """Batches of documents in their order."""
    found: Batches = []
    for part in np.array_split(np.arange(len(texts)), PADDED):
        ids = nn.utils.rnn.pad_sequence([texts[i] for i in part], batch_first=True)
        mask = ids.ne(0).long()
        inputs = {"input_ids": ids, "attention_mask": mask, "labels": ids.where(mask > 0, -100)}
        found.append({name: x.cuda() for name, x in inputs.items()})
    return found


def timed(model: PreTrainedModel, batches: Batches) -> dict[str, Any]:
    device = torch.device("cuda", torch.cuda.current_device())
    losses: list[float] = []

    def step() -> None:
        for batch in batches:
            loss = model(**batch).loss
            loss.backward()
        model.zero_grad()
        losses.append(loss.item())

    step()
    seconds: list[float] = []
    peak = peak_memory_mib(
        lambda: seconds.extend(seconds_of(step, device) for _ in range(REPEATS)), device
    )
    ms = median(largest(seconds, device)) * 1e3
    return {"ms": ms, "peak_mib": largest([peak or 0.0], device)[0], "last_loss": losses[-1]}


def loaded(folder: str, attention: str, sizes: dict[str, int]) -> PreTrainedModel:
    options = {"distributed_config": DistributedConfig(**sizes)} if sizes else {}
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation=attention, **options
    )
    return (model if sizes else model.cuda()).train()


def mixture(folder: str, found: Callable[..., None]) -> None:
    sizes, texts = {"fsdp_size": 2, "ep_size": 2}, documents(dist.get_rank())
    shared = {"geometry": MIXTURE[0], "layers": MIXTURE[1], **sizes, "documents": len(texts)}
    model = fv.patch_model(loaded(folder, "sdpa", sizes))
    found(shared, "packed", timed(model, packed(texts)))
    del model
    for attention in ("sdpa", "flash_attention_2"):
        model = loaded(folder, attention, sizes)
        found(shared, f"{PADDED} padded batches, {attention}", timed(model, padded(texts)))
        del model


def dense(folder: str, found: Callable[..., None]) -> None:
    texts = documents(0)
    for sizes in ({"tp_size": 2}, {}):
        torch.manual_seed(0)
        shared = {"geometry": DENSE[0], "layers": DENSE[1], **sizes, "documents": len(texts)}
        model = fv.patch_model(loaded(folder, "sdpa", sizes))
        found(shared, "packed", timed(model, packed(documents(0))))
        del model


def main(commit: str) -> None:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    where = environment(device) | {"git_commit": commit}

    def found(case: dict[str, Any], variant: str, measures: dict[str, Any]) -> None:
        record = {"case": case, "variant": variant, "measures": measures, "environment": where}
        if dist.get_rank() == 0:
            print(case, variant, measures, flush=True)
            with RECORDS.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")

    for measure, model in ((dense, DENSE), (mixture, MIXTURE)):
        with TemporaryDirectory() as own:
            folder = of_all_ranks(own)[0]
            saved(*model, folder)
            measure(folder, found)
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
