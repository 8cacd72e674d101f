"""`report`: tables and figures of rows, from the rows alone; on pages between their markers.

A page shows a suite's tables between `<!-- bench:NAME begin -->` and `<!-- bench:NAME end -->`, its
figures between `<!-- bench:NAME-figures begin -->` and its end, and what public sources claimed
beside what was measured between those of `bench:claims`. The command is `flexvarlen bench report`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from flexvarlen.bench.attention.host_time import host_time_section
from flexvarlen.bench.claims_tables import CLAIM_SUITES, claims_section
from flexvarlen.bench.contract.capabilities import capabilities_section
from flexvarlen.bench.contract.families_tables import families_section
from flexvarlen.bench.contract.leaks_tables import leaks_section
from flexvarlen.bench.drift_tables import drift_section
from flexvarlen.bench.model.compile_tables import compile_section, small_inference_section
from flexvarlen.bench.model.layer_time import layer_time_section
from flexvarlen.bench.model.packings_tables import packings_figures, packings_section
from flexvarlen.bench.suite import SUITES, suite_of
from flexvarlen.bench.summary import SUMMARIES, summary_section
from flexvarlen.bench.training.convergence_figure import convergence_figures
from flexvarlen.bench.training.convergence_tables import convergence_section
from flexvarlen.bench.training.end_to_end_tables import end_to_end_figures, end_to_end_section
from flexvarlen.bench.training.scaling_ranks_tables import (
    scaling_ranks_figures,
    scaling_ranks_section,
)
from flexvarlen.rows import Row, read_rows

SECTIONS: dict[str, Callable[[Sequence[Row]], str]] = {
    "leaks": leaks_section,
    "capabilities": capabilities_section,
    "packings": packings_section,
    "compile": compile_section,
    "small-inference": small_inference_section,
    "host-time": host_time_section,
    "layer-time": layer_time_section,
    "families": families_section,
    "drift-op": drift_section,
    "drift-model": drift_section,
    "drift-attribution": drift_section,
    "drift-training": drift_section,
    "convergence": convergence_section,
    "end-to-end": end_to_end_section,
    "scaling-ranks": scaling_ranks_section,
}
"""Of what is no suite of the runner."""

FIGURES: dict[str, Callable[[Sequence[Row], Path], Sequence[Path]]] = {
    "packings": packings_figures,
    "convergence": convergence_figures,
    "end-to-end": end_to_end_figures,
    "scaling-ranks": scaling_ranks_figures,
}
"""Of those that have figures."""


def report(
    paths: Iterable[Path],
    *,
    pages: Iterable[Path] = (),
    figures: Path | None = None,
    compare: Path | None = None,
) -> str:
    """Every suite's tables as Markdown; written into pages and drawn, if asked.

    Args:
        paths: JSON lines of rows, of any suites, on any machines.
        pages: Markdown files; what stands between the markers of what is rendered is replaced.
            Claims are judged by these rows alone: give all files of a page at once. A summary
            is left as it is by rows that lack a suite of its lines.
        figures: a folder for the PNGs.
        compare: also the rows.jsonl of `flexvarlen compare`, as "compare".

    Raises:
        ValueError: a suite that is not known; a page with one marker of a pair, or no pair of
            anything that is rendered; a file that holds no rows.
    """
    suites: dict[str, list[Row]] = {}
    for row in read_rows(paths):
        suites.setdefault(row.suite, []).append(row)
    bodies = {} if compare is None else {"compare": compare_section(compare)}
    bodies |= {name: section_of(name, rows) for name, rows in suites.items()}
    drawn: dict[str, Sequence[Path]] = {}
    if figures is not None:
        for name, rows in suites.items():
            if name in SUITES or name in FIGURES:
                draw = suite_of(name).figures if name in SUITES else FIGURES[name]
                drawn[name] = draw(rows, figures)
    text = "\n\n".join(bodies.values())
    if SUMMARIES.keys() <= suites.keys():  # of fewer it would lose lines
        bodies["summary"] = summary_section([row for rows in suites.values() for row in rows])
    if any(name in suites for name in CLAIM_SUITES):
        bodies["claims"] = claims_section([row for rows in suites.values() for row in rows])
    for page in pages:
        _rewrite(page, bodies, drawn)
    return text


def section_of(name: str, rows: Sequence[Row]) -> str:
    """A suite's tables, from its rows.

    Raises:
        ValueError: there is no such suite.
    """
    if name in SUITES:
        return suite_of(name).section(rows)
    if name not in SECTIONS:
        raise ValueError(
            f"suite must be one of {', '.join((*SUITES, *SECTIONS))}, got {name!r}; leave its "
            "rows out."
        )
    return SECTIONS[name](rows)


def compare_section(path: Path) -> str:
    """The tables of a `flexvarlen compare` run, from its rows."""
    from flexvarlen.equivalence.report import read_rows as read_report

    return read_report(path).markdown()


# --- pages ---------------------------------------------------------------------------------------


def _rewrite(page: Path, bodies: dict[str, str], drawn: dict[str, Sequence[Path]]) -> None:
    text = before = page.read_text()
    here = bodies | {
        f"{name}-figures": _links(paths, page, name) for name, paths in drawn.items() if paths
    }
    found = [name for name in here if any(marker in text for marker in _markers(name))]
    if not found:
        raise ValueError(
            f"{page.name} must hold the markers of one of {', '.join(bodies)}, got none; put "
            f"{' and '.join(_markers(next(iter(bodies), 'NAME')))} where the tables belong."
        )
    for name in found:
        text = replace_between_markers(text, name, here[name])
    if text != before:
        page.write_text(text)


def _links(paths: Sequence[Path], page: Path, name: str) -> str:
    return "\n\n".join(
        f"![{name}: {path.stem}]({Path(os.path.relpath(path, page.parent)).as_posix()})"
        for path in paths
    )


def _markers(name: str) -> tuple[str, str]:
    return f"<!-- bench:{name} begin -->", f"<!-- bench:{name} end -->"


def replace_between_markers(text: str, name: str, body: str) -> str:
    """`text` with `body` between the markers `<!-- bench:NAME begin -->` and `… end -->`.

    Raises:
        ValueError: the two markers are not there, once each and in order.

    >>> replace_between_markers("<!-- bench:x begin --> old <!-- bench:x end -->", "x", "new")
    '<!-- bench:x begin -->\\nnew\\n<!-- bench:x end -->'
    """
    begin, end = _markers(name)
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(
            f"the text must hold {begin} and, after it, {end}, once each; put them where the "
            "table belongs"
        )
    head, tail = text[: text.index(begin)], text[text.index(end) + len(end) :]
    return f"{head}{begin}\n{body.strip()}\n{end}{tail}"


# --- command -------------------------------------------------------------------------------------
