"""What all measurements of the suite "scaling-ranks" share on a rank: models, and agreement."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

import flexvarlen as fv
from flexvarlen.bench.suites.training import texts
from flexvarlen.bench.suites.training.scaling_ranks import RanksCase
from flexvarlen.bench.suites.training.texts import Document
from flexvarlen.measure import memory_meaning, peak_memory_mib
from flexvarlen.measure.timing import synchronize
from flexvarlen.report.records import Status
from flexvarlen.verify.experiment.step import checkpoint_layers

Measured = tuple[Status, str | None, dict[str, Any]]
"""A finding's status, reason and measures, the same on every rank."""

LEARNING_RATE = 1e-5


def rows_of(case: RanksCase, count: int) -> list[list[Document]]:
    topics = texts.topic_ids(case.vocab_size, case.tokens)
    return texts.full_rows(topics, case.tokens, count, case.seed)


def patched_model(case: RanksCase, device: torch.device, **options: Any) -> PreTrainedModel:
    model = case.new_causal_lm(device)
    fv.patch_model(model, case.backend, **options)
    if case.checkpointing:
        checkpoint_layers(model)
    return model


def data_parallel(model: nn.Module, device: torch.device) -> DistributedDataParallel:
    """The model under DDP, whose gradients are the means over the ranks."""
    devices = [device] if device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)


def new_optimizer(model: nn.Module, device: torch.device) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), LEARNING_RATE, fused=device.type == "cuda")


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """Wall seconds of a call that begins on all ranks at once."""
    dist.barrier()
    synchronize(device)
    begin = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - begin


def largest(values: Sequence[float], device: torch.device) -> list[float]:
    """The maximum over all ranks, value by value."""
    found = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    of_all: list[float] = found.tolist()
    return of_all


def first_reason(reason: str | None) -> str | None:
    """The reason of the first rank that has one, on every rank, as none may return alone."""
    reasons: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, reason)
    return next(filter(None, reasons), None)


class Timed(NamedTuple):
    """Seconds on the slowest rank, this rank's losses, and whether all ranks' are finite.

    `memory`: the largest peak of a rank, as measures.
    """

    seconds: float
    losses: list[float]
    finite: bool
    memory: dict[str, Any]


def timed(steps: Callable[[], object], losses: Sequence[Tensor], device: torch.device) -> Timed:
    """Run and time steps, each of which adds its loss, a 0-d tensor, to `losses`."""
    own: list[float] = []
    peak = peak_memory_mib(lambda: own.append(seconds_of(steps, device)), device)
    found: list[float] = torch.stack(list(losses)).double().tolist()
    bad = float(not all(map(math.isfinite, found)))
    # One reduction of all: no rank may return alone.
    seconds, most, bad = largest([*own, peak or 0.0, bad], device)
    memory = {"peak_mib": None if peak is None else most, "peak_meaning": memory_meaning(device)}
    return Timed(seconds, found, not bad, memory)
