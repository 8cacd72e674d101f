"""Parameters of a test, some of which are marked slow."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def with_slow(names: Iterable[str], slow: Collection[str]) -> list[Any]:
    """All names, of which those in `slow` run with --slow alone."""
    return [pytest.param(x, marks=[pytest.mark.slow] * (x in slow)) for x in names]
