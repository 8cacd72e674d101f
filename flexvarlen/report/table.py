"""`Table`: a table as data, for a terminal and for Markdown; `Column`: a record's cell in it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table as RichTable

NOTHING = "–"
GAP = 2  # between columns of a terminal


@dataclass(frozen=True)
class Column:
    """One column of a table of records.

    Attributes:
        title: the header, with the unit.
        cell: the text of a record's cell.
    """

    title: str
    cell: Callable[[Any], str]


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        title: what the table shows, and on what machine; may be empty.
        header: the columns' titles.
        lines: cells of each line, as many as the header has.
        bad: indices of lines that are wrong or failed, red on a terminal.
        notes: sentences below the table.
    """

    title: str
    header: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]
    bad: frozenset[int] = frozenset()
    notes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        records: Iterable[Any],
        columns: Sequence[Column],
        title: str = "",
        is_bad: Callable[[Any], bool] = lambda record: False,
        notes: Iterable[str] = (),
    ) -> Table:
        """Make a table with a line for each record, without columns that are empty in all records.

        Args:
            notes: read after all cells are made, as making them may mark `Notes`.
        """
        found = list(records)
        cells = [[column.cell(record) for record in found] for column in columns]
        kept = [i for i, column in enumerate(cells) if set(column) - {NOTHING, ""}]
        return cls(
            title,
            tuple(columns[i].title for i in kept),
            tuple(zip(*(cells[i] for i in kept), strict=True)),
            frozenset(index for index, record in enumerate(found) if is_bad(record)),
            tuple(notes),
        )

    def markdown(self) -> str:
        """The title in bold, the table, its notes. A | inside a cell is escaped."""
        lines = [self.header, ["---"] * len(self.header), *self.lines]
        text = "\n".join(
            "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
        )
        head = [f"**{self.title}**"] if self.title else []
        return "\n\n".join([*head, text, *self.notes])

    def only(self, *titles: str, notes: tuple[str, ...] = ()) -> Table:
        """The table with only these columns, and other notes.

        >>> Table("", ("a", "b"), (("1", "2"),)).only("b", "c").lines
        (('2',),)
        """
        kept = [index for index, title in enumerate(self.header) if title in titles]
        header, *lines = (tuple(line[i] for i in kept) for line in (self.header, *self.lines))
        return Table(self.title, header, tuple(lines), self.bad, notes)

    @property
    def width(self) -> int:
        """The width in a terminal of all cells side by side."""
        columns = zip(self.header, *self.lines, strict=True)
        return sum(max(map(len, column)) + GAP for column in columns) - GAP

    def transposed(self) -> Table:
        """The table with its columns as lines."""
        first, *others = zip(self.header, *self.lines, strict=True)
        return Table(self.title, first, tuple(others), notes=self.notes)

    def narrowed(self, width: int, titles: Sequence[str]) -> Table:
        """Drop these columns, in order, until the table fits into `width`."""
        left_out: list[str] = []
        found = self
        for title in titles:
            if found.width <= width:
                break
            if title in found.header:
                at = found.header.index(title)
                lines = tuple(line[:at] + line[at + 1 :] for line in found.lines)
                header = found.header[:at] + found.header[at + 1 :]
                found = replace(found, header=header, lines=lines)
                left_out.append(title)
        if not left_out:
            return self
        note = f"Not shown in {width} columns: {', '.join(left_out)}."
        return replace(found, notes=(*self.notes, note))

    def rich(self, width: int | None = None) -> RichTable:
        """The table for rich, transposed if it does not fit into `width` and is then narrower.

        Cells that still do not fit are folded; none is truncated.
        """
        from rich.table import Table as RichTable
        from rich.text import Text

        if width is not None and self.width > width and self.transposed().width < self.width:
            return self.transposed().rich()
        table = RichTable(
            title=Text(self.title, style="bold") if self.title else None,
            title_justify="left",
            caption=Text("\n".join(self.notes)) if self.notes else None,
            caption_justify="left",
            box=None,
            header_style="bold",
            pad_edge=False,
            padding=(0, GAP, 0, 0),
        )
        for index, name in enumerate(self.header):
            table.add_column(name, justify="left" if index < 2 else "right", overflow="fold")
        for index, line in enumerate(self.lines):
            table.add_row(*map(Text, line), style="red" if index in self.bad else "")
        return table


def all_markdown(tables: Iterable[Table]) -> str:
    """Tables below one another."""
    return "\n\n".join(table.markdown() for table in tables)


class Notes:
    """Numbered notes below a table, each reason once.

    >>> notes = Notes()
    >>> notes.mark("no GPU"), notes.mark("too long"), notes.mark("no GPU")
    ('(1)', '(2)', '(1)')
    >>> tuple(notes)
    ('(1) no GPU', '(2) too long')
    """

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def mark(self, reason: str) -> str:
        """Number a reason; return the mark for the cell."""
        return f"({self._numbers.setdefault(reason, len(self._numbers) + 1)})"

    def __iter__(self) -> Iterator[str]:
        return (f"({number}) {reason}" for reason, number in self._numbers.items())


def number(value: float | None, digits: int = 2) -> str:
    """A measure in scientific notation; an exact zero is "0".

    >>> number(0.0), number(1.234e-5), number(None), number(float("nan"))
    ('0', '1.2e-05', '–', 'NaN')
    """
    if value is None:
        return NOTHING
    if math.isnan(value):
        return "NaN"
    return "0" if value == 0 else f"{value:.{digits - 1}e}"


def shown(value: float | None, form: str, scale: float = 1.0) -> str:
    """A number in that format, a dash for None."""
    return NOTHING if value is None else f"{value * scale:{form}}"


def three_digits(value: float | None) -> str:
    """A measure to three digits, thousands whole.

    >>> three_digits(0.01234), three_digits(12.0), three_digits(12345.6), three_digits(None)
    ('0.0123', '12.0', '12,346', '–')
    """
    if value is None:
        return NOTHING
    return f"{value:#.3g}".rstrip(".") if abs(value) < 1000 else f"{value:,.0f}"


def share(value: float | None) -> str:
    """A fraction as a percentage; 100% and 0 are exact.

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


def best(values: Collection[float | None], choose: Callable[..., float]) -> float | None:
    """The minimum or maximum of the known values; None if there are none."""
    known = [value for value in values if value is not None and value == value]
    return choose(known) if known else None


def nan_last(value: float) -> float:
    """A sort key: NaN as infinity."""
    return math.inf if math.isnan(value) else value


def markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table of these cells."""
    return Table("", tuple(header), tuple(map(tuple, lines))).markdown()
