"""The check of one variant, as measures of a row: errors, leak, other packings of its tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from flexvarlen.equivalence.accuracy import Errors, Judgement, errors_of_packed, judge
from flexvarlen.equivalence.batch import PackedBatch
from flexvarlen.equivalence.isolation import Leak, find_leak
from flexvarlen.equivalence.truth import Truth
from flexvarlen.equivalence.variants import Variant, counted_labels
from flexvarlen.measure import watch_compilation

LISTED_DOCUMENTS = 8  # that a sentence names


@dataclass(frozen=True)
class Checks:
    """What variants are checked against.

    Attributes:
        truth: of the batch.
        others: other packings of its tokens, over which recompilations are counted.
        last: the truth of the last of them, forward alone; None if there are none.
        dtype: that is tested.
        compile: whether variants are compiled, so that their caches should be cold.
        seed: of the tokens that replace others.
    """

    truth: Truth
    others: Sequence[PackedBatch]
    last: Truth | None
    dtype: torch.dtype
    compile: bool
    seed: int


@dataclass(frozen=True)
class Checked:
    """Measures for the row, and the wall seconds of a step that compiled nothing."""

    measures: dict[str, Any]
    step_s: float


def check_variant(
    variant: Variant, checks: Checks, say: Callable[[str], None], did: Callable[[], None]
) -> Checked:
    """Run the variant on all of `checks`.

    Args:
        variant: not yet called.
        checks: see there.
        say: told what is being done.
        did: called after each part: once, once for each pair of halves, once.
    """
    truth = checks.truth
    say(f"{variant.name}: errors")
    begin = time.perf_counter()
    with watch_compilation() as stats, _fresh_cache(checks.compile):
        out = variant.step(truth.batch, truth.labels, truth.counted)
    measures: dict[str, Any] = {
        "first_step_s": time.perf_counter() - begin,
        "compile_s": stats.compile_s,
        "graph_breaks": stats.graph_breaks,
    }
    trained = variant.model if variant.train else None
    errors = errors_of_packed(out.logits, out.loss, truth.batch, truth.oracle, trained)
    judgement = judge(errors, truth.peer, checks.dtype)
    del out
    did()
    say(f"{variant.name}: leak")
    leak = find_leak(variant, truth.batch, checks.seed, did)
    begin = time.perf_counter()
    variant.step(truth.batch, truth.labels, truth.counted)
    step_s = time.perf_counter() - begin
    say(f"{variant.name}: other packings")
    more, why = _other_packings(variant, checks)
    did()
    measures |= error_measures(errors) | _limit_measures(judgement) | _leak_measures(leak) | more
    return Checked(measures | _verdict(leak, judgement.why_wrong or why), step_s)


def _fresh_cache(compile: bool) -> AbstractContextManager[Any]:
    """Inductor caches of this variant alone, so that each is compiled cold."""
    if not compile:
        return nullcontext()
    from torch._inductor.utils import fresh_cache

    # Kept on disk until the process ends: compiled code may be loaded from there late.
    cache: AbstractContextManager[Any] = fresh_cache(delete=False)
    return cache


def _other_packings(variant: Variant, checks: Checks) -> tuple[dict[str, Any], str | None]:
    """Recompilations over them, and errors on the last; why those are wrong, or None."""
    out = None
    with watch_compilation() as stats:
        for other in checks.others:
            labels = other.labels()
            out = variant.step(other, labels, counted_labels(labels))
    measures: dict[str, Any] = {
        "other_packings": len(checks.others),
        "recompiles": stats.recompilations,
        "recompile_reasons": stats.first_reasons(),
    }
    last = checks.last
    if out is None or last is None:
        return measures, None
    # The step's loss was over all documents, perhaps not just the oracle's: the logits are judged.
    errors = errors_of_packed(out.logits, last.oracle.loss, last.batch, last.oracle, None)
    judgement = judge(errors, last.peer, checks.dtype)
    measures |= {
        "repacked_logits_max": errors.logits.max,
        "repacked_logits_limit": judgement.logits_limit,
    }
    wrong = judgement.why_wrong
    return measures, None if wrong is None else f"on another packing of the tokens, {wrong}"


def error_measures(errors: Errors) -> dict[str, Any]:
    """The errors, as a row's measures."""
    return {
        "logits_max": errors.logits.max,
        "logits_mean": errors.logits.mean,
        "loss_error": errors.loss,
        "gradient_max": errors.gradient_max,
        "gradient_mean": errors.gradient_mean,
        "gradients": {name: (gap.max, gap.mean) for name, gap in errors.gradients.items()},
        "argmax_agreement": errors.argmax,
    }


def _limit_measures(judgement: Judgement) -> dict[str, Any]:
    return {
        "logits_limit": judgement.logits_limit,
        "loss_limit": judgement.loss_limit,
        "worst_gradient": judgement.worst_parameter,
        "worst_gradient_share": judgement.worst_share,
    }


def _leak_measures(leak: Leak) -> dict[str, Any]:
    return {
        "leaked_outputs": len(leak.outputs),
        "leaked_gradients": None if leak.gradients is None else len(leak.gradients),
        "leaked_documents": len(leak.documents),
        "backward_repeats": leak.backward_repeats,
    }


def _verdict(leak: Leak, why_wrong: str | None) -> dict[str, Any]:
    if not leak.documents:
        return {"verdict": "right" if why_wrong is None else "wrong", "why": why_wrong}
    what = "logits" if leak.outputs else "token gradients"
    found = sorted(leak.outputs or leak.documents)
    listed = ", ".join(map(str, found[:LISTED_DOCUMENTS]))
    more = ", …" if len(found) > LISTED_DOCUMENTS else ""
    plural = "s" if len(found) > 1 else ""
    change = "change" if leak.outputs else "depend on, or reach,"
    tail = "with other documents' tokens." if leak.outputs else "other documents."
    return {
        "verdict": "leaks",
        "why": f"the {what} of document{plural} {listed}{more} {change} {tail}",
    }
