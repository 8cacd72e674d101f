"""`Grid`: a small table as data, for the terminal and for Markdown."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flexvarlen.markdown import markdown

if TYPE_CHECKING:
    from rich.table import Table

NOTHING = "–"
GAP = 2  # between columns on a terminal


@dataclass(frozen=True)
class Grid:
    """A table.

    Attributes:
        title: what it shows, and on what.
        header: of the columns.
        rows: cells; as many a row as the header has.
        bad: indices of rows that are wrong or broken: red on a terminal.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    bad: frozenset[int] = frozenset()

    def markdown(self) -> str:
        """The title in bold, and the table."""
        return f"**{self.title}**\n\n{markdown(self.header, self.rows)}"

    @property
    def width(self) -> int:
        """Columns of a terminal that all cells take side by side."""
        return sum(
            max(map(len, column)) + GAP for column in zip(self.header, *self.rows, strict=True)
        )

    def turned(self) -> Grid:
        """A column a row."""
        first, *others = zip(self.header, *self.rows, strict=True)
        return Grid(self.title, first, tuple(others))

    def table(self, width: int | None = None) -> Table:
        """For rich. Without room in `width` columns it is turned, if that is narrower.

        Cells that still have no room are folded, none is cut.
        """
        from rich.table import Table
        from rich.text import Text

        if width is not None and self.width > width and self.turned().width < self.width:
            return self.turned().table()
        table = Table(
            title=Text(self.title, style="bold"),
            title_justify="left",
            box=None,
            header_style="bold",
            pad_edge=False,
            padding=(0, GAP, 0, 0),
        )
        for index, name in enumerate(self.header):
            table.add_column(name, justify="left" if index < 2 else "right", overflow="fold")
        for index, row in enumerate(self.rows):
            table.add_row(*map(Text, row), style="red" if index in self.bad else "")
        return table


def number(value: float | None, digits: int = 2) -> str:
    """A measure as a cell: zero is "0", since that it is exactly so matters.

    >>> number(0.0), number(1.234e-5), number(None), number(float("nan"))
    ('0', '1.2e-05', '–', 'NaN')
    """
    if value is None:
        return NOTHING
    if math.isnan(value):
        return "NaN"
    return "0" if value == 0 else f"{value:.{digits - 1}e}"


def nan_last(value: float) -> float:
    """To sort by: NaN as infinity."""
    return math.inf if math.isnan(value) else value


def share(value: float | None) -> str:
    """A share that is 100% only if it is all, and 0 only if it is nothing.

    >>> share(1.0), share(0.999999), share(1e-9), share(0)
    ('100%', '99.99%', '<0.01%', '0')
    """
    if value is None:
        return NOTHING
    if value != value:
        return "NaN"
    if value in (0, 1):
        return "100%" if value else "0"
    return (
        "<0.01%" if value < 1e-4 else f"{min(value, 0.9999):.2%}" if value < 1 else f"{value:.0%}"
    )
