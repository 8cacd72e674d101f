"""What public sources claimed, beside what rows say: a ratio each, and whether it holds here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SLACK = 0.05  # timings of two tools are held to agree within 5%
RESOLUTION = 0.01  # of a ratio of two medians of one run


@dataclass(frozen=True)
class Found:
    """A ratio where it was measured, or why there is none.

    Attributes:
        where: the case, for a reader.
        ratio: None where it could not be measured.
        why_none: then a reason.
        note: what a reader should know of how it was measured.
    """

    where: str
    ratio: float | None
    why_none: str = ""
    note: str = ""


@dataclass(frozen=True)
class Claim:
    """That something is so many times as fast as another thing.

    Attributes:
        what: of what is claimed, "FA2 over standard attention at 8,192 tokens".
        ratio: how many times as fast.
        gpu: where the source measured it.
        source: who says so.
    """

    what: str
    ratio: float
    gpu: str
    source: str

    def holds(self, ratio: float) -> bool:
        """At least as fast as claimed, within 5%."""
        return ratio >= self.ratio * (1 - SLACK)

    def verdict(self, found: Sequence[Found]) -> str:
        """Whether it holds, of all that was measured; a verb and what follows it."""
        known = [each.ratio for each in found if each.ratio is not None]
        good = sum(self.holds(ratio) for ratio in known)
        if not known:
            return "could not be measured"
        if good == len(known):
            return "holds" if len(known) == len(found) else "holds where it was measured"
        return f"holds in {good} of {len(known)}" if good else "does not hold"


@dataclass(frozen=True)
class Cost(Claim):
    """That something takes no more than so many times as long as another thing."""

    def holds(self, ratio: float) -> bool:
        """No more than claimed, and 1% more by which two medians of a run may differ.

        >>> claim = Cost("varlen over fixed lengths", 1.03, "B200", "a pull request")
        >>> claim.holds(1.039), claim.holds(1.041)
        (True, False)
        """
        return ratio <= self.ratio + RESOLUTION


@dataclass(frozen=True)
class Within(Claim):
    """That two things take the same time, but for a share of it: `ratio` 1.06 is 6%."""

    def holds(self, ratio: float) -> bool:
        """No further apart, either way.

        >>> claim = Within("SDPA and FA2", 1.06, "", "a blog")
        >>> claim.holds(0.95), claim.holds(1.07)
        (True, False)
        """
        return abs(ratio - 1) <= self.ratio - 1


def bullets(sentences: Sequence[str]) -> str:
    """A Markdown list."""
    return "\n".join(f"- {line}" for line in sentences)
