"""Suite "drift-training": steps of an optimizer on several backends, beside the seeds' noise.

Every variant starts from the same parameters and takes the same rows in the same order; the rule of
the verdict is in `seed_noise.py`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from flexvarlen.attention.backends.registry import BACKENDS
from flexvarlen.report.records import Record
from flexvarlen.runner.each import measure_each
from flexvarlen.runner.failures import Unsupported
from flexvarlen.runner.suite import Case, DeviceLost, Finding, GivenCases, Options, UnknownVariant
from flexvarlen.verify.experiment.batch import PackedBatch
from flexvarlen.verify.experiment.gradient_angles import GradientLog, Gradients
from flexvarlen.verify.experiment.inputs import ModelInputs
from flexvarlen.verify.experiment.seed_noise import (
    FEWEST_SEEDS,
    PASSED,
    ROUNDING,
    SeedNoise,
    final_loss,
    is_rounding,
)
from flexvarlen.verify.experiment.step import causal_step, run_step
from flexvarlen.verify.experiment.variant import THEIRS, Sizes, backend_name, make_variant

if TYPE_CHECKING:
    from transformers import PreTrainedModel

UNPACKED = "unpacked"
"""The variant without packing: each document in a row of its own, transformers' own sdpa."""

FEWEST_STEPS = 4  # a quarter of them must be one

MOST_ANGLES = 10
KEPT_BYTES = 16 * 2**30  # of the baseline's gradients, in the CPU's memory

Step = Callable[[PackedBatch], float]
"""Forward and backward of a row: its loss; the gradients are in the parameters' `.grad`."""
AfterBackward = Callable[[int, Gradients], None]
"""Gets the step and the gradients of all parameters."""


@dataclass(frozen=True)
class TrainingCase:
    """One model, trained on the same rows by every variant.

    Attributes:
        model: its name in records.
        dtype: e.g. "bfloat16".
        tokens: of each step's row.
        steps: of AdamW, at least 4.
        seeds: at least 3 different ones; all variants share the first.
        lr: learning rate, constant; all else is torch's default.
        baseline: a backend, or "unpacked": each document in a row of its own.
        make_model: a new model from a seed, on the device and in the dtype to train in; the same
            seed gives the same parameters. Where it ignores the seed (a checkpoint), the noise is
            that of the order of the rows alone.
        make_batches: the rows of documents.
        text: the checksum of the caller's files; 0 for Python's help topics.
    """

    model: str
    dtype: str
    tokens: int
    steps: int
    seeds: tuple[int, ...]
    lr: float
    baseline: str
    make_model: Callable[[int], PreTrainedModel] = field(compare=False, repr=False)
    make_batches: Callable[[], Sequence[PackedBatch]] = field(compare=False, repr=False)
    text: int = 0

    def __post_init__(self) -> None:
        if self.steps < FEWEST_STEPS:
            raise ValueError(f"steps must be at least {FEWEST_STEPS}, got {self.steps}; take more.")
        if len(set(self.seeds)) != len(self.seeds) or len(self.seeds) < FEWEST_SEEDS:
            raise ValueError(
                f"seeds must be at least {FEWEST_SEEDS} different ones, got {self.seeds}; the "
                "noise is measured over them."
            )
        if self.baseline != UNPACKED:
            object.__setattr__(self, "baseline", backend_name("baseline", self.baseline))

    @property
    def name(self) -> str:
        """For the progress bar."""
        return f"{self.model} {self.dtype}, {self.steps} steps"

    def data(self) -> dict[str, Any]:
        """As in a record."""
        fields = ("model", "dtype", "tokens", "steps", "lr", "baseline")
        data = {name: getattr(self, name) for name in fields} | {"seeds": list(self.seeds)}
        return data | ({"text_crc32": self.text} if self.text else {})


class TrainingDrift(GivenCases):
    """Trainings of each model on each backend."""

    name: ClassVar[str] = "drift-training"

    def variants(self, case: Case, options: Options) -> Sequence[str]:
        """All backends."""
        return BACKENDS

    def controls(self, case: Case) -> Sequence[str]:
        """The baseline, and its rounding twin."""
        assert isinstance(case, TrainingCase)
        return (case.baseline, ROUNDING)

    def measure(self, case: Case, variants: Sequence[str], options: Options) -> Sequence[Finding]:
        """Train the baseline from each seed, its rounding twin, and each variant from the first.

        Raises:
            UnknownVariant: the baseline cannot train here.
            DeviceLost: a variant broke the device; only its record is kept.
        """
        assert isinstance(case, TrainingCase)
        trainings = _Trainings(case)
        seeds = trainings.baseline_losses()
        others = [name for name in variants if name not in self.controls(case)]
        names = [ROUNDING, *others]
        try:
            found = measure_each(case.name, names, trainings.finding, options.device)
        except DeviceLost as error:  # without the noise of the baseline there is no verdict
            fatal = [finding for finding in error.findings if finding.measures.get("fatal")]
            raise DeviceLost(str(error), fatal) from error
        noise = SeedNoise.of(list(map(final_loss, seeds)))
        twin = next(_first_angle(finding) for finding in found if finding.variant == ROUNDING)
        baseline = {"losses": seeds[0], "loss": final_loss(seeds[0]), "sigma": noise.sigma}
        return [
            Finding(case.baseline, "ok", measures=baseline | {"seed_losses": seeds}),
            *(_judged(finding, seeds[0], noise, twin) for finding in found),
        ]

    def section(self, records: Sequence[Record]) -> str:
        """Its tables."""
        from flexvarlen.verify.compare.drift_tables import section

        return section(records)


class _Trainings:
    """The trainings of a case on its rows, and the baseline's gradients.

    Raises:
        UnknownVariant: the baseline cannot train here.
    """

    def __init__(self, case: TrainingCase) -> None:
        self.case, self.batches = case, tuple(case.make_batches())
        model = case.make_model(case.seeds[0])
        try:
            step_of(case.baseline, model, self.batches)
        except Unsupported as error:
            raise UnknownVariant(
                f"baseline must be a variant that trains here, got {case.baseline!r}: {error} "
                "Choose another."
            ) from error
        size = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
        self.log = GradientLog(angle_steps(case.steps, size))

    def baseline_losses(self) -> list[list[float]]:
        """Of each seed; the first seed's gradients are kept."""
        first, *others = self.case.seeds
        losses = [self.losses(self.case.baseline, first, self.log.keep)]
        return losses + [self.losses(self.case.baseline, seed) for seed in others]

    def finding(self, name: str) -> Finding:
        """One variant from the first seed; no verdict yet."""
        angles: list[float] = []

        def measure_angle(step: int, gradients: Gradients) -> None:
            angle = self.log.angle(step, gradients)
            angles.extend([] if angle is None else [angle])

        losses = self.losses(name, self.case.seeds[0], measure_angle)
        measures = {"losses": losses, "loss": final_loss(losses), "angles": angles}
        return Finding(name, "ok", measures=measures | {"angle_steps": list(self.log.steps)})

    def losses(
        self, name: str, seed: int, after_backward: AfterBackward = lambda step, gradients: None
    ) -> list[float]:
        """The loss of each step of one training, before its update: over all labels of the row.

        Parameters of half precision are updated through a copy in fp32, as in mixed-precision
        training: else most of AdamW's updates would be rounded away.

        Args:
            name: a backend, "transformers:" and an implementation of theirs, `UNPACKED`, or
                `ROUNDING`.
            seed: of the parameters, of the rows' order, and of dropout.

        Raises:
            Unsupported: the variant cannot train here.
        """
        model = self.case.make_model(seed)
        if name == ROUNDING:
            nudge(model, seed)
            name = self.case.baseline
        step = step_of(name, model, self.batches)
        torch.manual_seed(seed)
        parameters = [p for p in model.parameters() if p.requires_grad]
        optimizer = _MasterAdamW(parameters, self.case.lr)
        losses = []
        for index, row in enumerate(shuffled(len(self.batches), self.case.steps, seed)):
            losses.append(step(self.batches[row].to(model.device)))
            after_backward(index, [p.grad for p in parameters])
            optimizer.step()
        return losses


# ---- a training ----


def shuffled(rows: int, steps: int, seed: int) -> list[int]:
    """Which row each step takes: all of them, shuffled, before any comes again."""
    rng = random.Random(seed)
    order: list[int] = []
    while len(order) < steps:
        order += rng.sample(range(rows), rows)
    return order[:steps]


def step_of(name: str, model: PreTrainedModel, rows: Sequence[PackedBatch]) -> Step:
    """Forward and backward of one of these rows under that variant; raises `Unsupported`."""
    variant = make_variant(f"{THEIRS}sdpa" if name == UNPACKED else name, model, Sizes.of(*rows))

    def step(row: PackedBatch) -> float:
        labels = row.labels()
        return causal_step(variant, row, labels, row.counted(labels)).loss

    def unpacked(row: PackedBatch) -> float:
        counted = row.counted(row.labels())
        options = {"num_items_in_batch": counted, "use_cache": False}
        documents = row.input_ids.split(list(row.lengths), dim=1)
        forwards = [
            ModelInputs({"input_ids": ids, "labels": ids, **options})
            for ids in documents
            if ids.shape[1] > 1  # else there is nothing to predict
        ]
        losses = run_step(
            variant,
            forwards,
            lambda loss, _: loss.backward(),
            take=lambda output: output.loss,
            keep=lambda loss, _: loss.detach(),
        )
        return float(sum(losses))

    return unpacked if name == UNPACKED else step


def nudge(model: PreTrainedModel, seed: int) -> None:
    """Move each parameter by a unit in its last place (or two), up or down at random."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            signs = torch.randint(0, 2, p.shape, device=p.device, dtype=torch.int8) * 2 - 1
            wide = torch.promote_types(p.dtype, torch.float32)
            moved = p.to(wide) + p.to(wide) * signs * torch.finfo(p.dtype).eps
            p.copy_(moved)


class _MasterAdamW:
    """AdamW on parameters of fp32, and on copies in fp32 of all others."""

    def __init__(self, parameters: Sequence[nn.Parameter], lr: float) -> None:
        self._pairs = [
            (p, p if p.dtype == torch.float32 else p.detach().float()) for p in parameters
        ]
        self._adam = torch.optim.AdamW([master for _, master in self._pairs], lr=lr)

    def step(self) -> None:
        half = [(p, master) for p, master in self._pairs if master is not p]
        for p, master in half:
            master.grad = None if p.grad is None else p.grad.float()
        self._adam.step()
        with torch.no_grad():
            for p, master in half:
                p.copy_(master)
                master.grad = None


# ---- angles and verdicts ----


def angle_steps(steps: int, gradient_bytes: int) -> range:
    """The steps at which the baseline's gradients are kept: 10, or as many as memory holds."""
    most = min(MOST_ANGLES, KEPT_BYTES // max(1, gradient_bytes))
    return range(0, steps, math.ceil(steps / most)) if most else range(0)


def _first_angle(finding: Finding) -> float | None:
    """Degrees between a run's first gradient and the baseline's; None: not measured."""
    return next(iter(finding.measures.get("angles", ())), None)


def _judged(
    finding: Finding, baseline: list[float], noise: SeedNoise, twin: float | None
) -> Finding:
    """A training with its verdict; the rounding twin has none.

    Args:
        baseline: its losses, from the same seed.
        twin: degrees of the rounding twin's first gradient.
    """
    if finding.status != "ok" or finding.variant == ROUNDING:
        return finding
    losses = finding.measures["losses"]
    difference = final_loss(losses) - final_loss(baseline)
    verdict = noise.verdict([difference], losses, is_rounding(_first_angle(finding), twin))
    sigmas = noise.in_sigmas(difference)
    measures = {
        **finding.measures,
        "verdict": verdict,
        "loss_difference": difference,
        "sigmas": sigmas,
        "equal": losses == baseline,
    }
    if verdict in PASSED:
        return replace(finding, measures=measures)
    reason = f"{verdict}, {sigmas:.2g} σ."
    return replace(finding, status="wrong", reason=reason, measures=measures)
