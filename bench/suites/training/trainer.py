"""`Trainer` as the suite "end-to-end" runs it: a clock, a first step, nothing left behind."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from accelerate.state import AcceleratorState
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import Trainer, TrainerCallback

from flexvarlen.measure.timing import synchronize


class Clock(TrainerCallback):  # type: ignore[misc]
    """The end of each step, on an idle device; the peak of memory after the warm-up.

    Args:
        warmup: steps before the first that is timed, at least one.

    Attributes:
        ends: for each step the time, and the graphs that the process had compiled by then.
    """

    def __init__(self, device: torch.device, warmup: int) -> None:
        self.device, self.warmup = device, warmup
        self.ends: list[tuple[float, int]] = []

    def steady(self) -> tuple[dict[int, float], int]:
        """Seconds of each timed step by its number, and how many compiled a graph.

        Those that did are left out: lengths without a graph cost a minute once, which over a few
        steps would be all that is seen. Where every step compiled, all of them count.
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
    """Asks after the first step's backward whether to go on.

    Attributes:
        go_on_after_first_backward: gets the first step's loss, with its gradients in place and not
            clipped; False ends the training.
    """

    go_on_after_first_backward: Callable[[float], bool]

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss: Tensor = super().training_step(*args, **kwargs)
        if self.state.global_step == 0:
            self.losses = [*getattr(self, "losses", []), loss.detach()]
            if len(self.losses) == self.args.gradient_accumulation_steps:
                go_on = self.go_on_after_first_backward(float(torch.stack(self.losses).sum()))
                if not go_on:
                    self.control.should_training_stop = True
        return loss


@contextmanager
def fresh_accelerate() -> Iterator[None]:
    """Compilation is a state of the process: no Trainer may inherit another's."""
    before = dict(os.environ)
    for name in before:
        if name.startswith("ACCELERATE_DYNAMO"):
            del os.environ[name]
    torch._dynamo.reset()
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)
        AcceleratorState._reset_state(reset_partial_state=True)
        torch._dynamo.reset()
