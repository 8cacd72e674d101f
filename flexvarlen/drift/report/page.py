"""The page of a drift: one HTML file, its plots inside, no script, nothing fetched."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable
from dataclasses import replace
from html import escape
from typing import TYPE_CHECKING

from flexvarlen.drift.grid import Grid
from flexvarlen.drift.report.drawing import Picture
from flexvarlen.drift.report.figures import pictures
from flexvarlen.environment import without_paths

if TYPE_CHECKING:
    from flexvarlen.drift.report.files import DriftReport

_STYLE = """
:root { color-scheme: light dark; --ink: #222; --pale: #666; --line: #ddd; --paper: #fff;
  --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e6e6; --pale: #a0a0a0; --line: #444;
  --paper: #1b1b1b; --bad: #ff8a80; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 1100px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2rem; } h3 { font-size: 1rem; }
ul.on { color: var(--pale); padding-left: 1.2rem; }
figure { margin: 1.2rem 0; } figure img { width: 100%; background: #fff; border-radius: 4px; }
figcaption { color: var(--pale); font-size: 0.85rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.82rem; margin: 0.5rem 0 1.5rem; }
th, td { border-bottom: 1px solid var(--line); padding: 0.25rem 0.6rem; text-align: right;
  font-variant-numeric: tabular-nums; }
th:first-child, td:first-child, th:nth-child(2), td:nth-child(2) { text-align: left; }
caption { text-align: left; font-weight: 600; padding: 0.4rem 0; }
tr.bad td { color: var(--bad); }
summary { cursor: pointer; color: var(--pale); }
"""


def page(report: DriftReport) -> str:
    """The report as HTML: what and where, the verdicts, the plots, the tables.

    No absolute path and no host name can be in it: rows have no host names, and the report cuts
    paths out of reasons.
    """
    from flexvarlen.drift.report.files import described

    on = _list((without_paths(line) for line in described(report.rows)), "on")
    parts = ["<h1>Drift</h1>", on, "<h2>In words</h2>", _list(report.sentences())]
    drawn = [
        replace(picture, alt=where + picture.alt)
        for where, rows in report.machines()
        for picture in pictures(rows)
    ]
    if drawn:
        parts += ["<h2>Plots</h2>", *map(_figure, drawn)]
    parts += ["<h2>In short</h2>", *map(_table, report.grids())]
    parts += [_details(text) for text in report.details()]
    if report.notes():
        parts += ["<h2>Not measured</h2>", _list(report.notes())]
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}<title>flexvarlen drift</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def _list(texts: Iterable[str], name: str = "") -> str:
    items = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return f'<ul class="{name}">{items}</ul>' if name else f"<ul>{items}</ul>"


def _figure(picture: Picture) -> str:
    """An image, not a part of the page: so its ids cannot meet those of another plot."""
    data = b64encode(picture.svg).decode()
    alt = escape(f"{picture.title}. {picture.alt}")
    return (
        f'<figure><img alt="{alt}" src="data:image/svg+xml;base64,{data}">'
        f"<figcaption>{escape(picture.alt)}</figcaption></figure>"
    )


def _table(grid: Grid) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in grid.header)
    body = ""
    for index, row in enumerate(grid.rows):
        mark = ' class="bad"' if index in grid.bad else ""
        body += f"<tr{mark}>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
    title = escape(grid.title)
    return (
        f'<div class="wide"><table><caption>{title}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _details(text: str) -> str:
    """A suite's long tables: Markdown, behind a heading that opens them."""
    from markdown_it import MarkdownIt  # rich brings it along

    html = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    first = text.lstrip().splitlines()[0].strip("#* ")
    return f'<details><summary>{escape(first)}</summary><div class="wide">{html}</div></details>'
