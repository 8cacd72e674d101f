"""`TrainingDrift`: steps of an optimizer on several backends, compared with the seeds' noise.

The rule of the verdict is in `seed_noise.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

import flexvarlen as fv
from flexvarlen.report.records import Record
from flexvarlen.runner.each import measure_each
from flexvarlen.runner.failures import Unsupported
from flexvarlen.runner.suite import Case, DeviceLost, Finding, GivenCases, Options, UnknownVariant
from flexvarlen.verify.drift.each import check_baseline
from flexvarlen.verify.drift.training.run import (
    UNPACKED,
    GradientLog,
    Schedule,
    nudge,
    step_of,
    train,
)
from flexvarlen.verify.experiment.batch import PackedBatch
from flexvarlen.verify.experiment.seed_noise import (
    FEWEST_SEEDS,
    PASSED,
    ROUNDING,
    SeedNoise,
    final_loss,
    is_rounding,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FEWEST_STEPS = 4  # a quarter of them must be one

MOST_ANGLES = 10
KEPT_BYTES = 16 * 2**30  # of the baseline's gradients, in the CPU's memory


@dataclass(frozen=True)
class TrainingCase:
    """One model, trained on the same rows by every variant.

    Attributes:
        model: its name in records.
        dtype: e.g. "bfloat16".
        tokens: of each step's row.
        steps: of AdamW, at least 4.
        seeds: at least 3 different ones; all variants share the first.
        lr: learning rate, constant.
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
            object.__setattr__(self, "baseline", check_baseline(self.baseline))

    @property
    def name(self) -> str:
        """For the progress bar."""
        return f"{self.model} {self.dtype}, {self.steps} steps"

    def data(self) -> dict[str, Any]:
        """As in a record."""
        return {
            "model": self.model,
            "dtype": self.dtype,
            "tokens": self.tokens,
            "steps": self.steps,
            "seeds": list(self.seeds),
            "lr": self.lr,
            "baseline": self.baseline,
            **({"text_crc32": self.text} if self.text else {}),
        }


class TrainingDrift(GivenCases):
    """Trainings of each model on each backend."""

    name: ClassVar[str] = "drift-training"

    def variants(self, case: Case, options: Options) -> Sequence[str]:
        """All backends."""
        return fv.BACKENDS

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
        trainings = _Trainings.of(case)
        seeds = trainings.baseline_losses()
        others = [name for name in variants if name not in (case.baseline, ROUNDING)]
        names = [ROUNDING, *others]
        try:
            found = measure_each(case.name, names, trainings.finding, options.device)
        except DeviceLost as error:  # without the noise of the baseline there is no verdict
            fatal = [finding for finding in error.findings if finding.measures.get("fatal")]
            raise DeviceLost(str(error), fatal) from error
        runs = {finding.variant: finding for finding in found}
        noise, twin = SeedNoise.of(list(map(final_loss, seeds))), _first(runs[ROUNDING])
        baseline = {"losses": seeds[0], "loss": final_loss(seeds[0]), "sigma": noise.sigma}
        return [
            Finding(case.baseline, "ok", measures=baseline | {"seed_losses": seeds}),
            *(_judged(finding, seeds[0], noise, twin) for finding in runs.values()),
        ]

    def section(self, records: Sequence[Record]) -> str:
        """Its tables."""
        from flexvarlen.verify.compare.drift_tables import section

        return section(records)


@dataclass(frozen=True)
class _Trainings:
    """The trainings of a case, and the baseline's gradients."""

    case: TrainingCase
    schedule: Schedule
    log: GradientLog

    @classmethod
    def of(cls, case: TrainingCase) -> _Trainings:
        """Refuses a baseline that cannot train before any training."""
        schedule = Schedule(tuple(case.make_batches()), case.steps, case.lr)
        model = case.make_model(case.seeds[0])
        try:
            step_of(case.baseline, model, schedule.sizes())
        except Unsupported as error:
            raise UnknownVariant(
                f"baseline must be a variant that trains here, got {case.baseline!r}: {error} "
                "Choose another."
            ) from error
        size = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
        return cls(case, schedule, GradientLog(angle_steps(case.steps, size)))

    def baseline_losses(self) -> list[list[float]]:
        """Of each seed; the first seed's gradients are kept."""
        first, *others = self.case.seeds
        losses = [self._train(self.case.baseline, first, self.log.keep)]
        return losses + [self._train(self.case.baseline, seed, _nothing) for seed in others]

    def finding(self, name: str) -> Finding:
        """One variant from the first seed; no verdict yet."""
        angles: list[float] = []

        def measure_angle(step: int, gradients: list[Tensor | None]) -> None:
            angle = self.log.angle(step, gradients)
            angles.extend([] if angle is None else [angle])

        losses = self._train(name, self.case.seeds[0], measure_angle)
        measures = {"losses": losses, "loss": final_loss(losses), "angles": angles}
        return Finding(name, "ok", measures=measures | {"angle_steps": list(self.log.steps)})

    def _train(
        self, name: str, seed: int, after_backward: Callable[[int, list[Tensor | None]], None]
    ) -> list[float]:
        model = self.case.make_model(seed)
        if name == ROUNDING:
            nudge(model, seed)
            name = self.case.baseline
        return train(model, name, self.schedule, seed, after_backward)


def angle_steps(steps: int, gradient_bytes: int) -> range:
    """The steps at which the baseline's gradients are kept: 10, or as many as memory holds."""
    most = min(MOST_ANGLES, KEPT_BYTES // max(1, gradient_bytes))
    return range(0, steps, math.ceil(steps / most)) if most else range(0)


def _nothing(step: int, gradients: list[Tensor | None]) -> None:
    pass


def _first(finding: Finding) -> float | None:
    """Degrees between a run's first gradient and the baseline's; None: not measured."""
    angles = finding.measures.get("angles")
    return angles[0] if angles else None


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
    verdict = noise.verdict([difference], losses, is_rounding(_first(finding), twin))
    sigmas = noise.in_sigmas(difference)
    measures = {
        **finding.measures,
        "verdict": verdict,
        "loss_difference": difference,
        "sigmas": sigmas,
        "equal": losses == baseline,
    }
    if verdict in PASSED:
        return Finding(finding.variant, "ok", None, measures)
    return Finding(finding.variant, "wrong", f"{verdict}, {sigmas:.2g} σ.", measures)
