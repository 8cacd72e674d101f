"""One line of the runtime that is changed, and the test that must fail then."""

from typing import NamedTuple


class Mutation(NamedTuple):
    """`before` becomes `after`, once, in a file of the runtime; `killer` is what pytest gets."""

    name: str
    file: str
    before: str
    after: str
    killer: str
