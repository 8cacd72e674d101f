"""Outcomes held against the tables: what is wrong, and the summary."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.external.plugin import Outcome
from tests.external.tables import DESELECTED, MUST_PASS, WITHOUT_ATTENTIONS, Deselected


@dataclass
class Verdict:
    """What a run gave.

    Attributes:
        passed: names of tests.
        ran_ours: how many of them called `packed_attention`.
        deselected: an entry of the table, and the tests that failed as it says.
        skipped: a reason, and how many tests skipped themselves for it.
        wrong: the name of a test, or of an entry, and what is wrong with it.
    """

    passed: list[str] = field(default_factory=list)
    ran_ours: int = 0
    deselected: dict[Deselected, list[str]] = field(default_factory=dict)
    skipped: Counter[str] = field(default_factory=Counter)
    wrong: dict[str, str] = field(default_factory=dict)

    def as_dict(self, about: dict[str, Any]) -> dict[str, Any]:
        """As JSON knows it, with what the caller says `about` the run."""
        return {
            **about,
            "transformers": version("transformers"),
            "torch": version("torch"),
            "passed": len(self.passed),
            "passed_that_called_ours": self.ran_ours,
            "deselected": [
                {"test": entry.test, "reason": entry.reason, "failed_as_it_says": names}
                for entry, names in self.deselected.items()
            ],
            "deselected_in_part": WITHOUT_ATTENTIONS,
            "skipped_themselves": dict(self.skipped.most_common()),
            "wrong": self.wrong,
        }

    def text(self, about: dict[str, Any]) -> str:
        """The same, to be read."""
        deselected = sum(map(len, self.deselected.values()))
        lines = [f"{name}: {what}" for name, what in self.wrong.items()]
        lines += [f"{len(self.passed)} passed, {self.ran_ours} of them through packed_attention"]
        lines += [f"{deselected} deselected, and fail as expected:"]
        lines += [f"  {len(names)} x {e.test}: {e.reason}" for e, names in self.deselected.items()]
        lines += ["deselected in part:"]
        lines += [f"  {test}: {reason}" for test, reason in WITHOUT_ATTENTIONS.items()]
        lines += [f"{self.skipped.total()} skipped themselves:"]
        lines += [f"  {count} x {reason}" for reason, count in self.skipped.most_common()]
        lines += [f"{len(self.wrong)} wrong; {about['backend']}, {about['seconds']} s"]
        return "\n".join(lines)

    def save(self, path: Path, about: dict[str, Any]) -> None:
        """Write `path`.json and `path`.txt."""
        path.with_suffix(".json").write_text(json.dumps(self.as_dict(about), indent=1) + "\n")
        path.with_suffix(".txt").write_text(self.text(about) + "\n")


def judge(
    outcomes: Mapping[str, Outcome],
    backend: str,
    ways: Sequence[str],
    classes: Sequence[str],
    *,
    all_ran: bool,
) -> Verdict:
    """Hold the outcomes of this backend, these ways and classes against the tables.

    Args:
        all_ran: a test that a table names and that is not there is wrong too.
    """
    verdict = Verdict()
    for name, outcome in sorted(outcomes.items()):
        entry = _entry(name, backend, outcome)
        if outcome.status == "failed":
            wrong = _wrong_failure(outcome, entry)
            if entry is not None and wrong is None:
                verdict.deselected.setdefault(entry, []).append(name)
        elif entry is not None:
            wrong = f"is deselected, but {outcome.status}: delete or narrow its entry"
        elif outcome.skipped is not None:
            verdict.skipped[outcome.skipped] += 1
            may_skip = "stock" in ways or not _must_pass(name)
            wrong = None if may_skip else f"must pass, skipped itself: {outcome.skipped}"
        else:
            wrong = None
            verdict.passed.append(name)
            verdict.ran_ours += outcome.calls > 0
        if wrong is not None:
            verdict.wrong[name] = wrong
    if all_ran:
        verdict.wrong.update(_missing(outcomes, backend, classes))
    return verdict


def _entry(name: str, backend: str, outcome: Outcome) -> Deselected | None:
    """The entry of the table about a test; one that `may_pass` only if it failed."""
    about = [entry for entry in DESELECTED if entry.covers(name, backend)]
    if outcome.status != "failed":
        about = [entry for entry in about if not entry.may_pass]
    agree = [entry for entry in about if not _wrong_failure(outcome, entry)]
    return next(iter([*agree, *about]), None)


def _wrong_failure(outcome: Outcome, entry: Deselected | None) -> str | None:
    if entry is None:
        return "failed, and is not deselected\n" + "\n".join(outcome.errors)
    unlike = [error for error in outcome.errors if entry.error not in error]
    return f"failed without {entry.error!r}\n" + "\n".join(unlike) if unlike else None


def _must_pass(name: str) -> bool:
    return any(fnmatch(name.partition("::")[2], test) for test in MUST_PASS)


def _missing(
    outcomes: Mapping[str, Outcome], backend: str, classes: Sequence[str]
) -> dict[str, str]:
    missing = {}
    for of in classes:
        for test in (*MUST_PASS, *WITHOUT_ATTENTIONS):
            if not any(fnmatch(name, f"{of}::{test}") for name in outcomes):
                missing[f"{of}::{test}"] = "is in a table, and there is no such test"
    for entry in DESELECTED:
        asked = set(entry.classes()) & set(classes) and entry.backend in (None, backend)
        if asked and not any(entry.covers(name, backend) for name in outcomes):
            missing[f"deselected {entry.test}"] = "matches no test: delete the entry"
    return missing
