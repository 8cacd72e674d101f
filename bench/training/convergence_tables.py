"""The verdict on trainings that began alike, and their table, from rows alone.

A variant is run on seeds of the padded baseline: the same parameters, documents and order. It is

1. "beyond seed noise", if over its n seeds the final losses (means of the last 50 steps) lie on
   average more than two standard errors, σ √(2/n), away from the baseline's of the same seeds, or
   on one seed more than 4 σ, or if a loss is not finite. σ is the standard deviation of the
   baseline's final losses, over 3 seeds at least;
2. else "not rounding", if the gradient of a first step is wrong (`convergence.py`): a small model
   learns in spite of a wrong attention, and losses alone would not tell;
3. else "no verdict" of fewer than 3 seeds;
4. else "within seed noise".

A single seed proves little: rounding alone parts two runs of one seed by about σ, and of twenty
such differences one is above 2 σ. The standard error is that of independent runs; those of one
seed differ less, so that a shift must come near 1.3 σ to be seen on five seeds. The words are those
of `flexvarlen.drift.training.verdict`.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from flexvarlen.drift.training.verdict import BAND_SIGMAS, BEYOND, NOT_ROUNDING, WITHIN
from flexvarlen.markdown import markdown
from flexvarlen.rows import Row, commit_of, commits_of, ran_on, rows_alike

SUITE = "convergence"
PADDED, UNPATCHED = "padded", "unpatched"
LAST_STEPS = 50
FEWEST_SEEDS = 3  # below, neither a standard deviation nor a mean says much
MOST_SIGMAS = 4.0  # of one seed
NO_VERDICT = "no verdict"


def final_loss(losses: Sequence[float]) -> float:
    """The mean over the last 50 steps, or the last quarter of fewer than 200."""
    count = _last(len(losses))
    return math.fsum(losses[-count:]) / count


def _last(steps: int) -> int:
    return min(LAST_STEPS, math.ceil(steps / 4))


@dataclass(frozen=True)
class Judged:
    """A variant's runs of a group.

    Attributes:
        runs: by seed, those that were trained to the end.
        verdict: see the module; "the baseline" of the baseline.
        difference: of the final loss from the baseline's, mean over the seeds that both have.
        errors: the same in standard errors.
        worst: of these seeds' differences the largest.
    """

    variant: str
    runs: dict[int, Row]
    verdict: str
    difference: float = math.nan
    errors: float = math.nan
    worst: float = math.nan


def groups_of(rows: Sequence[Row]) -> list[list[Row]]:
    """Runs that differ in the variant and the seed alone, on machines of one kind."""
    return rows_alike(rows, ("variant", "seed"))


def trained(rows: Sequence[Row], variant: str) -> dict[int, Row]:
    """A variant's runs that came to their end, by seed."""
    return {
        row.case["seed"]: row
        for row in sorted(rows, key=lambda row: row.case["seed"])
        if row.case["variant"] == variant and "losses" in row.measures
    }


def sigma_of(baseline: dict[int, Row]) -> float | None:
    """Of the baseline's final losses; None of fewer than 3 seeds."""
    if len(baseline) < FEWEST_SEEDS:
        return None
    return statistics.stdev([float(row.measures["final_loss"]) for row in baseline.values()])


def judged(rows: Sequence[Row]) -> list[Judged]:
    """Each variant of a group, the baseline first, by the rule above."""
    baseline = trained(rows, PADDED)
    sigma = sigma_of(baseline)
    names = dict.fromkeys(row.case["variant"] for row in rows)
    found = [_judge(name, trained(rows, name), baseline, sigma) for name in names]
    return sorted(found, key=lambda each: each.variant != PADDED)


def _judge(
    name: str, runs: dict[int, Row], baseline: dict[int, Row], sigma: float | None
) -> Judged:
    wrong = any(row.status == "wrong" for row in runs.values())
    if name == PADDED:
        return Judged(name, runs, NOT_ROUNDING if wrong else "the baseline")
    shared = [seed for seed in runs if seed in baseline]
    if sigma is None or not shared:
        return Judged(name, runs, NOT_ROUNDING if wrong else NO_VERDICT)
    gaps = [
        runs[seed].measures["final_loss"] - baseline[seed].measures["final_loss"] for seed in shared
    ]
    worst = max(gaps, key=lambda gap: math.inf if math.isnan(gap) else abs(gap))
    difference = math.fsum(gaps) / len(gaps)
    error = sigma * math.sqrt(2 / len(gaps))
    errors = abs(difference) / error if error > 0 else (0.0 if difference == 0 else math.inf)
    finite = all(math.isfinite(x) for row in runs.values() for x in row.measures["losses"])
    # Comparisons with NaN are False: a NaN anywhere is beyond.
    if not (errors <= BAND_SIGMAS and abs(worst) <= MOST_SIGMAS * sigma and finite):
        verdict = BEYOND
    elif wrong:
        verdict = NOT_ROUNDING
    else:
        verdict = WITHIN if len(shared) >= FEWEST_SEEDS else NO_VERDICT
    return Judged(name, runs, verdict, difference, errors, worst)


# --- tables --------------------------------------------------------------------------------------


def convergence_section(rows: Sequence[Row]) -> str:
    """A table of each group."""
    return "\n\n".join(_table(group) for group in groups_of(rows))


def title_of(rows: Sequence[Row]) -> str:
    """What a group trained, and where."""
    case = rows[0].case
    parameters = next((r.measures["parameters"] for r in rows if r.measures), 0)
    return (
        f"Llama of {parameters / 1e6:.1f}M parameters from scratch, {case['steps']} steps of up to "
        f"{case['tokens']:,} tokens, {case['dtype']}, {case['mode']}; "
        f"{ran_on(rows[0].environment)}"
    )


def _table(rows: Sequence[Row]) -> str:
    found = judged(rows)
    baseline = trained(rows, PADDED)
    sigma = sigma_of(baseline)
    lines = []
    for each in found:
        if not each.runs:
            row = next(row for row in rows if row.case["variant"] == each.variant)
            lines.append([f"`{each.variant}`", row.outcome, *["–"] * 8])
            continue
        runs = list(each.runs.values())
        begun = sum(row.case["variant"] == each.variant for row in rows)
        attends = _attends(runs)
        losses = [row.measures["final_loss"] for row in runs]
        errors = [r.measures["gradient_error"] / r.measures["peer_gradient_error"] for r in runs]
        speed = _median(each.runs, "tokens_per_s")
        bad = each.verdict in (BEYOND, NOT_ROUNDING)
        lines.append(
            [
                f"`{each.variant}`" + (f", {attends}" if attends else ""),
                f"**{each.verdict}**" if bad else each.verdict,
                str(len(runs)) if len(runs) == begun else f"{len(runs)} of {begun}",
                f"{statistics.fmean(losses):.4f}",
                _number(each.difference, "+.4f"),
                _number(each.errors, ".2f"),
                _number(each.worst, "+.4f"),
                f"{max(errors):.3g}",
                f"{speed:,.0f}",
                f"{_median(each.runs, 'peak_mib') / 1024:.1f}",
            ]
        )
    header = ["run", "verdict", "seeds", "final loss", "difference", "in standard errors"]
    header += ["worst seed", "first gradient's error / peer's", "tokens/s", "peak GiB"]
    pads = ""
    if baseline:
        positions = _median(baseline, "positions") / _median(baseline, "tokens")
        pads = f" A padded batch holds a whole step: {positions:.1f} positions a real token."
    spread = "not known" if sigma is None else f"{sigma:.4f} over {len(baseline)} seeds"
    commits, apart = commits_of(rows), ""
    if commits != commit_of(rows[0].environment):
        apart = ", of runs apart: a tenth between variants tells nothing"
    return (
        f"{title_of(rows)}{commits}:\n\n{markdown(header, lines)}\n\n"
        f"Final loss: the mean over the last {_last(rows[0].case['steps'])} steps; difference: "
        f"from the padded runs of the same seeds. The rule: over n seeds on average within "
        f"{BAND_SIGMAS:g} standard errors, σ √(2/n) as of independent runs, on none above "
        f"{MOST_SIGMAS:g} σ, at least {FEWEST_SEEDS} seeds, and no first gradient further off each "
        f"document alone than thrice what that dtype costs. σ is the padded runs' standard "
        f"deviation, {spread}. Tokens are the documents' own, medians over seeds{apart}."
        f"{pads}"
    )


def _attends(runs: Sequence[Row]) -> str:
    """The kernels that "auto" took, and in how many of the runs where not in all."""
    taken = Counter(
        kernel for row in runs for kernel in (row.measures.get("attends") or "").split(", ")
    )
    return ", ".join(
        kernel if count == len(runs) else f"{kernel} in {count} of {len(runs)}"
        for kernel, count in taken.most_common()
        if kernel
    )


def _median(runs: dict[int, Row], name: str) -> float:
    values = [row.measures[name] for row in runs.values() if row.measures.get(name) is not None]
    return statistics.median(values) if values else math.nan


def _number(value: float, form: str) -> str:
    return "–" if math.isnan(value) else format(value, form)
