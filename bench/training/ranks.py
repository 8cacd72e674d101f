"""What trainings on several ranks share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

LEARNING_RATE = 1e-5


def data_parallel(model: nn.Module, device: torch.device) -> DistributedDataParallel:
    """The model under DDP, whose gradients are the means over the ranks."""
    devices = [device] if device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)


def new_optimizer(model: nn.Module, device: torch.device) -> torch.optim.AdamW:
    """Fused on a GPU."""
    return torch.optim.AdamW(model.parameters(), LEARNING_RATE, fused=device.type == "cuda")


def largest(values: Sequence[float], device: torch.device) -> list[float]:
    """Of all ranks, value by value."""
    found = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    of_all: list[float] = found.tolist()
    return of_all
