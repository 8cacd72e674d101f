"""What trainings share: a first step compared with each document alone, a clock, `Trainer`."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import torch
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from torch._dynamo.utils import counters
from transformers import PreTrainedModel, Trainer, TrainerCallback

from flexvarlen.bench.suites.training.texts import Document
from flexvarlen.measure.timing import synchronize
from flexvarlen.verify.experiment.alone import Alone, both_relative, gradients_of
from flexvarlen.verify.experiment.batch import PackedBatch
from flexvarlen.verify.experiment.step import free


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

        Steps that did are excluded: lengths without a graph cost a minute once, which over a few
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


# --- the first step, as it must be ---------------------------------------------------------------

LOGIT_TOKENS = 4096  # tokens whose logits exist at once: 5 GiB in fp64 at a vocabulary of 152k


def first_step_alone(
    new_model: Callable[[], PreTrainedModel],
    documents: Sequence[Document],
    *,
    dtype: torch.dtype,
    precision: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Alone:
    """Loss and gradients of a first step's documents; `precision`: what the forward runs in."""
    model = new_model()
    ids = torch.tensor([[token for document in documents for token in document]])
    row = PackedBatch(ids.to(model.device), tuple(map(len, documents)))
    every = range(len(documents))
    found = Alone.of(
        model,
        row,
        outputs=None,
        loss=lambda model: row.loss_alone(model, every, LOGIT_TOKENS),
        parameters=_matrices(model),
        dtype=dtype,
        precision=precision,
    )
    del model
    free(row.input_ids.device)  # it would stand in the way of the training
    return found


def check_first_step(
    alone: Alone, model: nn.Module, loss: float
) -> tuple[dict[str, Any], str | None]:
    """A training's own first step, before its gradients are clipped. Syncs.

    Returns:
        Measures, and the sentence about what is wrong, or None.
    """
    errors, baseline = alone.errors(None, loss, gradients_of(model)), alone.baseline
    measures: dict[str, Any] = {
        "first_loss": loss,
        "reference_loss": alone.results.loss,
        **both_relative("loss_error", errors.loss, baseline.loss),
        **both_relative("gradient_error", errors.gradient, baseline.gradient),
    }
    reason = alone.why_wrong(errors)
    return measures, None if reason is None else f"in the first step, {reason}"


def _matrices(model: PreTrainedModel) -> list[str]:
    """Names of the first and the last layer's projections, or of LoRA's."""
    last = model.config.num_hidden_layers - 1
    wanted = re.compile(rf"\blayers\.(0|{last})\..*proj(\.lora_[AB]\.default)?\.weight$")
    return [n for n, x in model.named_parameters() if x.requires_grad and wanted.search(n)]
