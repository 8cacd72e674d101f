"""Errors of gradients by stretches of tokens, so that one that is lost does not drown in a row.

A largest and a mean error of a whole row are held against its largest and mean rounding; late keys
of a causal document have gradients that are smaller than that. So each stretch is held against the
plain peer's error on the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# A tile of most kernels. With 128 tokens of some heads, two independent roundings of the same
# numbers have root mean squares within a few percent of each other.
TOKENS = 128
# The gradients of a document of a few tokens are differences that nearly cancel (of one, dq and dk
# are 0): the peer's error there tells nothing of a kernel's. Left to the rule of the whole row.
TINY = 16
# Of the rounding: where the peer makes no error (a document of one token), a kernel may make one.
_LEAST = 1 / 4


@dataclass(frozen=True)
class Stretches:
    """Root mean square errors by stretch of tokens.

    Attributes:
        times_peer: over the peer's of the same tokens.
        relative: over the values there.
        names: where they are.
    """

    times_peer: list[float]
    relative: list[float]
    names: list[str]

    @classmethod
    def of(cls, found: Tensor, exact: Tensor, peer: Tensor, lengths: Sequence[int]) -> Stretches:
        """Of a gradient `[T, ...]` of documents of these lengths. Reads the device."""
        owners, names = _cut(lengths)
        if not names:
            return cls([], [], [])
        rows = (owners >= 0).nonzero().flatten().to(found.device)
        owner = owners.to(found.device)[rows]
        counts = owner.bincount(minlength=len(names))

        def rms(x: Tensor) -> Tensor:
            squares = x.double().square().flatten(1).mean(1)[rows]
            return (squares.new_zeros(len(names)).index_add_(0, owner, squares) / counts).sqrt()

        values, error = rms(exact), rms(found.double() - exact)
        least = _LEAST * torch.finfo(found.dtype).eps * values.clamp(min=float(values.median()))
        times_peer = error / (rms(peer.double() - exact) + least)
        # Neither values nor an error: a stretch that no gradient reaches.
        nothing = (values == 0) & (error == 0)
        return cls(
            torch.where(nothing, 0.0, times_peer).tolist(),
            torch.where(nothing, 0.0, error / values).tolist(),
            names,
        )

    @property
    def worst(self) -> int:
        """Which is the worst; one with a NaN is."""
        keys = [float("inf") if x != x else x for x in self.times_peer]
        return keys.index(max(keys))

    @property
    def most(self) -> float:
        """`times_peer` of the worst; 0 if all documents are too short to be looked at."""
        return self.times_peer[self.worst] if self.names else 0.0

    def sentence(self, allowed: float) -> str:
        """How many are off by more than so many times the peer's error, and which is worst."""
        bad = sum(not times <= allowed for times in self.times_peer)
        place = self.worst
        return (
            f"off by more than {allowed:g} times the plain peer's error in {bad} of "
            f"{len(self.names)} stretches of about {TOKENS} tokens, most in {self.names[place]}: "
            f"{self.times_peer[place]:.3g} times, {self.relative[place]:.2g} of its size"
        )


def _cut(lengths: Sequence[int]) -> tuple[Tensor, list[str]]:
    """int64 `[T]`, which stretch each token is of, or -1; and the stretches' names.

    What is left at a document's end is part of its last one; documents that are shorter than one
    are one together, without the tiny ones.
    """
    short = [d for d, length in enumerate(lengths) if TINY <= length < TOKENS]
    together = sum(lengths[d] for d in short) >= TOKENS
    names = [f"the documents of {TINY} to {TOKENS - 1} tokens"] if together else []
    owners = []
    for document, length in enumerate(lengths):
        pieces = length // TOKENS
        if pieces == 0:
            owner = 0 if together and length >= TINY else -1
            owners.append(torch.full((length,), owner, device="cpu"))
            continue
        places = torch.arange(length, device="cpu")
        owners.append((places // TOKENS).clamp(max=pieces - 1) + len(names))
        ends = [TOKENS * (piece + 1) for piece in range(pieces - 1)] + [length]
        names += [
            f"tokens {TOKENS * piece} to {end - 1} of document {document}"
            for piece, end in enumerate(ends)
        ]
    return torch.cat(owners), names
