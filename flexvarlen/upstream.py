"""Names of other packages that must exist: a missing one raises, it is never read as "off".

Else a name that a release renamed would turn a feature off, and give wrong numbers.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

_ABSENT = object()


def required(owner: Any, name: str, purpose: str) -> Any:
    """An attribute that an object of another package has in every release that is supported.

    Args:
        owner: the object, or a class or module.
        purpose: what it is needed for, to complete "which flexvarlen needs for …".

    Raises:
        NotImplementedError: there is none.
    """
    found = getattr(owner, name, _ABSENT)
    if found is _ABSENT:
        raise NotImplementedError(why_absent(owner, name, purpose))
    return found


def why_absent(owner: Any, name: str, purpose: str) -> str:
    """The sentence about a name that a package of this object does not have."""
    own = owner if isinstance(owner, type) or hasattr(owner, "__name__") else type(owner)
    package = getattr(own, "__module__", own.__name__).partition(".")[0]
    try:
        release = f"{package} {version(package)}"
    except PackageNotFoundError:  # a class of the user's own
        release = package
    return (
        f"{release} has no {own.__name__}.{name}, which flexvarlen needs for {purpose}; use a "
        f"{package} release that flexvarlen supports (see README, Install)."
    )
