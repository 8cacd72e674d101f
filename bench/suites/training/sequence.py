"""A whole model on one row over all ranks, against one GPU."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import send_to_device
from torch import Tensor, nn
from transformers import PreTrainedModel

import flexvarlen as fv
from flexvarlen.bench.suites.model.geometries import log_normal_lengths
from flexvarlen.bench.suites.training import ranks, texts
from flexvarlen.bench.suites.training.scaling_ranks import SequenceCase
from flexvarlen.bench.suites.training.trainer import (
    LOGIT_TOKENS,
    check_first_step,
    first_step_alone,
)
from flexvarlen.measure import memory_meaning, peak_memory_mib
from flexvarlen.parallel.plan import plan_row
from flexvarlen.parallel.shard import Method, shard_batch

WARMUP_STEPS = 2
LOSS_LIMIT = 1e-4
"""Relative difference of the loss over all ranks from that of one, of the same row."""


def measure_sequence(case: SequenceCase, variant: str, device: torch.device) -> ranks.Measured:
    """A packed row compared with the reference, then the case's row, timed on one rank and all."""
    (row,) = ranks.rows_of(case, 1)
    documents = _documents(case, row)
    first = first_step_alone(lambda: case.new_causal_lm(device), row, dtype=case.torch_dtype)
    options = {"sequence_parallel_group": dist.group.WORLD, "loss_chunk_tokens": LOGIT_TOKENS}
    model = ranks.patched_model(case, device, **options)
    wrapped = ranks.data_parallel(model, device)
    method: Method = "contiguous" if case.hybrid else "documents"
    loss = _step(wrapped, _shard(row, method, device))
    measures, reason = check_first_step(first, model, float(loss))
    reason = ranks.first_reason(reason)
    if reason is not None:
        return "wrong", reason, measures
    del first
    measures |= {"attends": case.backend, "texts_crc32": texts.crc_of([row, documents])}
    model.zero_grad(set_to_none=True)
    del wrapped
    lengths = list(map(len, documents))
    plan = plan_row(
        lengths, case.ranks, total_tokens=case.document, contiguous=method == "contiguous"
    )
    measures |= {
        "documents": len(lengths),
        "longest_document": max(lengths),
        "cut_documents": len(plan.cut_documents),
    }
    row = send_to_device(texts.pack(case.document, [documents])(documents), device)
    whole = shard_batch(row, rank=0, ranks=1, method="contiguous")
    whole["packed_layout"] = row["packed_layout"]
    shard = _shard(documents, method, device)
    measures |= _against_one(case, model, whole, shard, device)
    alike = math.isclose(measures["loss"], measures["single_loss"], rel_tol=LOSS_LIMIT)
    reason = ranks.first_reason(None if alike else "the loss over all ranks is not one rank's")
    return "ok" if reason is None else "wrong", reason, measures


def _documents(case: SequenceCase, row: Sequence[texts.Document]) -> list[texts.Document]:
    """The documents of the row that is timed, of the tokens of another."""
    tokens, total = [token for ids in row for token in ids], case.document
    lengths = {
        "cut": log_normal_lengths(total, total // 8, sigma=1.0, seed=3),  # 10 of 65,536 tokens
        "whole": [total // 8, total // 16, total // 32, total // 32] * 4,  # on 2 and on 4 ranks
    }[case.row]
    return [(tokens * (length // len(tokens) + 1))[:length] for length in lengths]


def _shard(
    documents: Sequence[texts.Document], method: Method, device: torch.device
) -> dict[str, Any]:
    collate = texts.pack(sum(map(len, documents)), [documents])
    return fv.shard_row(send_to_device(collate(documents), device), method=method)


def _step(wrapped: nn.Module, shard: dict[str, Any]) -> Tensor:
    """The row's loss, after its backward."""
    loss: Tensor = wrapped(**shard).loss
    (loss * dist.get_world_size()).backward()  # DDP's mean of gradients is then their sum
    loss = loss.detach()
    dist.all_reduce(loss)
    return loss


def _against_one(
    case: SequenceCase,
    model: PreTrainedModel,
    whole: dict[str, Any],
    shard: dict[str, Any],
    device: torch.device,
) -> dict[str, Any]:
    """Forward and backward, in turns: each rank alone on the whole row, then all on their shards.

    A time is that of the slowest rank; over all ranks it includes the sum of the gradients.
    """
    wrapped = ranks.data_parallel(model, device)
    on_one = partial(fv.patched, model, case.backend, loss_chunk_tokens=LOGIT_TOKENS)
    losses: dict[str, Tensor] = {}

    def alone() -> None:
        loss = model(**whole).loss
        loss.backward()
        losses["single_loss"] = loss.detach()
        model.zero_grad(set_to_none=True)

    def together() -> None:
        losses["loss"] = _step(wrapped, shard)
        model.zero_grad(set_to_none=True)

    times: dict[str, list[float]] = {"single_ms": [], "ms_p50": []}
    peaks: dict[str, float | None] = {}
    for turn in range(WARMUP_STEPS + case.steps):
        with on_one():
            own = ranks.seconds_of(alone, device)
        both = ranks.largest([own * 1e3, ranks.seconds_of(together, device) * 1e3], device)
        if turn >= WARMUP_STEPS:
            for found, took in zip(times.values(), both, strict=True):
                found.append(took)
    with on_one():
        peaks["single_peak_mib"] = peak_memory_mib(alone, device)
    peaks["peak_mib"] = peak_memory_mib(together, device)
    most = ranks.largest([peak or 0.0 for peak in peaks.values()], device)
    medians = {name: statistics.median(found) for name, found in times.items()}
    return {
        **medians,
        **{name: float(loss) for name, loss in losses.items()},
        "repeats": case.steps,
        "efficiency": medians["single_ms"] / medians["ms_p50"] / case.ranks,
        "tokens_per_s": case.document / medians["ms_p50"] * 1e3,
        **{name: peak and x for (name, peak), x in zip(peaks.items(), most, strict=True)},
        "peak_meaning": memory_meaning(device),
    }
