"""Whether errors look like rounding, and how they grow with the keys that a query sees."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# A wrong mask, scale or head leaves errors that follow the values, or are as large as they are.
_CORRELATION, _MEAN, _RELATIVE = 0.1, 0.05, 0.1
# Rounding of what goes in and out does not depend on the keys; a sum's grows at least so much.
_GROWTH = 1.3
_TINY = 1 / 16


@dataclass(frozen=True)
class Noise:
    """Errors of a tensor, beside the plain peer's.

    Attributes:
        times_peer: root mean square error over the peer's.
        relative: over that of the values.
        correlation: of the errors with the values; near 0 if unbiased.
        mean: mean error over its root mean square.
        few, many: keys seen, at most and at least, by the queries that see fewest and most.
        at_few, at_many: `times_peer` of those; None if all see as many.
    """

    times_peer: float
    relative: float
    correlation: float
    mean: float
    few: int = 0
    many: int = 0
    at_few: float | None = None
    at_many: float | None = None

    @classmethod
    def of(cls, found: Tensor, exact: Tensor, peer: Tensor, keys_T: Tensor | None) -> Noise:
        """Reads the device.

        Args:
            found, exact, peer: `[T, ...]`.
            keys_T: int `[T]`, how many keys each query sees; None if that is not looked at.
        """
        error, peer_error = found.double() - exact, peer.double() - exact
        rms, values = _rms(error), _rms(exact)
        # Where the peer makes no error (a query that sees one key), a kernel may make a tiny one.
        least = _TINY * torch.finfo(found.dtype).eps
        noise = cls(
            _over(rms, _rms(peer_error) + least * values),
            _over(rms, values),
            _over(float((error * exact).mean()), rms * values),
            _over(float(error.mean()), rms),
        )
        if keys_T is None or int(keys_T.max()) < 2 * int(keys_T.min()):
            return noise
        few, many = (int(keys_T.double().quantile(q)) for q in (0.25, 0.75))
        at = [
            _over(_rms(error[rows]), _rms(peer_error[rows]) + least * _rms(exact[rows]))
            for rows in (keys_T <= few, keys_T >= many)
        ]
        return cls(
            noise.times_peer, noise.relative, noise.correlation, noise.mean, few, many, at[0], at[1]
        )

    @property
    def most_times_peer(self) -> float:
        """Of all queries, or of those that see many keys, if that is more."""
        return max(self.times_peer, self.at_many or 0.0)

    @property
    def is_rounding(self) -> bool:
        """Small, about zero, and unrelated to the values."""
        return (
            self.relative < _RELATIVE
            and abs(self.correlation) < _CORRELATION
            and abs(self.mean) < _MEAN
        )

    def sentence(self) -> str:
        """What such errors come from."""
        text = f"rounding: errors are {self.times_peer:.3g} times those of the plain peer"
        unbiased = "; they are about zero in the mean and follow no value."
        if self.at_few is None or self.at_many is None:
            return (
                f"{text}, as of an accumulation or probabilities in a lower precision than "
                f"float32 (all queries see about as many keys: growth cannot be told){unbiased}"
            )
        measured = (
            f"({self.at_few:.3g} times at up to {self.few} keys, {self.at_many:.3g} times from "
            f"{self.many} on)"
        )
        if self.at_many > _GROWTH * self.at_few:
            return (
                f"{text} and grow with the keys seen {measured}, as of an accumulation or "
                f"probabilities in a lower precision than float32{unbiased}"
            )
        return (
            f"{text} and do not grow with the keys seen {measured}, as of inputs, outputs or "
            f"probabilities in a lower precision{unbiased}"
        )


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


def _over(a: float, b: float) -> float:
    return a / b if b else (0.0 if a == 0 else float("inf"))
