"""Why gradients are wrong though the forward is right.

Shapes: T = tokens of the row, H = num_heads, Hkv = num_kv_heads, D = head_dim, R = H / Hkv.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from flexvarlen.drift.op.cases import Inputs
from flexvarlen.drift.op.exact import GRADIENTS, Answer, Sight, each_alone
from flexvarlen.drift.op.fit import Fit, best_of, least_squares, near
from flexvarlen.drift.op.hypotheses import structural_hypotheses
from flexvarlen.drift.op.judge import Limit, Truth, Verdict
from flexvarlen.drift.op.trial import Trial, tokens_to_try
from flexvarlen.equivalence.accuracy import GRADIENT_FACTOR


def blame_gradients(truth: Truth, answer: Answer, verdict: Verdict) -> str:
    """A sentence for each wrong gradient; those that are wrong in the same way share one."""
    wrong = [name for name in GRADIENTS if name in verdict.wrong]
    right = [name for name in GRADIENTS if name in verdict.ratios and name not in wrong]
    beside = f"the forward{''.join(f' and {name}' for name in right)} right"
    said: dict[str, list[str]] = {}
    for name in wrong:
        said.setdefault(_why(name, truth, answer, verdict), []).append(name)
    sentences = [f"{_listed(names)} wrong, {beside}: {why}" for why, names in said.items()]
    return " ".join(sentences)


def _listed(names: list[str]) -> str:
    """
    >>> _listed(["dq", "dk", "dv"])
    'dq, dk and dv'
    """
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _why(name: str, truth: Truth, answer: Answer, verdict: Verdict) -> str:
    found, exact = answer.parts()[name], truth.exact.parts()[name]
    if name in verdict.in_stretches:
        return f"{truth.stretches(name, found).sentence(GRADIENT_FACTOR)}."
    simple = [_fit_of_factor(truth, found, exact, verdict.limits[name])]
    if name != "dq":
        simple += _wrong_heads(name, truth, found, verdict.limits[name])
    best = best_of(simple)
    if not best.explains:
        best = best_of([best, *_wrong_masks(name, truth, found)])
    if best.explains:
        return f"{best.sentence}."
    noise = truth.noise(name, found)
    if noise.is_rounding:
        return noise.sentence()
    return (
        f"no hypothesis fits; the error is {noise.relative:.2g} of its size, and the nearest "
        f"hypothesis ({best.sentence}) leaves {best.left:.0%} of it."
    )


def _fit_of_factor(truth: Truth, found: Tensor, exact: Tensor, limit: Limit) -> Fit:
    factor = least_squares(found, exact)
    sentence = f"multiplied by {factor:.3g}{_known_factor(factor, truth)}"
    return Fit.of(sentence, found, factor * exact, exact, limit)


def _known_factor(factor: float, truth: Truth) -> str:
    scale = truth.case.scale
    repeats = truth.case.num_heads // truth.case.num_kv_heads
    known = {
        f"the scale {scale:.4g} is missing": 1 / scale,
        f"the scale {scale:.4g} is applied twice": scale,
        "ln 2: a base-2 exponent's factor is left": math.log(2),
        "log2 e: a base-2 exponent's factor is left": 1 / math.log(2),
        "the sign": -1.0,
        "nothing is written": 0.0,
    }
    if repeats > 1:
        known["the mean over the query heads of a group in place of their sum"] = 1 / repeats
    return near(factor, known)


def _wrong_masks(name: str, truth: Truth, found: Tensor) -> list[Fit]:
    """A backward that masks or maps otherwise than its forward did."""
    exact = truth.exact.parts()[name]
    error_T = (found.double() - exact).abs().flatten(1).amax(1)
    rows = tokens_to_try(truth, error_T)
    trial, limit = Trial(truth, rows), truth.limit_of_rows(name, found.dtype, rows)
    document = truth.document_of(int(error_T.argmax()))
    return [
        Fit.of(
            f"in the backward alone, {each.sentence}",
            found[rows],
            trial.gradient(name, each),
            exact[rows],
            limit,
        )
        for each in structural_hypotheses(truth, document)
    ]


def _wrong_heads(name: str, truth: Truth, found: Tensor, limit: Limit) -> list[Fit]:
    """Sums over the query heads of a group that are not made, or land at another head."""
    case = truth.case
    exact = truth.exact.parts()[name]
    reversed_heads = Fit.of("KV heads in reverse order", found, exact.flip(1), exact, limit)
    repeats = case.num_heads // case.num_kv_heads
    if repeats == 1:
        return [reversed_heads]
    by_head = _by_query_head(name, truth)
    grouped = by_head.unflatten(1, (case.num_kv_heads, repeats))
    interleaved = by_head.unflatten(1, (repeats, case.num_kv_heads)).sum(1)
    places = {"first": 0, "last": repeats - 1}
    return [
        reversed_heads,
        *(
            Fit.of(
                f"the sum over the {repeats} query heads of a group is missing: it is that of "
                f"their {which} alone",
                found,
                grouped[:, :, place],
                exact,
                limit,
            )
            for which, place in places.items()
        ),
        Fit.of(
            f"query heads are summed interleaved, h % {case.num_kv_heads} in place of "
            f"h // {repeats}",
            found,
            interleaved,
            exact,
            limit,
        ),
    ]


def _by_query_head(name: str, truth: Truth) -> Tensor:
    """fp64 `[T, H, D]`: what each query head adds to dk or dv."""
    case, inputs = truth.case, truth.inputs
    repeats = case.num_heads // case.num_kv_heads
    expanded: Inputs = replace(
        inputs, k=inputs.k.repeat_interleave(repeats, 1), v=inputs.v.repeat_interleave(repeats, 1)
    )
    sight = Sight.of(causal=case.causal, window=case.window)
    answer = each_alone(expanded, sight, case.scale, torch.float64, gradients=True)
    return answer.parts()[name]
