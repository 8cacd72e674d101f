"""Trainer and TRL's SFTTrainer under FSDP2, all ranks on one row of documents: how fast, how large.

On one rank the same without `context_parallel`: the row that the others share may not fit there. On
a CPU the model is under DDP, as accelerate has no FSDP2 there.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import torch.distributed as dist
from transformers import Trainer, TrainingArguments

import flexvarlen as fv
from flexvarlen.bench.suites.training import texts
from flexvarlen.bench.suites.training.preference_trainers import tokenizer
from flexvarlen.bench.suites.training.ranks import LEARNING_RATE, Measured, largest, rows_of
from flexvarlen.bench.suites.training.scaling_ranks import SharedTrainerCase
from flexvarlen.bench.suites.training.texts import Document
from flexvarlen.bench.suites.training.trainer import LOGIT_TOKENS, Clock
from flexvarlen.measure import memory_meaning

WARMUP_STEPS = 2


def measure_trainer(case: SharedTrainerCase, variant: str, device: torch.device) -> Measured:
    """A few warm-up steps, then timed ones; each is a row."""
    rows = rows_of(case, WARMUP_STEPS + case.steps)
    clock = Clock(device, WARMUP_STEPS)
    with tempfile.TemporaryDirectory() as folder:
        trainer = new_trainer(case, variant, device, rows, folder)
        trainer.add_callback(clock)
        trainer.train()
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    seconds, _ = clock.steady()
    (slowest,) = largest([sum(seconds.values()) / len(seconds)], device)
    peak = None
    if device.type == "cuda":
        (peak,) = largest([torch.cuda.max_memory_allocated(device) / 2**20], device)
    if not all(map(torch.isfinite, torch.tensor(losses))):
        return "wrong", "a loss is not finite", {}
    measures = {
        "ms_step": slowest * 1e3,
        "tokens_per_s": case.tokens / slowest,
        "peak_mib": peak,
        "peak_meaning": memory_meaning(device),
        "documents": len(rows[WARMUP_STEPS]),
        "longest_document": max(map(len, rows[WARMUP_STEPS])),
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "texts_crc32": texts.crc_of(rows),
    }
    return "ok", None, measures


def new_trainer(
    case: SharedTrainerCase,
    variant: str,
    device: torch.device,
    rows: list[list[Document]],
    folder: str,
) -> Trainer:
    """The trainer of a variant, patched, whose batch is a row."""
    model = case.new_causal_lm(device)
    settings: dict[str, Any] = {
        "output_dir": folder,
        "max_steps": len(rows),
        "per_device_train_batch_size": 1,
        "learning_rate": LEARNING_RATE,
        "train_sampling_strategy": "sequential",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": device.type == "cpu",
    }
    if device.type == "cuda":
        layers = type(model.base_model.layers[0]).__name__
        settings |= {
            "fsdp": True,
            "fsdp_config": {
                "transformer_layer_cls_to_wrap": [layers],
                "activation_checkpointing": case.checkpointing,
            },
        }
    if variant == "sft":
        trainer = _sft_trainer(model, settings, rows)
    else:
        options = {"train_dataset": rows, "data_collator": fv.PackedCollator()}
        trainer = Trainer(model, TrainingArguments(**settings), **options)
    chunk = None if variant == "sft" else LOGIT_TOKENS
    if dist.get_world_size() == 1:
        fv.patch_model(model, case.backend, loss_chunk_tokens=chunk)
        return trainer
    return fv.patch_trainer(
        trainer, case.backend, context_parallel=case.ranks, loss_chunk_tokens=chunk
    )


def _sft_trainer(model: Any, settings: dict[str, Any], rows: list[list[Document]]) -> Trainer:
    """Its loss comes from hidden states and the head's weights: there are no logits of a row."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    tokens = [[token for document in row for token in document] for row in rows]
    lengths = [[len(document) for document in row] for row in rows]
    config = SFTConfig(
        **settings,
        bf16=False,  # weights already have the dtype of the case
        gradient_checkpointing=False,  # TRL's default is True, beside FSDP's own
        padding_free=True,
        max_length=None,
        shuffle_dataset=False,
        dataset_kwargs={"skip_prepare_dataset": True},
    )
    columns = {"input_ids": tokens, "labels": tokens, "seq_lengths": lengths}
    return SFTTrainer(
        model, config, train_dataset=Dataset.from_dict(columns), processing_class=tokenizer()
    )
