"""Lines of the runtime that are changed, and the test that must fail then.

The tables beside this file read like diffs. A section begins with the changed file and what pytest
gets; each of its mutations has a name, the text before, and the text after, if any is left:

    # flexvarlen/mask/vectors.py: tests/mask/test_mask_vectors.py

    mask: causal sees the next token
    - last = position + 1
    + last = position + 2
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Mutation(NamedTuple):
    """`before` becomes `after`, once, in a file of the runtime; `killer` is what pytest gets."""

    name: str
    file: str
    before: str
    after: str
    killer: str


def listed(table: Path) -> Iterator[Mutation]:
    """The mutations of a table."""
    for section in ("\n" + table.read_text()).split("\n# ")[1:]:
        heading, *changes = section.rstrip().split("\n\n")
        file, _, killer = heading.partition(": ")
        for change in changes:
            name, *lines = change.split("\n")
            before, after = (
                "\n".join(line[2:] for line in lines if line.startswith(f"{sign} "))
                for sign in "-+"
            )
            yield Mutation(name, file, before, after, killer)
