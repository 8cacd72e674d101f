"""`refused`: what calls say that must not be taken."""

from __future__ import annotations

from collections.abc import Callable, Mapping

Beginning = str | tuple[str, ...]
Refused = dict[str, tuple[str, Beginning]]
"""What each call says, "" if it is taken, and how that must begin."""


def refused(calls: Mapping[str, tuple[Beginning, Callable[[], object]]]) -> Refused:
    """Call each; `calls` has the beginning of its sentence, and the call."""
    found: Refused = {}
    for name, (beginning, call) in calls.items():
        said = ""
        try:
            call()
        except (ValueError, NotImplementedError) as error:
            said = str(error)
        found[name] = said, beginning
    return found


def assert_all_refused(found: Refused) -> None:
    taken = {
        name: said for name, (said, beginning) in found.items() if not said.startswith(beginning)
    }
    assert found
    assert not taken
