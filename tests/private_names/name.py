"""One name of the list."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Name:
    """One name.

    Attributes:
        dotted: where it is. "a | b": one of these, as releases differ. An attribute of a class may
            be one that its methods set on `self`.
        used_by: files of ours, below flexvarlen/.
        takes: parameters that we pass, or read, by name; "a|b": one of these.
        says: words that its source must hold, such as keywords that it passes on; "a|b" as above.
        holds: raises AssertionError where it behaves otherwise than we rely on.
    """

    dotted: str
    used_by: str
    takes: str = ""
    says: str = ""
    holds: Callable[[], None] | None = None
