"""What each process runs for test_trainers_trees.py: trainers' steps as one tree, under DDP."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import datasets
import torch.distributed as dist

from flexvarlen.patches.batch import shared_rows
from tests.contract_training import forget_accelerate
from tests.patches.padded_trainers import Case, check_run


def learned(case: Case, tokens_per_part: tuple[int, int]) -> None:
    """Check that the patched run learns what the padded one does.

    Args:
        case: a trainer.
        tokens_per_part: of each rank.
    """
    forget_accelerate()
    datasets.disable_caching()
    with (
        TemporaryDirectory() as folder,
        mock.patch.object(shared_rows, "MIN_SHARED_TOKENS", 1),  # the tests' prompts are short
    ):
        most = tokens_per_part[dist.get_rank()]
        check_run(case, Path(folder), share_prefixes=True, tokens_per_part=most)
