"""The pytest plugin of the external suite: our attention in each test, and what came of it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import pytest

from tests.external.our_attention import OurAttention

pytest.register_assert_rewrite("tests.external.generation")

CALLS = "packed_attention_calls"


def pytest_addoption(parser):
    """`--backend NAME`: of flexvarlen."""
    parser.addoption("--backend", default="sdpa")


@pytest.fixture(autouse=True)
def _our_attention(request, monkeypatch):
    """Hook transformers for a test of the suite, and count the calls of our attention."""
    cls = request.cls
    cls.backend = request.config.getoption("--backend")
    hooks = OurAttention(cls.way, cls.backend, cls.all_model_classes)
    hooks.install(monkeypatch)
    cls.hooks = hooks
    yield
    request.node.user_properties.append((CALLS, hooks.calls))


@dataclass
class Outcome:
    """What came of one test.

    Attributes:
        errors: the text of each failure, of subtests too.
        skipped: the reason, if it skipped itself.
        calls: of `packed_attention`.
    """

    errors: list[str] = field(default_factory=list)
    skipped: str | None = None
    calls: int = 0
    seconds: float = 0.0

    @property
    def status(self) -> str:
        """passed, failed or skipped."""
        return "failed" if self.errors else "passed" if self.skipped is None else "skipped"


class Recorder:
    """Collects an `Outcome` for each test, by `class::test`; its place is the xdist controller."""

    def __init__(self) -> None:
        self.outcomes: dict[str, Outcome] = defaultdict(Outcome)
        self.collection_errors: list[str] = []

    def pytest_collectreport(self, report):
        if report.failed:
            self.collection_errors.append(report.longreprtext)

    def pytest_runtest_logreport(self, report):
        outcome = self.outcomes["::".join(report.nodeid.split("::")[1:])]
        outcome.seconds += report.duration
        outcome.calls = dict(report.user_properties).get(CALLS, outcome.calls)
        if report.failed:
            outcome.errors.append(report.longreprtext)
        elif report.skipped:
            is_place = isinstance(report.longrepr, tuple)
            reason = report.longrepr[2] if is_place else report.longreprtext
            outcome.skipped = reason.removeprefix("Skipped: ")
