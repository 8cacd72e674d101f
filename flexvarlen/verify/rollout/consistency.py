"""`require_consistent`: refuse files whose log-probabilities are not those of these tokens.

The model's log-probabilities of every token are compared with the engine's, as they are and as
each explanation of a broken file has them: of the token before or after, at another temperature.
Costs are absolute differences in nats, of at most `CAP`, so that no token decides alone. Of all
runs of tokens that one explains better, the one with the largest gain counts, if it passes all
thresholds; where several do, the first. What no explanation fits, and is further off than
rounding of any dtype makes it, is of other tokens or of another model.

Honest drift stays below: bf16 moves a token by 0.01 to 0.05 nats in the mean, and by more than 0.25
one in hundreds; its sign is random, so that no other temperature or token fits better. A break
that moves log-probabilities by less than `EVIDENCE` in all is not seen.

Shapes: N tokens of all completions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flexvarlen.verify.rollout.logprobs import (
    chosen_logprobs,
    require_vocabulary,
    trainer_logprobs,
)
from flexvarlen.verify.rollout.responses import RAW, Response, location

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CAP = 2.0
"""Nats: the most that one token costs."""
EXPECTED = 0.25
"""Mean error in nats per token that no correct file reached; about ten times bf16 drift."""
EVIDENCE = 4.0
"""Nats by which an explanation must be better in total: likelihoods that differ by 50 times."""
TOKENS = 8
"""Tokens of the shortest run."""
STANDARD_ERRORS = 6.0
"""The mean gain per token must exceed this many standard errors; high, because the best of many
runs is chosen."""
BETTER = 0.7
"""The cost that an explanation may leave, of what it explains."""
SPREAD = 0.5
"""If the error exceeds this fraction of the log-probabilities' own mean deviation, they belong to
other tokens (1 to 1.5 when shuffled)."""
FACTORS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.25, 1.5, 2.0)
"""Other temperatures, in multiples of the file's."""


@dataclass(frozen=True)
class Explanation:
    """What a broken file may hold: in words, with what to do, and its log-probabilities `[N]`.

    NaN where it says nothing.
    """

    what: str
    todo: str
    logprobs: Tensor


def require_consistent(
    base: PreTrainedModel, responses: Sequence[Response], tokens: int, backend: str = "auto"
) -> None:
    """Refuse responses of other tokens or models, shifted, or at another temperature.

    Args:
        base: the model that is said to have sampled.
        tokens: of a packed row.

    Raises:
        ValueError: says what is wrong, and at which line and token it begins.
    """
    require_vocabulary(base, responses)

    def at_temperatures(logits: Tensor, ids: Tensor, temperatures: Tensor) -> Tensor:
        factors = (temperatures * factor for factor in FACTORS)
        others = [temperatures, torch.ones_like(temperatures), *factors]
        return torch.stack([chosen_logprobs(logits, ids, each) for each in others], dim=1)

    every = trainer_logprobs(backend, base, responses, tokens, score=at_temperatures)
    engine = torch.tensor([x for each in responses for x in each.logprobs], dtype=torch.float64)
    sentence = why_broken(responses, engine, every[:, 0], explanations(responses, every))
    if sentence is not None:
        raise ValueError(sentence)


def explanations(responses: Sequence[Response], every: Tensor) -> list[Explanation]:
    """The explanations that are looked for.

    Args:
        every: `[N, 2 + FACTORS]`, log-probabilities at the file's temperatures, at 1, and at the
            multiples.
    """
    pieces = every[:, 0].split([len(each.completion) for each in responses])
    nothing = every.new_full((1,), torch.nan)
    after = torch.cat([torch.cat([piece[1:], nothing]) for piece in pieces])
    before = torch.cat([torch.cat([nothing, piece[:-1]]) for piece in pieces])
    shift = "shift them by one token"
    found = [
        Explanation("log-probabilities of the tokens after their own (off by one)", shift, after),
        Explanation("log-probabilities of the tokens before their own (off by one)", shift, before),
    ]
    of = "another temperature, about"
    todo = f"name the temperature, logprobs_mode {RAW}, or the top_p or top_k of the sampling"
    if any(each.temperature != 1 for each in responses):
        found.append(Explanation(f"{of} 1", todo, every[:, 1]))
    for factor, logprobs in zip(FACTORS, every[:, 2:].unbind(1), strict=True):
        found.append(Explanation(f"{of} {factor:g} times the file's", todo, logprobs))
    return found


def why_broken(
    responses: Sequence[Response],
    engine: Tensor,
    trainer: Tensor,
    others: Sequence[Explanation],
) -> str | None:
    """A sentence about what is wrong with a file and where it begins, or None.

    Args:
        engine, trainer: `[N]`, log-probabilities of all tokens.
        others: explanations of what else the engine's may be.
    """
    cost = _cost(engine, trainer)
    found = []
    for other in others:
        left = torch.where(other.logprobs.isnan(), cost, _cost(engine, other.logprobs))
        if run := first_run(cost - left, partial(_explains, cost, left)):
            found.append((float((cost - left)[slice(*run)].sum()), other, run))
    if found:
        _, other, (start, end) = max(found, key=lambda one: one[0])
        return (
            f"responses must have log-probabilities of their own tokens and temperature, got "
            f"{other.what} from {location(responses, start)} on ({end - start} tokens are "
            f"{float(cost[start:end].mean()):.2g} nats off in the mean); {other.todo}."
        )
    run = first_run(cost - EXPECTED, partial(_is_foreign, engine, cost))
    if run is None:
        return None
    off = f"{float(cost[slice(*run)].mean()):.2g} nats off in the mean"
    if run[1] - run[0] > 0.8 * len(cost):
        return (
            f"responses must be of this model, got log-probabilities {off} from "
            f"{location(responses, run[0])} on, nearly everywhere; name the model and the weights "
            "that sampled, and the ids that it sampled."
        )
    return (
        f"responses must have the ids that the engine sampled, got log-probabilities of other "
        f"tokens from {location(responses, run[0])} on (re-tokenized?): {run[1] - run[0]} tokens "
        f"are {off}; keep the engine's ids."
    )


def first_run(gain: Tensor, counts: Callable[[int, int], bool]) -> tuple[int, int] | None:
    """The first run of tokens with the largest gain before the next, of those that count.

    Args:
        gain: `[N]`; a run's is the sum.
        counts: whether the run from a token to another counts.
    """
    found, end = None, len(gain)
    while end >= TOKENS:
        total = torch.cat([gain.new_zeros(1), gain[:end].cumsum(0)])
        lowest, since = total.cummin(0)
        last = int((total - lowest).argmax())
        run = int(since[last]), last
        if run[1] - run[0] < TOKENS or float(gain[slice(*run)].sum()) < EVIDENCE:
            return found
        if not counts(*run):
            return found
        found, end = run, run[0]
    return found


def _cost(engine: Tensor, other: Tensor) -> Tensor:
    return (engine - other).abs().clamp(max=CAP)


def _explains(cost: Tensor, left: Tensor, start: int, end: int) -> bool:
    """Whether an explanation leaves little of a run's cost, and that not by luck."""
    cost, left = cost[start:end], left[start:end]
    gain = cost - left
    error = float(gain.std()) / len(gain) ** 0.5
    small = float(left.mean()) <= min(BETTER * float(cost.mean()), EXPECTED)
    return small and float(gain.mean()) >= STANDARD_ERRORS * error


def _is_foreign(engine: Tensor, cost: Tensor, start: int, end: int) -> bool:
    """Whether a run is off by as much as log-probabilities of other tokens are."""
    run = engine[start:end]
    spread = float((run - run.median()).abs().mean())
    return float(cost[start:end].mean()) >= SPREAD * min(spread, CAP)
