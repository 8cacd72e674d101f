"""Training of a whole model on one row over all ranks, as `sequence_parallel_group=` does it.

First a row of packed texts, which one GPU holds too: its loss and gradients are held against each
document alone (`FirstStep`). Then steps on one document that is longer: what a GPU alone makes of
it is a row as well, out of memory for one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import send_to_device
from torch import Tensor
from transformers import PreTrainedModel

import flexvarlen as fv
from flexvarlen.bench.model.accuracy import checkpoint_layers
from flexvarlen.bench.model.step import synchronize
from flexvarlen.bench.model.utilisation import noting_auto
from flexvarlen.bench.training.end_to_end_first_step import FirstStep, WrongError
from flexvarlen.bench.training.ranks import data_parallel, largest, new_optimizer
from flexvarlen.bench.training.resumable import Measured
from flexvarlen.measure import memory_meaning, peak_memory_mib, summarize

WARMUP_STEPS = 2


@dataclass(frozen=True)
class SequenceCase:
    """One row at a time on so many ranks.

    Attributes:
        tokens: of the packed row that is checked.
        document: tokens of the one that is timed.
        steps: that are timed.
        texts_crc32: of both rows.
    """

    ranks: int
    geometry: str
    layers: int
    tokens: int
    document: int
    steps: int
    checkpointing: bool
    backend: str
    dtype: str
    seed: int
    texts_crc32: int

    def data(self) -> dict[str, Any]:
        """The case of a row."""
        return {"variant": "sequence", **asdict(self)}


def measure_sequence(
    case: SequenceCase,
    new_model: Callable[[], PreTrainedModel],
    row: list[list[int]],
    document: list[int],
) -> Measured:
    """Status, reason and measures, the same on every rank.

    A step's time is the slowest rank's. What `FirstStep` does not see: gradients other than those
    of attention's and the MLP's weights; and, as a loss in bfloat16 may be about 1.6% off, one
    wrong label at a shard's border. `tests/parallel/test_ulysses.py` guards these.

    Args:
        case: what is measured.
        new_model: the same weights on each rank.
        row: documents of `case.tokens` in all.
        document: of `case.document` tokens.
    """
    truth = FirstStep(new_model, row)
    model = new_model()
    device = model.device
    fv.patch_model(model, case.backend, sequence_parallel_group=dist.group.WORLD)
    if case.checkpointing:
        checkpoint_layers(model)
    wrapped = data_parallel(model, device)

    def loss_of(documents: Sequence[list[int]]) -> Tensor:
        """The row's loss, after its backward: DDP's mean of gradients is then their sum."""
        pack = fv.PackedCollator(sum(map(len, documents)), capacity=len(documents))
        batch = pack([{"input_ids": ids} for ids in documents])
        shard = fv.shard_row(send_to_device(batch, device))
        loss: Tensor = wrapped(**shard).loss
        (loss * case.ranks).backward()
        loss = loss.detach()
        dist.all_reduce(loss)
        return loss

    measures: dict[str, Any] = {}
    reason = None
    with noting_auto() as attends:
        loss = float(loss_of(row))
        try:
            truth.check(model, measures, loss)
        except WrongError as error:
            reason = str(error)
        reasons: list[str | None] = [None] * case.ranks
        dist.all_gather_object(reasons, reason)  # none may return alone
        reason = next(filter(None, reasons), None)
        if reason is not None:
            return "wrong", reason, measures
        del truth
        optimizer = new_optimizer(model, device)

        def step() -> Tensor:
            optimizer.zero_grad(set_to_none=True)
            loss = loss_of([document])
            optimizer.step()
            return loss

        losses = [step() for _ in range(WARMUP_STEPS)]
    own_ms = []

    def timed_steps() -> None:
        for _ in range(case.steps):
            dist.barrier()
            synchronize(device)
            begin = time.perf_counter()
            losses.append(step())
            synchronize(device)
            own_ms.append((time.perf_counter() - begin) * 1e3)

    own_peak = peak_memory_mib(timed_steps, device)
    *ms, peak = largest([*own_ms, own_peak or 0.0], device)
    timing = summarize(ms)
    document_losses: list[float] = torch.stack(losses).double().tolist()
    if not all(map(math.isfinite, document_losses)):
        return "wrong", "a loss is not finite", measures
    measures |= {
        "attends": ", ".join(dict.fromkeys(attends)) or case.backend,
        **asdict(timing),
        "tokens_per_s": case.document / timing.ms_p50 * 1e3,
        "document_first_loss": document_losses[0],
        "document_last_loss": document_losses[-1],
        "peak_mib": None if own_peak is None else peak,
        "peak_meaning": memory_meaning(device),
    }
    return "ok", None, measures
