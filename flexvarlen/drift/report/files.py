"""`DriftReport`: rows, and what is made of them: tables, Markdown, a page, files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexvarlen.drift.grid import Grid
from flexvarlen.drift.report.summary import grids
from flexvarlen.drift.report.verdicts import plain_sentences
from flexvarlen.environment import without_paths
from flexvarlen.equivalence.variants import THEIRS
from flexvarlen.rows import Row, append_row, commit_of, in_short, read_rows

if TYPE_CHECKING:
    from rich.console import Group

ROWS, MARKDOWN, PAGE = "rows.jsonl", "report.md", "report.html"

SUITES = {
    "drift-op": "attention alone",
    "drift-model": "a whole model",
    "drift-attribution": "whose drift it is",
    "drift-training": "training",
}


@dataclass(frozen=True)
class DriftReport:
    """What a drift found; rows of several machines are told apart, and never beside each other.

    Attributes:
        rows: in the order measured.
    """

    rows: tuple[Row, ...]

    @classmethod
    def read(cls, *folders: str | Path) -> DriftReport:
        """From the rows that `save` or a run left in one or more folders.

        Raises:
            ValueError: a folder has none.
        """
        paths = [Path(folder) / ROWS for folder in folders]
        for path in paths:
            if not path.is_file():
                raise ValueError(
                    f"folder must hold {ROWS}, got {str(path.parent)!r}; name one that flexvarlen "
                    "drift wrote to."
                )
        return cls(tuple(read_rows(paths)))

    @property
    def passed(self) -> bool:
        """Whether no backend of flexvarlen is wrong or broke."""
        return all(row.status not in ("wrong", "failed") or _is_foreign(row) for row in self.rows)

    def machines(self) -> list[tuple[str, list[Row]]]:
        """The rows of each GPU, or of the CPU, with what to say before; "" if there is but one."""
        if not self.rows:
            return [("", [])]
        found: dict[str, list[Row]] = {}
        for row in self.rows:
            found.setdefault(row.environment.get("gpu") or "CPU", []).append(row)
        return [("" if len(found) == 1 else f"{name}: ", rows) for name, rows in found.items()]

    def sentences(self) -> list[str]:
        """The verdicts in plain words; absolute paths in reasons are cut to their last part."""
        return [
            where + without_paths(text)
            for where, rows in self.machines()
            for text in plain_sentences(rows)
        ]

    def grids(self) -> list[Grid]:
        """The tables in short."""
        return [
            replace(grid, title=where + grid.title)
            for where, rows in self.machines()
            for grid in grids(rows)
        ]

    def details(self) -> list[str]:
        """The long tables of each suite, as Markdown."""
        from flexvarlen.drift.report.details import detailed_tables

        return [
            without_paths(text).replace("## ", f"## {where}", 1)
            for where, rows in self.machines()
            for text in detailed_tables(rows)
        ]

    def notes(self) -> list[str]:
        """Why there is no number, each reason once."""
        found: dict[str, None] = {}
        for where, rows in self.machines():
            for row in rows:
                if row.status in ("unsupported", "oom", "skipped") and row.reason:
                    who = row.case.get("backend") or row.case.get("variant")
                    why = in_short(without_paths(row.reason))
                    found[f"{where}{who}, {row.status}: {why}"] = None
        return list(found)

    def table(self, width: int | None = None) -> Group:
        """The tables in short, for rich.

        Args:
            width: columns of the terminal: tables with no room are turned, a column a row.
        """
        from rich.console import Group

        return Group(*(grid.table(width) for grid in self.grids()))

    def markdown(self) -> str:
        """Everything but the plots."""
        lines = ["# Drift", "", *(f"- {text}" for text in described(self.rows)), ""]
        lines += ["## In words", "", *(f"- {text}" for text in self.sentences()), ""]
        lines += ["## In short", ""]
        for grid in self.grids():
            lines += [grid.markdown(), ""]
        for text in self.details():
            lines += [text, ""]
        if self.notes():
            lines += ["## Not measured", "", *(f"- {note}" for note in self.notes()), ""]
        return "\n".join(lines)

    def html(self) -> str:
        """The page: one file, with nothing outside it."""
        from flexvarlen.drift.report.page import page

        return page(self)

    def save(self, folder: str | Path) -> list[Path]:
        """Write rows.jsonl anew, report.md and report.html; the folder is made.

        Returns:
            The three paths.
        """
        home = Path(folder)
        home.mkdir(parents=True, exist_ok=True)
        paths = [home / name for name in (ROWS, MARKDOWN, PAGE)]
        fresh = paths[0].with_suffix(".new")  # put in place when whole: a run may be cut off
        fresh.write_text("", encoding="utf-8")
        for row in self.rows:
            append_row(fresh, row)
        fresh.replace(paths[0])
        paths[1].write_text(self.markdown(), encoding="utf-8")
        paths[2].write_text(self.html(), encoding="utf-8")
        return paths


def _is_foreign(row: Row) -> bool:
    """A row of transformers' own attention: that it leaks is a finding."""
    name = row.case.get("backend") or row.case.get("variant") or ""
    return str(name).startswith(THEIRS)


def described(rows: Sequence[Row]) -> list[str]:
    """What was compared, and on what: a line for each suite, then for each machine and build."""
    lines = []
    for suite, words in SUITES.items():
        own = [row for row in rows if row.suite == suite]
        if own:
            what = dict.fromkeys(row.case.get("model") or row.case.get("name") for row in own)
            dtypes = dict.fromkeys(str(row.case.get("dtype")) for row in own)
            named = "; ".join(str(name) for name in what)
            lines.append(f"{words}, {', '.join(dtypes)}: {named}")
    return lines + list(dict.fromkeys(_machine(row.environment) for row in rows if row.environment))


_VERSIONS = ("torch", "transformers", "triton", "flash_attn", "flash_attn_3", "flash_attn_4")


def _machine(environment: dict[str, Any]) -> str:
    where = environment.get("gpu") or f"{environment.get('cpu')}"
    if not environment.get("gpu"):
        where = f"CPU ({where}, {environment.get('cpu_threads')} threads)"
    known = [f"{name} {environment[name]}" for name in _VERSIONS if environment.get(name)]
    own = f"flexvarlen {environment.get('flexvarlen')}{commit_of(environment)}"
    return f"{where}; {', '.join([*known, own])}"
