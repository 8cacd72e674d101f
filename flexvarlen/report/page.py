"""Pages: Markdown files whose text between markers is generated from records.

`<!-- bench:NAME begin -->` and `<!-- bench:NAME end -->` enclose the tables of suite NAME, and
`bench:NAME-figures` its charts.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path


def rewrite(page: Path, bodies: Mapping[str, str]) -> None:
    """Replace the text between the markers of these names, if the page has them.

    Raises:
        ValueError: the page has none of these markers, or only one of a pair.
    """
    text = before = page.read_text(encoding="utf-8")
    found = [name for name in bodies if any(marker in text for marker in markers(name))]
    if not found:
        raise ValueError(
            f"{page.name} must contain the markers of one of {', '.join(bodies)}; put "
            f"{' and '.join(markers(next(iter(bodies), 'NAME')))} where the tables belong."
        )
    for name in found:
        text = replace_between_markers(text, name, bodies[name])
    if text != before:
        page.write_text(text, encoding="utf-8")


def image_links(paths: Sequence[Path], page: Path) -> str:
    """Links to charts, relative to the page, each with its title as alternative text."""
    return "\n\n".join(
        f"![{_title_of(path)}.]({Path(os.path.relpath(path, page.parent)).as_posix()})"
        for path in paths
    )


def _title_of(chart: Path) -> str:
    from PIL import Image  # which matplotlib brings

    with Image.open(chart) as image:
        title: str = image.info["Title"]
    return title


def markers(name: str) -> tuple[str, str]:
    """The lines that enclose a body."""
    return f"<!-- bench:{name} begin -->", f"<!-- bench:{name} end -->"


def replace_between_markers(text: str, name: str, body: str) -> str:
    """`text` with `body` between the markers of `name`.

    Raises:
        ValueError: the text does not have the two markers, once each and in order.

    >>> replace_between_markers("<!-- bench:x begin --> old <!-- bench:x end -->", "x", "new")
    '<!-- bench:x begin -->\\nnew\\n<!-- bench:x end -->'
    """
    begin, end = markers(name)
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(
            f"the text must contain {begin} and, after it, {end}, once each; put them where the "
            "table belongs."
        )
    head, tail = text[: text.index(begin)], text[text.index(end) + len(end) :]
    return f"{head}{begin}\n{body.strip()}\n{end}{tail}"
