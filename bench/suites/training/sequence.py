"""A whole model trained on one document over all ranks, by sequence parallelism."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict

import torch
import torch.distributed as dist
from accelerate.utils import send_to_device
from torch import Tensor, nn

import flexvarlen as fv
from flexvarlen.bench.suites.training import texts
from flexvarlen.bench.suites.training.batches import pack
from flexvarlen.bench.suites.training.first_step import check_first_step, first_step_alone
from flexvarlen.bench.suites.training.ranks import (
    Measured,
    data_parallel,
    new_optimizer,
    patched_model,
    rows_of,
    timed,
)
from flexvarlen.bench.suites.training.scaling_ranks import SequenceCase
from flexvarlen.bench.suites.training.texts import Document
from flexvarlen.measure import summarize

WARMUP_STEPS = 2


def measure_sequence(case: SequenceCase, device: torch.device) -> Measured:
    """A packed row compared with the reference, then timed steps on one long document."""
    (row,) = rows_of(case, 1)
    tokens = [token for ids in row for token in ids]
    document = (tokens * (case.document // len(tokens) + 1))[: case.document]
    first = first_step_alone(lambda: case.new_causal_lm(device), row, dtype=case.torch_dtype)
    model = patched_model(case, device, sequence_parallel_group=dist.group.WORLD)
    loss_of = _sequence_loss(data_parallel(model, device), case, device)
    measures, reason = check_first_step(first, model, float(loss_of(row)))
    reasons: list[str | None] = [None] * case.ranks
    dist.all_gather_object(reasons, reason)  # no rank may return alone
    reason = next(filter(None, reasons), None)
    if reason is not None:
        return "wrong", reason, measures
    del first
    optimizer = new_optimizer(model, device)
    losses: list[Tensor] = []

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss_of([document]))
        optimizer.step()

    for _ in range(WARMUP_STEPS):
        step()
    found = timed([step] * case.steps, losses, device)
    if not found.finite:
        return "wrong", "a loss is not finite", measures
    timing = summarize([seconds * 1e3 for seconds in found.seconds])
    measures |= found.memory | {
        "attends": case.backend,
        **asdict(timing),
        "tokens_per_s": case.document / timing.ms_p50 * 1e3,
        "document_first_loss": found.losses[0],
        "document_last_loss": found.losses[-1],
        "texts_crc32": texts.crc_of([row, [document]]),
    }
    return "ok", None, measures


def _sequence_loss(
    wrapped: nn.Module, case: SequenceCase, device: torch.device
) -> Callable[[Sequence[Document]], Tensor]:
    """Documents -> the row's loss, after its backward."""

    def loss_of(documents: Sequence[Document]) -> Tensor:
        collate = pack(sum(map(len, documents)), [documents])
        shard = fv.shard_row(send_to_device(collate(documents), device))
        loss: Tensor = wrapped(**shard).loss
        (loss * case.ranks).backward()  # DDP's mean of gradients is then their sum
        loss = loss.detach()
        dist.all_reduce(loss)
        return loss

    return loss_of
