"""What `make docs` adds to mkdocs, so that the site and GitHub read the same pages.

- The site has the repository's paths, so a link that is right on GitHub is right there.
- A script or notebook of examples/ is a page. A link to a file or folder that is not on the site
  becomes its text, with the link's title.
- The options of the commands come from the program, and doctests of docstrings are code blocks.
- A public name in code, and `docs/packing.md` in a docstring, link to their pages.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
SHOWN = ("*.md", "docs/**/*.md", "docs/images/*", "docs/*.css", "examples/*.md", "bench/**/*.md")
COMMANDS = "<!-- the commands -->"


def on_config(config: MkDocsConfig) -> None:
    """The examples, in the navigation."""
    section = next(entry["Examples"] for entry in config.nav or () if "Examples" in entry)
    section += [f"{path.relative_to(ROOT)}.md" for path in _examples()]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The pages of the repository, and those of the examples, in place of docs/ alone."""
    for file in list(files):
        if file.src_dir == config.docs_dir:
            files.remove(file)
    for path in sorted(path for pattern in SHOWN for path in ROOT.glob(pattern)):
        uri = path.relative_to(ROOT).as_posix()
        files.append(File(uri, str(ROOT), config.site_dir, config.use_directory_urls))
    for path in _examples():
        uri = f"{path.relative_to(ROOT).as_posix()}.md"
        files.append(File.generated(config, uri, content=_page_of(path)))
    return files


def _examples() -> list[Path]:
    """Notebooks, and scripts that are not a notebook's."""
    folder = ROOT / "examples"
    scripts = [p for p in folder.glob("*.py") if not p.with_suffix(".ipynb").exists()]
    return sorted(folder.glob("*.ipynb")) + sorted(scripts)


def _page_of(example: Path) -> str:
    """A script as it is; a notebook's text and code, and what the code printed and drew."""
    content = example.read_text(encoding="utf-8")
    if example.suffix == ".py":
        return f"# {example.name}\n\n```python\n{content}```\n"
    parts = []
    for cell in json.loads(content)["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        parts += [_output(output) for output in cell.get("outputs", ())]
    return "\n\n".join(parts)


def _output(output: dict[str, Any]) -> str:
    """Of a cell, as Markdown."""
    data = output.get("data", {"text/plain": output.get("text", "")})
    if "image/png" in data:
        return f"![output](data:image/png;base64,{''.join(data['image/png']).strip()})"
    if "text/markdown" in data:
        return "".join(data["text/markdown"])
    return f"```text\n{''.join(data['text/plain'])}\n```"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links to what the site has in another form, or does not have; the commands' options."""

    def on_site(link: re.Match[str]) -> str:
        text, target = link["text"], link["target"]
        path = (ROOT / page.file.src_uri).parent.joinpath(target).resolve()
        if path.is_relative_to(ROOT) and path.exists():
            uri = path.relative_to(ROOT).as_posix()
            if files.get_file_from_path(f"{uri}.md"):
                return f"[{text}]({target}.md)"
            if not files.get_file_from_path(uri):
                return f"<abbr title={link['title']}>{text}</abbr>" if link["title"] else text
        return link[0]

    if COMMANDS in markdown:
        markdown = markdown.replace(COMMANDS, _commands())
    target = r'\((?P<target>[^):#\s]+)( (?P<title>"[^"]*"))?\)'
    return re.sub(rf"(?<!!)\[(?P<text>[^]]+)]{target}", on_site, markdown)


def _commands() -> str:
    """All commands and options, as typer tells them, without its heading and lists of commands."""
    typer = [sys.executable, "-m", "typer", "flexvarlen.cli"]
    command = [*typer, "utils", "docs", "--name", "flexvarlen"]
    printed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return re.sub(r"\*\*Commands\*\*:\n\n(\* .*\n)+", "", printed.split("\n", 1)[1])


# ---- names in code ----

AMBIGUOUS = ("lm_head", "share_prefixes")  # a module and an argument have these names too
KEPT = r"<(a|h\d|pre)\b.*?</\1>"
NAME = r"<code>(?P<prefix>fv\.|flexvarlen\.)?(?P<name>\w+)(?P<member>\.\w+)?(\([^<]*)?</code>"
GUIDE = r"(?<![\w/])docs/(?P<page>[\w/-]+)\.md(?P<anchor>#[\w-]+)?"


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links from public names in code to the reference, and from docstrings to guides.

    One word, as `pack`, is a name only as `fv.pack`, or in the reference.
    """
    in_reference = "\n::: " in (page.markdown or "")

    def linked(found: re.Match[str]) -> str:
        if found["page"] and in_reference:
            text = found["page"].replace("-", " ")
            return f'<a href="../{found["page"]}.html{found["anchor"] or ""}">{text}</a>'
        identifier = _reference().get(found["name"])
        if identifier is None:
            return found[0]
        is_word = not in_reference and re.fullmatch("[a-z]+", found["name"])
        if not found["prefix"] and (is_word or found["name"] in AMBIGUOUS):
            return found[0]
        target = identifier + (found["member"] or "")
        return f'<autoref optional identifier="{target}">{found[0]}</autoref>'

    return re.sub(f"{KEPT}|{NAME}|{GUIDE}", linked, html, flags=re.DOTALL)


@cache
def _reference() -> dict[str, str]:
    """The full names that pages of the reference show, by their last part."""
    pages = (path.read_text(encoding="utf-8") for path in (ROOT / "docs/reference").glob("*.md"))
    names = [name for text in pages for name in re.findall(r"^::: (\S+)$", text, re.MULTILINE)]
    return {name.rpartition(".")[2]: name for name in names}


class FencedDoctests(griffe.Extension):
    """Doctests of docstrings, as blocks of code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for each module, class, function and attribute."""
        if obj.docstring:
            value = re.sub(r" +# doctest: .*", "", obj.docstring.value)
            blocks = r"^( *)>>> .*(?:\n\1\S.*)*"
            fenced = re.sub(blocks, r"\1```pycon\n\g<0>\n\1```", value, flags=re.MULTILINE)
            obj.docstring.value = fenced
