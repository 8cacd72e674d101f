"""`Trainer` as `end_to_end.py` runs it: its clock, its first step, and nothing left behind."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
from accelerate.state import AcceleratorState
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils.data import SequentialSampler
from transformers import Trainer, TrainerCallback

from flexvarlen.bench.model.step import synchronize


class Clock(TrainerCallback):  # type: ignore[misc]
    """The end of each step, on an idle device; the peak of memory after the warm-up.

    Args:
        warmup: steps before the first that is timed, one at least.

    Attributes:
        ends: of each step the clock, and the graphs that the process had compiled by then.
    """

    def __init__(self, device: torch.device, warmup: int) -> None:
        self.device, self.warmup = device, warmup
        self.ends: list[tuple[float, int]] = []

    def steady(self) -> tuple[dict[int, float], int]:
        """Seconds of each timed step by its number, and how many compiled a graph.

        Those that did are left out: lengths that no graph was made for cost a minute once, which
        over a few steps would be all that is seen. Where every step did, they are all there is.
        """
        spans = enumerate(pairwise(self.ends[self.warmup - 1 :]), self.warmup)
        took = {step: (b - a, n > m) for step, ((a, m), (b, n)) in spans}
        kept = {step: seconds for step, (seconds, compiled) in took.items() if not compiled}
        every = {step: seconds for step, (seconds, _) in took.items()}
        return kept or every, len(took) - len(kept)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        synchronize(self.device)
        self.ends.append((time.perf_counter(), counters["stats"]["unique_graphs"]))
        if len(self.ends) == self.warmup and self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)


class CheckedTrainer(Trainer):  # type: ignore[misc]
    """Takes the batches in order, and hands the first step over before it is taken."""

    first_step: Callable[[float], None]

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return SequentialSampler(self.train_dataset if train_dataset is None else train_dataset)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss: Tensor = super().training_step(*args, **kwargs)
        if self.state.global_step == 0:
            self.losses = [*getattr(self, "losses", []), loss.detach()]
            if len(self.losses) == self.args.gradient_accumulation_steps:
                self.first_step(float(torch.stack(self.losses).sum()))
        return loss


@contextmanager
def accelerate_as_it_was() -> Iterator[None]:
    """Compilation is a state of the process: the next Trainer must not inherit it."""
    with mock.patch.dict(os.environ):
        for name in [name for name in os.environ if name.startswith("ACCELERATE_DYNAMO")]:
            del os.environ[name]
        torch._dynamo.reset()
        try:
            yield
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
            torch._dynamo.reset()
