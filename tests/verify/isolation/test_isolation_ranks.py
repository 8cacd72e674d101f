"""What one rank finds ends the run of all, in a sentence: rank 1 waited for rank 0's gradients."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from transformers import DataCollatorWithFlattening, TrainerState, TrainingArguments

import flexvarlen as fv
from flexvarlen.verify.models import build_model


def patched():
    return fv.patch_model(build_model("llama")[0], "sdpa")


def leaking():
    model = build_model("llama")[0]
    model.config.use_cache = True  # under which transformers' sdpa sees one document
    return model


def callback(model, lengths, folder):
    """`IsolationCallback` as the training starts, then the first collective of a step."""
    examples = [{"input_ids": torch.arange(5, 5 + n)} for n in lengths]
    loader = DataLoader(examples, collate_fn=DataCollatorWithFlattening())
    arguments = TrainingArguments(folder, per_device_train_batch_size=2, report_to=[], use_cpu=True)
    state = TrainerState(is_world_process_zero=dist.get_rank() == 0)
    fv.IsolationCallback().on_train_begin(
        arguments, state, None, model=model, train_dataloader=loader
    )
    dist.barrier()


def shard(*, grouped):
    """A row of which rank 0 has a piece of one document, and rank 1 several."""
    layout = fv.PackedLayout.from_lengths([8, 3, 5])
    batch = fv.shard_row({"input_ids": torch.arange(3, 19)[None], "packed_layout": layout})
    group = dist.group.WORLD if grouped else None
    fv.verify_isolation(fv.patch_model(patched(), sequence_parallel_group=group), batch)


CALLS = {
    "a leak": lambda folder: callback(leaking(), (5, 7), folder),
    "one document": lambda folder: callback(patched(), (5,), folder),
    "nothing": lambda folder: callback(patched(), (5, 7), folder),
    "a shard": lambda folder: shard(grouped=False),
    "a group": lambda folder: shard(grouped=True),
}


def sentence(case, folder):
    """The error that a case raises on this rank."""
    try:
        CALLS[case](folder)
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


WHOLE = "NotImplementedError: verify_isolation needs whole rows on each rank, got "


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("a leak", r"IsolationError: document \d .* leaks into document \d"),
        ("one document", "ValueError: batch must hold at least two documents, got 1"),
        ("nothing", "nothing"),
        ("a shard", f"{WHOLE}a shard of fv.shard_row"),
        ("a group", f"{WHOLE}a model with sequence_parallel_group"),
    ],
)
def test_every_rank_says_why(ranks, case, words, tmp_path):
    first, second = ranks.run(sentence, case, str(tmp_path))
    assert re.match(words, first)
    by_rank_0 = case in ("a leak", "one document")
    assert second == (f"RuntimeError: rank 0 raised {first}" if by_rank_0 else first)
