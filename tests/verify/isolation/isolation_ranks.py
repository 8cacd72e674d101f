"""What test_isolation_ranks.py runs in each of two processes: all say why, and none waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from transformers import DataCollatorWithFlattening, TrainerState, TrainingArguments

import flexvarlen as fv
from flexvarlen.verify.models import build_model


def sentence(case: str, folder: str) -> str:
    """The error that a case raises on this rank."""
    try:
        CASES[case](folder)
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def callback(folder: str, model: torch.nn.Module, examples: list[dict[str, Any]]) -> None:
    """`IsolationCallback` as the training starts, then the first collective of a step."""
    loader = DataLoader(examples, collate_fn=DataCollatorWithFlattening())
    arguments = TrainingArguments(folder, per_device_train_batch_size=2, report_to=[], use_cpu=True)
    state = TrainerState(is_world_process_zero=dist.get_rank() == 0)
    fv.IsolationCallback().on_train_begin(
        arguments, state, None, model=model, train_dataloader=loader
    )
    dist.barrier()


def examples(*lengths: int) -> list[dict[str, Any]]:
    return [{"input_ids": torch.arange(5, 5 + n)} for n in lengths]


def leaking(folder: str) -> None:
    model = build_model("llama")[0]
    model.config.use_cache = True  # under which transformers' sdpa sees one document
    callback(folder, model, examples(5, 7))


def patched() -> torch.nn.Module:
    return fv.patch_model(build_model("llama")[0], "sdpa")


def shard(*, grouped: bool) -> None:
    """A row of which rank 0 has a piece of one document, and rank 1 several."""
    layout = fv.PackedLayout.from_lengths([8, 3, 5])
    batch = fv.shard_row({"input_ids": torch.arange(3, 19)[None], "packed_layout": layout})
    group = dist.group.WORLD if grouped else None
    fv.verify_isolation(fv.patch_model(patched(), sequence_parallel_group=group), batch)


CASES: dict[str, Callable[[str], Any]] = {
    "a leak": leaking,
    "one document": lambda folder: callback(folder, patched(), examples(5)),
    "nothing": lambda folder: callback(folder, patched(), examples(5, 7)),
    "a shard": lambda folder: shard(grouped=False),
    "a group": lambda folder: shard(grouped=True),
}
