"""What each process runs for test_trainers_trees.py: trainers' steps as one tree, of ranks."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import datasets
import torch.distributed as dist
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from flexvarlen.parallel.sharded_parameters import is_sharded
from flexvarlen.patches.batch import shared_rows
from tests.contract_training import forget_accelerate
from tests.patches import padded_trainers, tree_ranks
from tests.patches.padded_trainers import Case, check_run

_begin_state, _ddp = AcceleratorState.__init__, DistributedDataParallel.forward

FSDP2 = {
    "fsdp": "full_shard",
    "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer"]},
}


def learned(case: Case, tokens_per_part: tuple[int, int]) -> list[tuple[int, bool]]:
    """Check that a run learns what the padded one does.

    Args:
        case: a trainer.
        tokens_per_part: of each rank.

    Returns:
        Of each part that DDP ran, the tokens, and whether DDP then reduces.
    """
    parts = []

    def noting(self: Any, *args: Any, **inputs: Any) -> Any:
        if inputs.get("packed_layout") is not None:
            parts.append((inputs["input_ids"].numel(), self.require_backward_grad_sync))
        return _ddp(self, *args, **inputs)

    def gradients_of(model: nn.Module) -> dict[str, Tensor]:
        assert is_sharded(model) == ("fsdp" in case.settings)
        return tree_ranks.gradients_of(model)

    forget_accelerate()
    datasets.disable_caching()
    with ExitStack() as stack:
        stack.callback(forget_accelerate)
        folder = Path(stack.enter_context(TemporaryDirectory()))
        stack.enter_context(mock.patch.dict(os.environ))  # in which accelerate keeps FSDP
        for module, name, value in (
            (shared_rows, "MIN_SHARED_TOKENS", 1),  # the tests' prompts are short
            (padded_trainers, "gradients_of", gradients_of),
            (AcceleratorState, "__init__", _state_with_fsdp),
            (DistributedDataParallel, "forward", noting),
        ):
            stack.enter_context(mock.patch.object(module, name, value))
        most = tokens_per_part[dist.get_rank()]
        check_run(case, folder, share_prefixes=True, tokens_per_part=most)
    return parts


def _state_with_fsdp(self: Any, *args: Any, **kwargs: Any) -> None:
    """accelerate's state, with FSDP on the CPU too, where accelerate takes DDP."""
    _begin_state(self, *args, **kwargs)
    state = AcceleratorState._shared_state
    if kwargs.get("fsdp_plugin") is not None:
        state["fsdp_plugin"] = kwargs["fsdp_plugin"]
    if state.get("fsdp_plugin") is not None:
        state["distributed_type"] = DistributedType.FSDP
