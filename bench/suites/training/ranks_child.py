"""What torchrun starts on each rank for the suite "scaling-ranks"; rank 0 writes the finding.

Arguments: the task as JSON (`variant`, the fields of its `case`, `device`), and a file. A rank that
fails alone ends the launch when the others have waited for it for three minutes.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel

import flexvarlen as fv
from flexvarlen.bench.suites.training import texts
from flexvarlen.bench.suites.training.batches import pack, taken_for
from flexvarlen.bench.suites.training.ranks import (
    Measured,
    data_parallel,
    largest,
    new_optimizer,
    patched_model,
    rows_of,
    seconds_of,
)
from flexvarlen.bench.suites.training.scaling_ranks import (
    CASES,
    RanksCase,
    SequenceCase,
    TrainingCase,
    UlyssesCase,
)
from flexvarlen.bench.suites.training.sequence import measure_sequence
from flexvarlen.bench.suites.training.ulysses import measure_ulysses
from flexvarlen.measure import memory_meaning, peak_memory_mib
from flexvarlen.runner.failures import status_of

WAITS = timedelta(minutes=3)


def main(task: Mapping[str, Any], out: Path) -> None:
    """Measure a task on all ranks."""
    device = join(task["device"])
    case = CASES[task["variant"]](**task["case"])
    try:
        status, reason, measures = measured(task["variant"], case, device)
    except Exception as error:
        status, reason = status_of(error)
        measures = {}
        if status == "failed":
            raise
    if dist.get_rank() == 0:
        found = {"status": status, "reason": reason, "measures": measures}
        out.write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


def join(kind: str) -> torch.device:
    """Meet the other ranks; returns this rank's own device."""
    device = torch.device(kind)
    if kind == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    options: dict[str, Any] = {"device_id": device} if kind == "cuda" else {}
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", timeout=WAITS, **options)
    return device


def measured(variant: str, case: RanksCase, device: torch.device) -> Measured:
    """What one variant gave."""
    if isinstance(case, UlyssesCase):
        return measure_ulysses(case, device)
    if isinstance(case, SequenceCase):
        return measure_sequence(case, device)
    assert isinstance(case, TrainingCase)
    return measure_training(case, variant, device)


# --- a packed row for each rank ------------------------------------------------------------------


def measure_training(case: TrainingCase, variant: str, device: torch.device) -> Measured:
    """A few warm-up steps, and one pass over the rows."""
    rows = rows_of(case, case.timed_rows)
    lengths = [[len(document) for document in row] for row in rows]
    steps = order_of(case, lengths)
    model = patched_model(case, device)
    wrapped = data_parallel(model, device) if variant == "ddp" else sharded(model, device)
    optimizer = new_optimizer(wrapped, device)
    collate, rank = pack(case.tokens, rows), dist.get_rank()
    losses: list[Tensor] = []

    def step(of_ranks: Sequence[int]) -> None:
        batch = collate(rows[of_ranks[rank]])
        loss = wrapped(**send_to_device(batch, device)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())

    for index in range(case.warmup):
        step(steps[index % len(steps)])
    times: list[float] = []

    def every_step() -> None:
        for of_ranks in steps:
            step(of_ranks)

    def timed() -> None:
        times.append(seconds_of(every_step, device))

    own_peak = peak_memory_mib(timed, device)
    found: list[float] = torch.stack(losses).double().tolist()
    finite = all(map(math.isfinite, found))
    # One reduction of all: no rank may return alone.
    seconds, peak, bad = largest([times[0], own_peak or 0.0, float(not finite)], device)
    if bad:
        return "wrong", "a loss is not finite", {}
    pairs = np.array([sum(n * n for n in row) for row in lengths], np.float64)[np.array(steps)]
    rate, is_auto = case.tokens * len(rows) / seconds, case.backend == "auto"
    return (
        "ok",
        None,
        {
            "attends": taken_for(model, collate(rows[0]), case.torch_dtype)
            if is_auto
            else case.backend,
            "seconds": seconds,
            "ms_step": seconds / len(steps) * 1e3,
            "tokens_per_s": rate,
            "tokens_per_s_rank": rate / case.ranks,
            "imbalance": float(pairs.max(1).sum() / pairs.mean(1).sum()),
            "first_loss": found[0],
            "last_loss": found[-1],
            "peak_mib": None if own_peak is None else peak,
            "peak_meaning": memory_meaning(device),
            "texts_crc32": texts.crc_of(rows),
        },
    )


def order_of(case: TrainingCase, lengths: Sequence[Sequence[int]]) -> list[list[int]]:
    """The row of each rank, step by step; each row once."""
    if case.order == "balanced":
        sampler = fv.BalancedSampler(
            lengths, num_replicas=case.ranks, seed=case.seed, drop_last=True
        )
        return sampler.steps()
    order = np.random.default_rng(case.seed).permutation(len(lengths))
    found: list[list[int]] = order.reshape(-1, case.ranks).tolist()
    return found


def sharded(model: PreTrainedModel, device: torch.device) -> nn.Module:
    """The model under FSDP2: each layer, and the rest."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model.base_model.layers:
        fully_shard(layer, mesh=mesh)
    wrapped: nn.Module = fully_shard(model, mesh=mesh)
    return wrapped


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
