"""The table writer: columns without content go, cells are escaped, wide tables are transposed."""

from __future__ import annotations

from rich.console import Console

from flexvarlen.report.table import NOTHING, Column, Table

COLUMNS = (
    Column("name", lambda r: r["name"]),
    Column("ms", lambda r: r.get("ms", NOTHING)),
    Column("MiB", lambda r: NOTHING),
)


def test_a_column_that_is_empty_in_all_records_is_left_out():
    table = Table.of([{"name": "a", "ms": "1"}, {"name": "b"}], COLUMNS)
    assert table.header == ("name", "ms")
    assert table.lines == (("a", "1"), ("b", NOTHING))


def test_markdown_escapes_bars_and_ends_with_the_notes():
    table = Table("title", ("a",), (("x|y",),), notes=("(1) why",))
    assert table.markdown() == "**title**\n\n| a |\n| --- |\n| x\\|y |\n\n(1) why"


def test_a_table_too_wide_for_the_terminal_is_transposed_and_nothing_is_cut():
    names = tuple(f"column {i}" for i in range(9))
    table = Table("", names, (tuple(f"value {i}" for i in range(9)),))
    console = Console(width=40)
    with console.capture() as capture:
        console.print(table.rich(40))
    text = capture.get()
    assert all(f"value {i}" in text for i in range(9))
    assert len(text.splitlines()) >= 9


def test_a_narrow_table_goes_without_the_columns_that_it_can_spare_and_says_so():
    table = Table("", ("name", "ms", "MiB"), (("a" * 20, "1.0", "2.0"),), bad=frozenset([0]))
    assert table.narrowed(40, ("MiB", "ms")) is table
    found = table.narrowed(28, ("MiB", "none", "ms"))
    assert (found.header, found.lines) == (("name", "ms"), (("a" * 20, "1.0"),))
    assert found.notes == ("Not shown in 28 columns: MiB.",)
    assert found.bad == table.bad


def test_width_is_that_of_the_printed_table():
    table = Table("", ("name", "ms"), (("a" * 20, "1.0"), ("b", "12.0")))
    for width in (table.width, table.width - 1):
        console = Console(width=width)
        with console.capture() as capture:
            console.print(table.rich())
        assert (len(capture.get().splitlines()) == 3) == (width == table.width)


def test_bad_lines_are_those_of_bad_records():
    table = Table.of([{"name": "a"}, {"name": "b"}], COLUMNS, is_bad=lambda r: r["name"] == "b")
    assert table.bad == {1}
