"""What is wrong with a kernel whose numbers are: a sentence that names the bug, with its numbers.

Hypotheses are computed in fp64; the one under which the kernel's numbers are within the rule is
named, or the one that explains nearly all of the error. What fits none is looked at as noise.
"""

from __future__ import annotations

import math

from torch import Tensor

from flexvarlen.drift.op.blame_gradients import blame_gradients
from flexvarlen.drift.op.cases import spans_of
from flexvarlen.drift.op.exact import GRADIENTS, Answer
from flexvarlen.drift.op.fit import NEARLY_ALL, Fit, best_of, least_squares, near
from flexvarlen.drift.op.hypotheses import structural_hypotheses, truth_hypothesis
from flexvarlen.drift.op.judge import Limit, Truth, Verdict
from flexvarlen.drift.op.trial import Trial, best_scale, tokens_to_try


def blame(truth: Truth, answer: Answer, verdict: Verdict) -> str:
    """Name what is wrong.

    Args:
        truth: what is right.
        answer: all documents in one call.
        verdict: of `answer`; something in it is wrong.

    Returns:
        One or two sentences. Reads the device often.
    """
    lost = _not_finite(truth, answer)
    if lost is not None:
        return lost
    wrong = verdict.wrong
    if "out" in wrong:
        return _blame_output(truth, answer)
    sentences = []
    if "lse" in wrong:
        sentences.append(_blame_lse(truth, answer))
    gradients = [name for name in GRADIENTS if name in wrong]
    if gradients:
        sentences.append(blame_gradients(truth, answer, verdict))
    return " ".join(sentences)


def _not_finite(truth: Truth, answer: Answer) -> str | None:
    for name, x in answer.parts().items():
        lost = ~x.isfinite()
        count = int(lost.sum())
        if count:
            by_token = lost.any(0) if name == "lse" else lost.flatten(1).any(1)
            token = int(by_token.int().argmax())
            return (
                f"{count:,} of {x.numel():,} values of {name} are not finite, first at "
                f"{_place(truth, token)}: rows that are not written, or an overflow."
            )
    return None


def _place(truth: Truth, token: int) -> str:
    document = truth.document_of(token)
    start, _ = spans_of(truth.case.lengths)[document]
    return f"token {token - start} of document {document}"


# --- the output ----------------------------------------------------------------------------------


def _blame_output(truth: Truth, answer: Answer) -> str:
    """Why the output is wrong."""
    error_T = (answer.out.double() - truth.exact.out).abs().flatten(1).amax(1)
    worst = int(error_T.argmax())
    rows = tokens_to_try(truth, error_T)
    found, exact = answer.out[rows], truth.exact.out[rows]
    limit = truth.limit_of_rows("out", found.dtype, rows)
    trial = Trial(truth, rows)
    fits = [
        Fit.of(each.sentence, found, trial.outputs(each), exact, limit)
        for each in structural_hypotheses(truth, truth.document_of(worst))
    ]
    fits.append(_fit_of_factor(found, exact, limit))
    best = best_of(fits)
    if not (best.explains and best.left <= NEARLY_ALL):  # a scale takes over a hundred trials
        best = best_of([best, _fit_of_scale(trial, found, exact, limit)])
    if best.explains:
        return best.said("out")
    noise = truth.noise("out", answer.out)
    if noise.is_rounding:
        return noise.sentence()
    too_far = float((error_T > limit.max).double().mean())
    return (
        f"no hypothesis fits: out is furthest off at {_place(truth, worst)}, by "
        f"{float(error_T.max()):.3g}; {too_far:.1%} of the tokens are off by more than the rule "
        f"allows; the nearest hypothesis ({best.sentence}) leaves {best.left:.0%} of the error."
    )


def _fit_of_scale(trial: Trial, found: Tensor, exact: Tensor, limit: Limit) -> Fit:
    """The scale that fits best; a well-known factor near it is named."""
    right = truth_hypothesis(trial.truth)
    fitted = best_scale(trial, found.double(), right)
    factor = fitted.scale / right.scale
    sentence = (
        f"wrong scale: {fitted.scale:.4g} should be {right.scale:.4g}, ×{factor:.4g}"
        f"{_known_scale(factor, right.scale)}"
    )
    return Fit.of(sentence, found, trial.outputs(fitted), exact, limit)


def _known_scale(factor: float, scale: float) -> str:
    """The slip that such a factor comes from, in brackets; empty if none is known."""
    known = {
        "ln 2: exp2 of scores that were not multiplied by log2 e": math.log(2),
        "log2 e: scores multiplied by log2 e, and then exp": 1 / math.log(2),
        "no scale at all": 1 / scale,
        "the scale twice": scale,
        "half of the right one": 0.5,
        "twice the right one": 2.0,
        "1/√2: the scale of twice the head_dim": 0.5**0.5,
        "√2: the scale of half the head_dim": 2**0.5,
    }
    return near(factor, known)


def _fit_of_factor(found: Tensor, exact: Tensor, limit: Limit) -> Fit:
    factor = least_squares(found, exact)
    known = {"ln 2": math.log(2), "log2 e": 1 / math.log(2), "half": 0.5, "twice": 2.0}
    sentence = f"every output is multiplied by {factor:.4g}{near(factor, known)}"
    return Fit.of(sentence, found, factor * exact, exact, limit)


# --- the LSE -------------------------------------------------------------------------------------


def _blame_lse(truth: Truth, answer: Answer) -> str:
    """Why the LSE is wrong though the output is right."""
    assert answer.lse is not None
    assert truth.exact.lse is not None
    found, exact = answer.lse.double(), truth.exact.lse
    limit = truth.limit("lse", answer.lse.dtype)
    constant = float((found - exact).median())
    known = {"ln 2": math.log(2), "-ln 2": -math.log(2), "log2 e": 1 / math.log(2)}
    factor = least_squares(found, exact)
    bases = {
        "a factor of log2 e: it is in base 2, not natural": 1 / math.log(2),
        "a factor of ln 2: it is divided by log2 e once too often": math.log(2),
    }
    scaled = 1 / truth.case.scale
    bases |= {"it is divided by the scale": scaled, "it is multiplied by the scale": 1 / scaled}
    fits = [
        Fit.of(
            f"LSE off by a constant: {constant:+.4f}{near(constant, known)}, while the output is "
            "right",
            found,
            exact + constant,
            exact,
            limit,
        ),
        Fit.of(
            f"LSE multiplied by {factor:.4g}{near(factor, bases)}, while the output is right",
            found,
            factor * exact,
            exact,
            limit,
        ),
    ]
    best = best_of(fits)
    if best.explains:
        return best.said("the LSE")
    spread = float((found - exact).std()) if found.numel() > 1 else 0.0
    return (
        f"LSE wrong while the output is right, by no constant and no factor: off by "
        f"{constant:+.4g} in the median, with a spread of {spread:.3g}."
    )
