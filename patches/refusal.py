"""Tables of what is refused: when, and the sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Refusal(NamedTuple):
    """What a forward refuses.

    Attributes:
        when: what was given -> whether it is refused; or a text, which is `{got}` of the sentence.
        sentence: of the error.
        error: NotImplementedError for what is right elsewhere.
    """

    when: Callable[[Any], bool | str | None]
    sentence: str
    error: type[Exception] = ValueError


def refuse(given: Any, table: tuple[Refusal, ...]) -> None:
    """Raise the first refusal of a table that holds."""
    for when, sentence, error in table:
        got = when(given)
        if got is not None and got is not False:
            raise error(sentence.format(got=got))
