"""How far the times of steps on two GPUs are from what `fv.row_cost` says of their rows.

Each rank has a row of 32,768 tokens, and DDP waits for the slower one: the cost of a step is that
of its dearer row, and one factor makes milliseconds of all costs of a model. From the checkout:

    torchrun --nproc-per-node 2 -m tests.packing.row_times COMMIT

writes `row_times.jsonl`. Rows of the hybrid take flash-linear-attention.
"""

import json
import os
import sys
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate.utils import send_to_device
from transformers import AutoModelForCausalLM, PreTrainedModel

import flexvarlen as fv
from flexvarlen.bench.suites.model.geometries import GEOMETRIES
from flexvarlen.bench.suites.training.ranks import data_parallel, largest, seconds_of
from flexvarlen.measure.machine import environment
from flexvarlen.verify.experiment.step import checkpoint_layers

RECORDS = Path(__file__).with_suffix(".jsonl")

TOKENS = 32_768
ROWS = {
    "documents of 512": [512] * 64,
    "documents of 2,048": [2048] * 16,
    "documents of 8,192": [8192] * 4,
    "one of 16,384, others of 512": [16_384] + [512] * 32,
    "one document": [TOKENS],
}
SHORT, *_, MIXED, LONG = ROWS
PAIRS = [*((name, name) for name in ROWS), (SHORT, MIXED), (LONG, SHORT)]
"""The rows of both ranks."""
MODELS = {"llama-3.1-8b": 8, "qwen3.5-2b": 12}
"""The number of layers of each, all of them checkpointed."""
REPEATS = 3


def new_model(geometry: str, device: torch.device) -> PreTrainedModel:
    with device:
        model = AutoModelForCausalLM.from_config(
            GEOMETRIES[geometry](MODELS[geometry]), dtype=torch.bfloat16
        )
    checkpoint_layers(model)
    return fv.patch_model(model.train())


def measured(geometry: str, compiled: bool, device: torch.device) -> list[dict[str, Any]]:
    """One record of each pair of rows."""
    torch.manual_seed(0)
    model = new_model(geometry, device)
    cost, vocab = fv.row_cost(model), model.config.vocab_size
    wrapped = data_parallel(model, device)
    call = torch.compile(wrapped) if compiled else wrapped
    ids = torch.randint(vocab, (TOKENS,))
    collate = fv.PackedCollator(total_tokens=TOKENS, capacity=64, max_seqlen_bound=TOKENS)
    rows = {
        name: send_to_device(collate([[ids[:n] for n in lengths]]), device)
        for name, lengths in ROWS.items()
    }

    def step(row: str) -> None:
        call(**rows[row]).loss.backward()
        model.zero_grad()

    times, costs = [], []
    for pair in PAIRS:
        row = pair[dist.get_rank()]
        step(row)
        seconds = [seconds_of(partial(step, row), device) for _ in range(REPEATS)]
        times.append(median(largest(seconds, device)) * 1e3)
        costs.append(cost.of_rows([ROWS[name] for name in pair]).max())
    factor = np.median(np.array(times) / costs)
    case = {"geometry": geometry, "layers": MODELS[geometry], "compiled": compiled}
    return [
        {"case": case, "rows": pair, "ms": ms, "ms_of_cost": float(factor * flops)}
        for pair, ms, flops in zip(PAIRS, times, costs, strict=True)
    ]


def main(commit: str) -> None:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    found = [
        x | {"environment": environment(device) | {"git_commit": commit}}
        for geometry in MODELS
        for compiled in (False, True)
        for x in measured(geometry, compiled, device)
    ]
    if dist.get_rank() == 0:
        RECORDS.write_text("".join(json.dumps(x) + "\n" for x in found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
