"""How far an answer is from the truth, and whether that is too far: the rule of `accuracy.py`.

An output or LSE may be off by twice what the peer is off plus the dtype's rounding, a gradient by
three times that; in its largest error and in its mean one.

In half precision that rounding hides an accumulation of long sums in half precision. So there the
output is also held, in root mean square, against twice the peer alone (which is rounded too): over
all queries, and over those that see the most keys. Gradients are held so against three times the
peer, in each stretch of tokens: see `stretches.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flexvarlen.drift.difference import Difference
from flexvarlen.drift.op.cases import Inputs, OpCase, spans_of
from flexvarlen.drift.op.exact import GRADIENTS, Answer, Sight, each_alone, keys_seen
from flexvarlen.drift.op.noise import Noise
from flexvarlen.drift.op.stretches import Stretches
from flexvarlen.equivalence.accuracy import GRADIENT_FACTOR, OUTPUT_FACTOR

HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Limit:
    """The largest and the mean error that the rule allows."""

    max: float
    mean: float

    def ratio(self, max_error: float, mean_error: float) -> float:
        """Error over what is allowed, the worse of the two; NaN if an error is.

        >>> Limit(2.0, 1.0).ratio(1.0, 3.0)
        3.0
        """
        ratios = [_over(max_error, self.max), _over(mean_error, self.mean)]
        return next((x for x in ratios if x != x), max(ratios))


def _over(error: float, limit: float) -> float:
    if limit > 0 or error != error:
        return error / limit if limit > 0 else error
    return 0.0 if error == 0 else float("inf")


@dataclass(frozen=True)
class Truth:
    """The documents of a case alone: in fp64, and in the tested dtype by the plain peer.

    Attributes:
        case, inputs: what was asked.
        exact: fp64.
        peer: in the dtype.
        peer_differences: of the peer from `exact`, by part.
    """

    case: OpCase
    inputs: Inputs
    exact: Answer
    peer: Answer
    peer_differences: dict[str, Difference]

    @classmethod
    def of(cls, case: OpCase, inputs: Inputs, *, gradients: bool) -> Truth:
        """Run both."""
        sight = Sight.of(causal=case.causal, window=case.window)
        exact, peer = (
            each_alone(inputs, sight, case.scale, dtype, gradients=gradients)
            for dtype in (torch.float64, inputs.q.dtype)
        )
        truths = exact.parts()
        found = {name: Difference.between(x, truths[name]) for name, x in peer.parts().items()}
        return cls(case, inputs, exact, peer, found)

    @property
    def keys_T(self) -> Tensor:
        """int64 `[T]`: how many keys each query sees."""
        sight = Sight.of(causal=self.case.causal, window=self.case.window)
        return keys_seen(self.case.lengths, sight, self.exact.out.device)

    def noise(self, name: str, found: Tensor) -> Noise:
        """The errors of a part, beside the peer's."""
        by_query = name in ("out", "dq")
        exact, peer = self.exact.parts()[name], self.peer.parts()[name]
        return Noise.of(found, exact, peer, self.keys_T if by_query else None)

    def stretches(self, name: str, found: Tensor) -> Stretches:
        """The errors of a gradient by stretches of tokens, beside the peer's."""
        exact, peer = self.exact.parts()[name], self.peer.parts()[name]
        return Stretches.of(found, exact, peer, self.case.lengths)

    def document_of(self, token: int) -> int:
        """Which document a token lies in."""
        return next(d for d, (_, end) in enumerate(spans_of(self.case.lengths)) if token < end)

    def limit(self, name: str, dtype: torch.dtype) -> Limit:
        """What the rule allows a part of an answer, which is of that dtype."""
        peer, size = self.peer_differences[name], self.exact.parts()[name].abs()
        return _limit(name, dtype, peer.max_abs, peer.mean_abs, size)

    def limit_of_rows(self, name: str, dtype: torch.dtype, rows: Tensor) -> Limit:
        """What it allows some tokens: their mean error is held against their own peer's.

        Early queries of a causal document have larger outputs than others, and larger errors.
        """
        exact = self.exact.parts()[name][rows]
        mean = float((self.peer.parts()[name][rows] - exact).abs().mean())
        of_rows = _limit(name, dtype, 0.0, mean, exact.abs())
        return Limit(self.limit(name, dtype).max, of_rows.mean)


def _limit(name: str, dtype: torch.dtype, peer_max: float, peer_mean: float, size: Tensor) -> Limit:
    rounding = torch.finfo(dtype).eps
    factor = GRADIENT_FACTOR if name in GRADIENTS else OUTPUT_FACTOR
    return Limit(
        factor * (peer_max + rounding * float(size.max())),
        factor * (peer_mean + rounding * float(size.mean())),
    )


@dataclass(frozen=True)
class Verdict:
    """An answer held against the truth.

    Attributes:
        differences: by part.
        ratios: error over what the rule allows, by part; above 1, or NaN, is wrong.
        limits: what the rule allows, by part.
        peer_differences: the peer's.
        in_stretches: gradients that are wrong in some stretches, and in the whole row within
            the limits.
    """

    differences: dict[str, Difference]
    ratios: dict[str, float]
    limits: dict[str, Limit]
    peer_differences: dict[str, Difference]
    in_stretches: tuple[str, ...] = ()

    @classmethod
    def of(cls, answer: Answer, truth: Truth) -> Verdict:
        """Judge every part that the answer has."""
        exact = truth.exact.parts()
        found, ratios, limits = {}, {}, {}
        for name, x in answer.parts().items():
            found[name] = Difference.between(x, exact[name])
            limits[name] = truth.limit(name, x.dtype)
            ratios[name] = limits[name].ratio(found[name].max_abs, found[name].mean_abs)
        if answer.out.dtype in HALF and ratios["out"] <= 1:
            noise = truth.noise("out", answer.out)
            ratios["out"] = max(ratios["out"], noise.most_times_peer / OUTPUT_FACTOR)
        lost = []
        for name, x in answer.parts().items():
            if name in GRADIENTS and x.dtype in HALF and ratios[name] <= 1:
                ratio = truth.stretches(name, x).most / GRADIENT_FACTOR
                if not ratio <= 1:
                    lost.append(name)
                ratios[name] = max(ratios[name], ratio)
        return cls(found, ratios, limits, truth.peer_differences, tuple(lost))

    @property
    def wrong(self) -> list[str]:
        """The parts that are wrong."""
        return [name for name, ratio in self.ratios.items() if not ratio <= 1]

    def measures(self) -> dict[str, Any]:
        """For a row of the comparison "exact", but for the blame."""
        measures: dict[str, Any] = {}
        for name, difference in self.differences.items():
            measures |= difference.measures(name)
            measures |= self.peer_differences[name].measures(f"peer_{name}")
            measures[f"ratio_{name}"] = self.ratios[name]
        return measures

    def reason(self) -> str | None:
        """One sentence if something is wrong."""
        if not self.wrong:
            return None
        ratios = {name: self.ratios[name] for name in self.wrong}
        lost = (name for name, ratio in ratios.items() if ratio != ratio)
        worst = next(lost, max(ratios, key=lambda name: ratios[name]))
        difference = self.differences[worst]
        return (
            f"{', '.join(self.wrong)} wrong: {worst} is off by {difference.max_abs:.3g} at most "
            f"and {difference.mean_abs:.3g} in the mean, {self.ratios[worst]:.3g} times what the "
            "rule allows."
        )
