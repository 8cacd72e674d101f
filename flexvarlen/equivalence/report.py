"""What a comparison found: rows as data; then a table, JSON lines, Markdown and a picture."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from flexvarlen.rows import in_short

if TYPE_CHECKING:
    from rich.table import Table

PEER = "transformers:eager@alone"
"""The name of the peer's row: each document alone, transformers' eager attention."""

Status = Literal["ok", "forward only", "unsupported", "oom", "failed"]
Role = Literal["flexvarlen", "transformers", "peer"]


@dataclass(frozen=True)
class Row:
    """One variant of one model on one packed row. Errors are absolute, against fp64 per document.

    None is "not measured": the row's `status` and `reason` say why.
    """

    model: str
    backend: str
    role: Role
    status: Status
    reason: str | None
    """Why the status is not ok."""
    dtype: str
    device: str
    passes: Literal["forward", "forward+backward"]
    compiled: bool
    tokens: int
    documents: int
    longest_document: int
    seed: int
    source: str
    oracle: str
    """Which documents the oracle covers."""
    verdict: Literal["right", "leaks", "wrong"] | None = None
    why: str | None = None
    """Why the verdict is not right."""
    logits_max: float | None = None
    logits_mean: float | None = None
    logits_limit: float | None = None
    loss_error: float | None = None
    loss_limit: float | None = None
    gradient_max: float | None = None
    gradient_mean: float | None = None
    gradients: dict[str, tuple[float, float]] = field(default_factory=dict)
    """The largest and the mean error of each parameter's gradient."""
    worst_gradient: str | None = None
    """The parameter whose gradient's error is the largest share of what the rule allows it."""
    worst_gradient_share: float | None = None
    repacked_logits_max: float | None = None
    """The largest error on the last of the other packings."""
    repacked_logits_limit: float | None = None
    argmax_agreement: float | None = None
    leaked_outputs: int | None = None
    """Documents whose logits changed, in any bit, with another document's tokens."""
    leaked_gradients: int | None = None
    backward_repeats: bool | None = None
    """Whether two backwards of the same batch gave the same bits."""
    leaked_documents: int | None = None
    """Documents in either of the two."""
    tokens_per_s: float | None = None
    ms_p20: float | None = None
    ms_p50: float | None = None
    ms_p80: float | None = None
    repeats: int | None = None
    peak_mib: float | None = None
    peak_meaning: str | None = None
    first_step_s: float | None = None
    """Wall seconds of the first step, compilation included."""
    compile_s: float | None = None
    graph_breaks: int | None = None
    other_packings: int | None = None
    recompiles: int | None = None
    """Frames compiled again over the other packings of the same number of tokens."""
    recompile_reasons: tuple[str, ...] = ()
    environment: dict[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """False if a backend of ours ran and was not right, or broke; the exit code's business."""
        return self.role != "flexvarlen" or (
            self.status != "failed" and self.verdict in (None, "right")
        )


@dataclass(frozen=True)
class Column:
    """A column of the tables.

    Attributes:
        name: its heading.
        cell: what it says of a row.
        spare: the column with the largest number is the first to go where a terminal is narrow;
            0 stays.
    """

    name: str
    cell: Callable[[Row], str]
    spare: int = 0


def _number(value: float | None, pattern: str = ".1e") -> str:
    return "–" if value is None else format(value, pattern)


def _verdict(row: Row) -> str:
    if row.verdict is not None:
        return row.verdict if row.status == "ok" else f"{row.verdict} (fwd)"
    return "the peer" if row.role == "peer" else row.status


def _leak(row: Row) -> str:
    if row.leaked_documents is None:
        return "–"
    return f"{row.leaked_documents} of {row.documents}" if row.leaked_documents else "none"


def _share(value: float | None) -> str:
    """A share of tokens that is 100% only if it is all of them."""
    if value is None:
        return "–"
    return "100%" if value == 1 else f"{min(value, 0.9999):.2%}"


_COLUMNS = (
    Column("backend", lambda row: display_name(row.backend)),
    Column("verdict", _verdict),
    Column("leak", _leak),
    Column("logits max", lambda row: _number(row.logits_max)),
    Column("mean", lambda row: _number(row.logits_mean), 6),
    Column("loss", lambda row: _number(row.loss_error), 5),
    Column("gradients", lambda row: _number(row.gradient_max), 1),
    Column("argmax", lambda row: _share(row.argmax_agreement), 3),
    Column("tokens/s", lambda row: _number(row.tokens_per_s, ",.0f")),
    Column("ms (p20–p80)", lambda row: _milliseconds(row), 4),
    Column("peak MiB", lambda row: _number(row.peak_mib, ",.0f"), 2),
)

_COMPILED_COLUMNS = (
    Column("compile s", lambda row: _number(row.compile_s, ".1f"), 2),
    Column("breaks", lambda row: _number(row.graph_breaks, "d"), 1),
    Column("recompiles", lambda row: _number(row.recompiles, "d"), 1),
)
GAP = 2  # between columns


def _milliseconds(row: Row) -> str:
    if row.ms_p50 is None or row.ms_p20 is None or row.ms_p80 is None:
        return "–"
    digits = ".0f" if row.ms_p50 >= 100 else ".1f"
    return f"{row.ms_p50:{digits}} ({row.ms_p20:{digits}}–{row.ms_p80:{digits}})"


def display_name(backend: str) -> str:
    """The name in tables and figures."""
    return "each document alone" if backend == PEER else backend


@dataclass(frozen=True)
class Report:
    """Rows, and what can be made of them.

    Attributes:
        rows: in the order measured.
    """

    rows: tuple[Row, ...]

    def __add__(self, other: Report) -> Report:
        return Report(self.rows + other.rows)

    @property
    def passed(self) -> bool:
        """Whether every backend of ours that ran is right."""
        return all(row.passed for row in self.rows)

    def models(self) -> dict[str, list[Row]]:
        """The rows by model."""
        found: dict[str, list[Row]] = {}
        for row in self.rows:
            found.setdefault(row.model, []).append(row)
        return found

    def verdicts(self) -> dict[str, str]:
        """One line a model."""
        return {model: _summary(rows) for model, rows in self.models().items()}

    def table(self, width: int | None = None) -> Table:
        """The rows, a section a model, for a terminal.

        Args:
            width: columns of the terminal; what has no room is left out, and the caption says so.
                Default: everything, about 130.
        """
        from rich.table import Table
        from rich.text import Text

        every = _columns(self.rows)
        columns = every if width is None else _that_fit(every, self.rows, width)
        table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, GAP, 0, 0))
        for index, column in enumerate(columns):
            table.add_column(column.name, justify="left" if index < 2 else "right", no_wrap=True)
        for number, (model, rows) in enumerate(self.models().items()):
            if number:
                table.add_row()
            table.add_row(Text(model, style="bold"))
            for row in rows:
                table.add_row(*(Text(column.cell(row)) for column in columns), style=_style(row))
        left_out = [column.name for column in every if column not in columns]
        if left_out:
            table.caption = f"no room here for: {', '.join(left_out)} (see table.md)"
            table.caption_justify = "left"
        return table

    def notes(self) -> list[str]:
        """A sentence for each row that is not plainly right, each once for all models."""
        notes: dict[str, None] = {}
        for row in self.rows:
            for text in (row.reason, row.why):
                if text is not None:
                    where = f"{row.model}, " if text is row.why else ""
                    notes[f"{where}{display_name(row.backend)}: {in_short(text)}"] = None
        return list(notes)

    def markdown(self) -> str:
        """The table as Markdown, with what it was measured on."""
        columns = _columns(self.rows)
        lines = []
        for model, rows in self.models().items():
            lines += [f"### {model}", "", describe(rows), ""]
            lines.append("| " + " | ".join(column.name for column in columns) + " |")
            lines.append(
                "|" + "|".join(" --- " if i < 2 else " ---: " for i, _ in enumerate(columns)) + "|"
            )
            lines += [
                "| " + " | ".join(column.cell(row) for column in columns) + " |" for row in rows
            ]
            lines += ["", _summary(rows), ""]
        return "\n".join([*lines, *(f"- {note}" for note in self.notes()), ""])

    def save(self, folder: str | Path) -> list[Path]:
        """Write rows.jsonl, table.md and compare.png; the folder is made.

        Returns:
            The three paths.
        """
        from flexvarlen.equivalence.figure import draw

        home = Path(folder)
        home.mkdir(parents=True, exist_ok=True)
        paths = [home / name for name in ("rows.jsonl", "table.md", "compare.png")]
        lines = (json.dumps(asdict(row), allow_nan=True) for row in self.rows)
        paths[0].write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        paths[1].write_text(self.markdown(), encoding="utf-8")
        draw(self, paths[2])
        return paths


def read_rows(file: str | Path) -> Report:
    """The report that `save` wrote, from its rows.jsonl."""
    rows = []
    for line in Path(file).read_text(encoding="utf-8").splitlines():
        data = json.loads(line)
        data["recompile_reasons"] = tuple(data["recompile_reasons"])
        data["gradients"] = {name: tuple(gap) for name, gap in data["gradients"].items()}
        rows.append(Row(**data))
    return Report(tuple(rows))


def describe(rows: list[Row]) -> str:
    """What the rows of a model were measured on."""
    row = rows[0]
    environment = row.environment
    machine = environment.get("gpu") or f"CPU, {environment.get('cpu_threads', '?')} threads"
    mode = "compiled" if any(row.compiled for row in rows) else "eager"
    return (
        f"{row.dtype}, {row.passes}, {mode}, {machine}; {row.tokens:,} tokens in {row.documents} "
        f"documents (longest {row.longest_document:,}); oracle: {row.oracle}; {row.source}"
    )


def _that_fit(columns: tuple[Column, ...], rows: tuple[Row, ...], width: int) -> tuple[Column, ...]:
    def needed(chosen: tuple[Column, ...]) -> int:
        cells = (max([len(c.name), *(len(c.cell(row)) for row in rows)]) + GAP for c in chosen)
        return sum(cells)

    while needed(columns) > width and any(column.spare for column in columns):
        spared = max(columns, key=lambda column: column.spare)
        columns = tuple(column for column in columns if column is not spared)
    return columns


def _columns(rows: Iterable[Row]) -> tuple[Column, ...]:
    return _COLUMNS + (_COMPILED_COLUMNS if any(row.compiled for row in rows) else ())


def _style(row: Row) -> str:
    if row.status == "failed" or row.verdict in ("leaks", "wrong"):
        return "red"
    if row.status in ("unsupported", "oom"):
        return "dim"
    return "cyan" if row.role == "peer" else ""


def _summary(rows: list[Row]) -> str:
    ours = [row for row in rows if row.role == "flexvarlen"]
    ran = [row for row in ours if row.verdict is not None]
    wrong = [f"{row.backend} ({row.verdict or row.status})" for row in ours if not row.passed]
    if wrong:
        return f"{rows[0].model}: not right: {', '.join(wrong)}."
    if not ran:
        return f"{rows[0].model}: no backend of flexvarlen could run here."
    text = f"{rows[0].model}: {', '.join(row.backend for row in ran)} right, no leak"
    peer = next((row for row in rows if row.role == "peer"), None)
    timed = [row for row in ran if row.status == "ok" and row.tokens_per_s]
    if timed and peer is not None and peer.tokens_per_s and peer.ms_p20:
        fastest = max(timed, key=lambda row: row.tokens_per_s or 0.0)
        clearly = (fastest.ms_p80 or 0.0) < peer.ms_p20  # else the machine's noise is larger
        if clearly:
            ratio = (fastest.tokens_per_s or 0.0) / peer.tokens_per_s
            text += f"; {fastest.backend} runs {ratio:.1f} × the tokens/s of each document alone"
    leaking = [row.backend for row in rows if row.role == "transformers" and row.verdict == "leaks"]
    if leaking:
        text += f". {', '.join(leaking)} leaks"
    return text + "."
