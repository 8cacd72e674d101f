"""Training drift: N optimizer steps under several attentions, held against the noise of the seed.

The rule of the verdict stands in `verdict.py`. Rows of suite "drift-training": one a run,
and one whose variant is "verdict".
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flexvarlen.drift.op.failures import LOST, DeviceLostError, is_lost, status_of
from flexvarlen.drift.training.run import UNPACKED, GradientLog, Schedule, nudge, step_of, train
from flexvarlen.drift.training.verdict import ROUNDING, SUITE, last_quarter, verdict_row
from flexvarlen.equivalence.batch import PackedBatch
from flexvarlen.equivalence.variants import Unsupported, variant_names
from flexvarlen.rows import Row, Status, run_environment

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FEWEST_SEEDS = 3  # below, a standard deviation says nothing
FEWEST_STEPS = 4  # a quarter of them must be one

MOST_ANGLES = 10
KEPT_BYTES = 16 * 2**30  # of the baseline's gradients, in the CPU's memory

Append = Callable[[Row], None]
Progress = Callable[[int, int, str], None]
"""Called with the steps done, all steps, and what is being done."""


def training_drift(
    make_model: Callable[[int], PreTrainedModel],
    batches: Sequence[PackedBatch],
    variants: Sequence[str] = ("sdpa", "reference"),
    *,
    model: str,
    baseline: str = UNPACKED,
    steps: int = 20,
    seeds: Sequence[int] = (0, 1, 2),
    lr: float = 1e-3,
    every: int | None = None,
    commit: str | None = None,
    append: Append | None = None,
    progress: Progress | None = None,
) -> list[Row]:
    """Train the baseline from each seed, its rounding twin and each variant from the first.

    Args:
        make_model: a new model from a seed, on the device and in the dtype to train in; the same
            seed gives the same parameters. Where it ignores the seed (a checkpoint), the noise is
            that of the order of the rows alone.
        batches: rows of documents, on any device.
        variants: backends, or "transformers:" and an implementation (packed rows); "unpacked": each
            document in its own row, gradients accumulated.
        model: its name in the rows.
        baseline: one such variant.
        steps: of AdamW, at least 4.
        seeds: at least 3; the first is the one that all variants share.
        lr: constant.
        every: angles of gradients at every so many steps; default: at most 10 of them, fewer where
            the baseline's gradients would fill more than 16 GiB of the CPU's memory.
        commit: for the rows' environment, see `run_environment`.
        append: called with each row as it is made.
        progress: see `Progress`.

    Returns:
        The baseline's rows, one a seed; the twin's; the variants'; the verdict's.

    Raises:
        ValueError: too few steps or seeds, an unknown variant, or a baseline that cannot train.
        DeviceLostError: a variant broke the device, after its row.
    """
    if not batches:
        raise ValueError("batches must hold at least one row, got none; pack some documents.")
    if every is not None and every < 1:
        raise ValueError(f"every must be at least 1, got {every}; leave it out.")
    check_training([baseline, *variants], steps, seeds)
    names = [name for name in dict.fromkeys(variants) if name != baseline]
    schedule = Schedule(tuple(batches), steps, lr)
    first = make_model(seeds[0])
    _check_baseline(baseline, first, schedule)
    run = _Comparison(
        make_model=make_model,
        schedule=schedule,
        baseline=baseline,
        log=GradientLog(angle_steps(steps, every, gradient_bytes(first))),
        device=first.device,
        case={
            "model": model,
            "steps": steps,
            "tokens": batches[0].total_tokens,
            "dtype": str(first.dtype).removeprefix("torch."),
        },
        environment=run_environment(first.device, commit),
        append=append,
        progress=progress,
        total=steps * (len(seeds) + 1 + len(names)),
    )
    del first
    for seed in seeds:
        run.train(baseline, seed, keeps=seed == seeds[0])
    for name in (ROUNDING, *names):
        run.train(name, seeds[0])
    run.add(verdict_row(run.rows))
    return run.rows


def angle_steps(steps: int, every: int | None, gradient_bytes: int) -> range:
    """The steps at which the baseline's gradients are kept."""
    if every is None:
        most = min(MOST_ANGLES, KEPT_BYTES // max(1, gradient_bytes))
        if most == 0:
            return range(0)
        every = math.ceil(steps / most)
    return range(0, steps, every)


def gradient_bytes(model: PreTrainedModel) -> int:
    """Of one full gradient."""
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)


@dataclass
class _Comparison:
    """The shared state of one comparison."""

    make_model: Callable[[int], PreTrainedModel]
    schedule: Schedule
    baseline: str
    log: GradientLog
    device: torch.device
    case: dict[str, Any]
    environment: dict[str, Any]
    append: Append | None
    progress: Progress | None
    total: int
    rows: list[Row] = field(default_factory=list)
    done: int = 0

    def train(self, name: str, seed: int, *, keeps: bool = False) -> None:
        """One run, and its row."""
        _give_back()  # of the run before: an error's traceback held its tensors until it returned
        end = self.done + self.schedule.steps
        angles: list[float] = []

        def after_backward(step: int, gradients: list[Tensor | None]) -> None:
            if keeps:
                self.log.keep(step, gradients)
            elif name != self.baseline:
                angle = self.log.angle(step, gradients)
                angles.extend([] if angle is None else [angle])
            self._say(f"{name}, seed {seed}", 1)

        try:
            model = self.make_model(seed)
            if name == ROUNDING:
                nudge(model, seed)
            attention = self.baseline if name == ROUNDING else name
            losses = train(model, attention, self.schedule, seed, after_backward)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # what goes wrong there is this variant's
        except Exception as error:  # Kernel packages assert, and raise types of their own.
            self._failed(name, seed, error)
        else:
            del model
            measures = {"losses": losses, "last_quarter_loss": last_quarter(losses)}
            if name != self.baseline:
                measures |= {"angles": angles, "angle_steps": list(self.log.steps)}
            self.add(self._row(name, seed, "ok", None, measures))
        self._say("", end - self.done)

    def _failed(self, name: str, seed: int, error: Exception) -> None:
        """The row of what a run raised; its end, if the device is of no use after it."""
        status, reason = status_of(error)
        if isinstance(error, Unsupported):
            status = "unsupported"
        if status == "unsupported":
            reason = one_line_of(error)
        if not is_lost(error, self.device):
            self.add(self._row(name, seed, status, reason))
            return
        self.add(self._row(name, seed, status, reason, {LOST: True}))
        raise DeviceLostError.after(f"{name}, seed {seed}, of {self.case['model']}", error) from (
            error
        )

    def _row(
        self,
        name: str,
        seed: int,
        status: Status,
        reason: str | None,
        measures: dict[str, Any] | None = None,
    ) -> Row:
        if name == self.baseline and status != "ok" and LOST not in (measures or {}):
            raise ValueError(
                f"baseline must be a variant that trains here, got {name!r}: {reason} Choose "
                "another, fewer tokens or fewer layers."
            )
        shared = {"baseline": self.baseline, "lr": self.schedule.lr}
        case = self.case | {"variant": name, "seed": seed}
        return Row(SUITE, case, status, reason, shared | (measures or {}), self.environment)

    def add(self, row: Row) -> None:
        self.rows.append(row)
        if self.append is not None:
            self.append(row)

    def _say(self, what: str, steps: int) -> None:
        self.done += steps
        if self.progress is not None:
            self.progress(self.done, self.total, what)


def one_line_of(error: Exception) -> str:
    """A refusal as a reason: its own sentence."""
    return " ".join(str(error).split())[:300]


def _give_back() -> None:
    if torch.cuda.is_available():  # half a second a run, which the CPU's memory need not wait for
        gc.collect()
        torch.cuda.empty_cache()


def check_training(variants: Sequence[str], steps: int, seeds: Sequence[int]) -> None:
    """Raise a ValueError for arguments that `training_drift` would refuse, before any work."""
    packed = [name for name in variants if name != UNPACKED]
    if "all" in packed:
        raise ValueError("variants must be names, got 'all'; name them.")
    variant_names(packed, torch.device("cpu"))  # the device matters for "all" alone
    if steps < FEWEST_STEPS:
        raise ValueError(f"steps must be at least {FEWEST_STEPS}, got {steps}; take more.")
    if len(set(seeds)) != len(seeds) or len(seeds) < FEWEST_SEEDS:
        raise ValueError(
            f"seeds must be at least {FEWEST_SEEDS} different ones, got {tuple(seeds)}; the noise "
            "is measured over them."
        )


def _check_baseline(name: str, model: PreTrainedModel, schedule: Schedule) -> None:
    """Refuse before any work."""
    try:
        step_of(name, model, schedule.sizes())
    except Unsupported as error:
        raise ValueError(
            f"baseline must be a variant that trains here, got {name!r}: {error} Choose another."
        ) from error
