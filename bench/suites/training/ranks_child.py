"""What torchrun starts on each rank for the suite "scaling-ranks"; rank 0 writes the finding.

Arguments: the task as JSON (`variant`, the fields of its `case`, `device`), and a file. A rank that
fails alone ends the launch when the others have waited for it for three minutes.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
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
from flexvarlen.bench.suites.model.attends import taken_for
from flexvarlen.bench.suites.training import ranks, scaling_ranks, texts
from flexvarlen.bench.suites.training.sequence import measure_sequence
from flexvarlen.bench.suites.training.shared_trainer import measure_trainer
from flexvarlen.bench.suites.training.texts import pack
from flexvarlen.runner.failures import status_of

WAITS = timedelta(minutes=3)


def main(task: Mapping[str, Any], out: Path) -> None:
    device = join(task["device"])
    case = scaling_ranks.CASES[task["variant"]](**task["case"])
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


def measured(variant: str, case: scaling_ranks.RanksCase, device: torch.device) -> ranks.Measured:
    measure: dict[type, Callable[..., ranks.Measured]] = {
        scaling_ranks.SequenceCase: measure_sequence,
        scaling_ranks.SharedTrainerCase: measure_trainer,
        scaling_ranks.TrainingCase: measure_training,
    }
    return measure[type(case)](case, variant, device)


# --- a packed row for each rank ------------------------------------------------------------------


def measure_training(
    case: scaling_ranks.TrainingCase, variant: str, device: torch.device
) -> ranks.Measured:
    """A few warm-up steps, and one pass over the rows."""
    rows = ranks.rows_of(case, case.timed_rows)
    lengths = [[len(document) for document in row] for row in rows]
    steps = order_of(case, lengths)
    model = ranks.patched_model(case, device)
    wrapped = ranks.data_parallel(model, device) if variant == "ddp" else sharded(model, device)
    optimizer = ranks.new_optimizer(wrapped, device)
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

    def every_step() -> None:
        for of_ranks in steps:
            step(of_ranks)

    found = ranks.timed(every_step, losses, device)
    if not found.finite:
        return "wrong", "a loss is not finite", {}
    seconds, first_row = found.seconds, collate(rows[0])
    auto = case.backend == "auto"
    rate = case.tokens * len(rows) / seconds
    measures = {
        "attends": taken_for(model, first_row, case.torch_dtype) if auto else case.backend,
        "seconds": seconds,
        "ms_step": seconds / len(steps) * 1e3,
        "tokens_per_s": rate,
        "tokens_per_s_rank": rate / case.ranks,
        "imbalance": imbalance(lengths, steps),
        "first_loss": found.losses[0],
        "last_loss": found.losses[-1],
        "texts_crc32": texts.crc_of(rows),
    }
    return "ok", None, measures | found.memory


def imbalance(lengths: Sequence[Sequence[int]], steps: Sequence[Sequence[int]]) -> float:
    """The attention work of the slowest rank of each step, over that of the mean rank."""
    work = np.array([sum(n * n for n in row) for row in lengths], np.float64)[np.array(steps)]
    return float(work.max(1).sum() / work.mean(1).sum())


def order_of(case: scaling_ranks.TrainingCase, lengths: Sequence[Sequence[int]]) -> list[list[int]]:
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
