"""What each process runs for test_trainers_trees.py: trainers' steps as one tree, under DDP."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import datasets
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from flexvarlen.patches.batch import shared_rows
from tests.contract_training import forget_accelerate
from tests.patches.padded_trainers import Case, check_run


def learned(case: Case, tokens_per_part: tuple[int, int]) -> list[tuple[int, bool]]:
    """Check that a run learns what the padded one does.

    Args:
        case: a trainer.
        tokens_per_part: of each rank.

    Returns:
        Of each part that DDP ran, the tokens, and whether DDP then reduces.
    """
    forget_accelerate()
    datasets.disable_caching()
    parts = []
    forward = DistributedDataParallel.forward

    def noting(self: Any, *args: Any, **inputs: Any) -> Any:
        if inputs.get("packed_layout") is not None:
            parts.append((inputs["input_ids"].numel(), self.require_backward_grad_sync))
        return forward(self, *args, **inputs)

    with (
        TemporaryDirectory() as folder,
        mock.patch.object(shared_rows, "MIN_SHARED_TOKENS", 1),  # the tests' prompts are short
        mock.patch.object(DistributedDataParallel, "forward", noting),
    ):
        most = tokens_per_part[dist.get_rank()]
        check_run(case, Path(folder), share_prefixes=True, tokens_per_part=most)
    return parts
