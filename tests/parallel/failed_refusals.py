"""`failed_refusals`: calls that must raise a given message, and do not."""

from __future__ import annotations

from collections.abc import Callable, Mapping


def failed_refusals(
    calls: Mapping[str, tuple[str | tuple[str, ...], Callable[[], object]]],
) -> dict[str, str]:
    """Call each, and describe those that are not refused as expected; {} if all are.

    Args:
        calls: by name: the beginning of the message, or a tuple of possible ones, and the call.
    """
    failed = {}
    for name, (beginning, call) in calls.items():
        message = ""
        try:
            call()
        except (ValueError, NotImplementedError) as error:
            message = str(error)
        if not message.startswith(beginning):
            failed[name] = f"expected {beginning!r}, got {message!r}"
    return failed
