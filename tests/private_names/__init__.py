"""The names of other packages that may change without notice, and what of ours depends on each.

Private names, and public ones whose parameters, instance attributes or behaviour are not documented
to stay. `tests/test_private_names.py` looks each of them up: the first thing to run against a new
release, `make test-newest` does. What `patch_model` looks up itself (`flexvarlen/patches/names.py`)
is not listed.

`names.txt` lists, below each file of flexvarlen/, the names that it uses, and below a name, once,
what it `takes` and `says`, and what of `tests.relied_behaviour` it `holds`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests import relied_behaviour


@dataclass
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

    dotted: str = ""
    used_by: list[str] = field(default_factory=list)
    takes: list[str] = field(default_factory=list)
    says: list[str] = field(default_factory=list)
    holds: Callable[[], None] | None = None


def _listed() -> list[Name]:
    names: dict[str, Name] = defaultdict(Name)
    for line in Path(__file__).with_name("names.txt").read_text().splitlines():
        depth, text = (len(line) - len(line.lstrip())) // 4, line.strip()
        if not text or text.startswith("#"):
            continue
        if depth == 0:
            file = text
        elif depth == 1:
            name = names[text]
            name.dotted = text
            name.used_by.append(file)
        else:
            fact, *words = text.split()
            setattr(name, fact, getattr(relied_behaviour, *words) if fact == "holds" else words)
    return list(names.values())


NAMES = _listed()
