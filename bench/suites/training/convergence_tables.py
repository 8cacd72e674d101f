"""The verdicts on trainings that began alike, with their table and chart, from records alone.

The baseline is the padded training; the rule is that of `flexvarlen.verify.experiment.seed_noise`.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flexvarlen.report.figure import LEGEND, chart, lines, save
from flexvarlen.report.records import Record, commit_of, commits_of, grouped, provenance, ran_on
from flexvarlen.report.table import NOTHING, Column, Table
from flexvarlen.verify.experiment.seed_noise import (
    BEYOND,
    MOST_SIGMAS,
    MOST_STANDARD_ERRORS,
    NOT_ROUNDING,
    WITHIN,
    SeedNoise,
)

PADDED, UNPATCHED = "padded", "unpatched"


@dataclass(frozen=True)
class TrainingOutcome:
    """A variant's trainings.

    Attributes:
        difference: of the final loss from the baseline's, mean over the seeds that both have.
        standard_errors: the same, in standard errors.
        worst: the largest of these seeds' differences.
    """

    variant: str
    records: Sequence[Record]
    verdict: str
    difference: float = math.nan
    standard_errors: float = math.nan
    worst: float = math.nan

    @property
    def runs(self) -> dict[int, Record]:
        return ended(self.records)

    def median(self, measure: str) -> float:
        """Over the seeds; NaN if none has it."""
        found = [r.measures[measure] for r in self.runs.values() if r.measures.get(measure)]
        return statistics.median(found) if found else math.nan


def ended(records: Sequence[Record]) -> dict[int, Record]:
    found = {r.case["seed"]: r for r in records if "losses" in r.measures}
    return dict(sorted(found.items()))


def noise_of(baseline: dict[int, Record]) -> SeedNoise:
    """The noise of the seeds, from the baseline's trainings."""
    return SeedNoise.of([float(r.measures["final_loss"]) for r in baseline.values()])


def outcomes(records: Sequence[Record]) -> list[TrainingOutcome]:
    """Each variant by the rule, the baseline first."""
    by_variant = grouped(records, "variant")
    baseline = ended(by_variant.get(PADDED, []))
    found = [_outcome(name, own, baseline) for name, own in by_variant.items()]
    return sorted(found, key=lambda each: each.variant != PADDED)


def _outcome(name: str, records: Sequence[Record], baseline: dict[int, Record]) -> TrainingOutcome:
    runs, noise = ended(records), noise_of(baseline)
    is_right = all(r.status != "wrong" for r in runs.values())
    if name == PADDED:
        return TrainingOutcome(name, records, "the baseline" if is_right else NOT_ROUNDING)
    gaps = [
        run.measures["final_loss"] - baseline[seed].measures["final_loss"]
        for seed, run in runs.items()
        if seed in baseline
    ]
    losses = [loss for run in runs.values() for loss in run.measures["losses"]]
    verdict = noise.verdict(gaps, losses, is_right)
    if noise.sigma is None or not gaps:
        return TrainingOutcome(name, records, verdict)
    worst = max(gaps, key=lambda gap: math.inf if math.isnan(gap) else abs(gap))
    mean = math.fsum(gaps) / len(gaps)
    return TrainingOutcome(name, records, verdict, mean, noise.standard_errors(gaps), worst)


# --- the table -----------------------------------------------------------------------------------


def _run(each: TrainingOutcome) -> str:
    """The variant, and the kernels that "auto" took, with how many runs if not all."""
    taken = Counter(
        kernel
        for r in each.runs.values()
        for kernel in (r.measures.get("attends") or "").split(", ")
        if kernel
    )
    kernels = [
        kernel if count == len(each.runs) else f"{kernel} in {count} of {len(each.runs)} runs"
        for kernel, count in taken.most_common()
    ]
    return f"`{each.variant}`" + (f" ({'; '.join(kernels)})" if kernels else "")


def _verdict(each: TrainingOutcome) -> str:
    if not each.runs:
        return each.records[0].outcome
    return f"**{each.verdict}**" if each.verdict in (BEYOND, NOT_ROUNDING) else each.verdict


def _seeds(each: TrainingOutcome) -> str:
    ran, begun = len(each.runs), len(each.records)
    return str(ran) if ran == begun else f"{ran} of {begun}"


def _number(
    value: Callable[[TrainingOutcome], float], form: str
) -> Callable[[TrainingOutcome], str]:
    def cell(each: TrainingOutcome) -> str:
        number = value(each) if each.runs else math.nan
        return NOTHING if math.isnan(number) else format(number, form)

    return cell


def _gradient_ratio(each: TrainingOutcome) -> float:
    return max(
        float(r.measures["gradient_error"] / r.measures["baseline_gradient_error"])
        for r in each.runs.values()
    )


def _final(each: TrainingOutcome) -> float:
    return statistics.fmean(r.measures["final_loss"] for r in each.runs.values())


COLUMNS = (
    Column("run", _run),
    Column("verdict", _verdict),
    Column("seeds", _seeds),
    Column("final loss", _number(_final, ".4f")),
    Column("difference", _number(lambda each: each.difference, "+.4f")),
    Column("in standard errors", _number(lambda each: each.standard_errors, ".2f")),
    Column("worst seed", _number(lambda each: each.worst, "+.4f")),
    Column("first gradient's error ÷ baseline's", _number(_gradient_ratio, ".3g")),
    Column("tokens/s", _number(lambda each: each.median("tokens_per_s"), ",.0f")),
    Column("peak GiB", _number(lambda each: each.median("peak_mib") / 1024, ".1f")),
)


def table(records: Sequence[Record]) -> Table:
    found, case = outcomes(records), records[0].case
    baseline = ended([r for r in records if r.case["variant"] == PADDED])
    sigma = noise_of(baseline).sigma
    spread = "not known" if sigma is None else f"{sigma:.4f} over {len(baseline)} seeds"
    parameters = next((r.measures["parameters"] for r in records if r.measures), 0)
    commits = commits_of(records)
    notes = [
        "Final loss: the mean over the last 50 steps. Difference: from the padded runs of the same "
        f"seeds. σ is the padded runs' standard deviation, {spread}. The verdict is within seed "
        f"noise if over n seeds the mean difference is at most {MOST_STANDARD_ERRORS:g} standard "
        f"errors σ √(2/n), no seed's is above {MOST_SIGMAS:g} σ, "
        "and the first gradient is right.",
        "Tokens are the documents' own; medians over the seeds."
        + (
            " The runs are not of one process: differences of a tenth in tokens/s mean nothing."
            if commits != commit_of(records[0].environment)
            else ""
        ),
    ]
    if baseline and found[0].variant == PADDED:
        positions = found[0].median("positions") / found[0].median("tokens")
        notes[1] += f" A padded batch has {positions:.1f} positions for each token."
    title = (
        f"Llama of {parameters / 1e6:.1f}M parameters from scratch, {case['steps']} steps of up to "
        f"{case['tokens']:,} tokens, {case['dtype']}, eager; {ran_on(records[0].environment)}"
        f"{commits}"
    )
    return Table.of(found, COLUMNS, title, lambda each: each.verdict == BEYOND, notes)


# --- the chart -----------------------------------------------------------------------------------

DRAWN = ("auto", "fa3", "fa4", "fa2", "varlen", "flex", "sdpa")
"""The backends of the chart, beside the one that is not patched."""
POINTS = 20  # of a line


def draw(records: Sequence[Record], folder: Path) -> list[Path]:
    """How far the losses are from the padded runs'; none without 3 of those and runs to compare."""
    found = {each.variant: each for each in outcomes(records) if each.runs}
    drawn, leak = {x: found[x] for x in DRAWN if x in found}, found.get(UNPATCHED)
    padded = found[PADDED].runs if PADDED in found else {}
    noise = noise_of(padded)
    if noise.sigma is None or not drawn or leak is None:
        return []
    curves = {seed: _curve(r) for seed, r in padded.items()}
    within = sum(each.verdict == WITHIN for each in drawn.values())
    case, parameters = records[0].case, next(iter(leak.runs.values())).measures["parameters"]
    seeds = min(len(each.runs) for each in drawn.values())
    figure, panels = chart(
        f"Packed training learns what padded training learns: {within} of {len(drawn)} backends "
        f"end within the noise of seeds; unpatched, the loss is {leak.difference:.2f} nats higher",
        f"Llama of {parameters / 1e6:.1f}M parameters, {case['steps']} steps of up to "
        f"{case['tokens']:,} tokens, {case['dtype']}; means over {seeds} seeds (not patched: "
        f"{len(leak.runs)}). Grey: the verdict's ±{MOST_STANDARD_ERRORS:g} standard errors of a "
        f"final loss's difference, σ √(2/n) for n seeds, σ = {noise.sigma:.4f}. Backends not drawn "
        f"are in the table. {provenance(records)}",
        panels=2,
    )
    for axes, shown in zip(panels, (drawn, {UNPATCHED: leak}), strict=True):
        count = min(len(each.runs) for each in shown.values())
        most = noise.allowed(count)
        axes.axhspan(-most, most, color="#DDDDDD", linewidth=0)
        lines(
            axes,
            {name: _difference(each, curves) for name, each in shown.items()},
            x_label="step",
            y_label="loss − loss of padded training, nats",
            log_x=False,
            labels={UNPATCHED: "packed,\nnot patched"},
            legend=False,
        )
    handles = [axes.get_legend_handles_labels() for axes in panels]
    panels[1].legend(*(a + b for a, b in zip(*handles, strict=True)), **LEGEND)
    return [save(figure, folder / "convergence.png")]


def _curve(record: Record) -> dict[float, float]:
    """Means over `POINTS` equal parts of the steps, by the last step of each."""
    losses = record.measures["losses"]
    size = max(1, len(losses) // POINTS)
    return {
        float(end): statistics.fmean(losses[end - size : end])
        for end in range(size, len(losses) + 1, size)
    }


def _difference(
    each: TrainingOutcome, padded: Mapping[int, Mapping[float, float]]
) -> dict[float, float]:
    """From the padded runs of the same seeds, mean over the seeds."""
    curves = {seed: _curve(r) for seed, r in each.runs.items() if seed in padded}
    return {
        x: statistics.fmean(curve[x] - padded[seed][x] for seed, curve in curves.items())
        for x in next(iter(curves.values()), {})
    }
