"""The pages: links lead somewhere, Python runs, commands exist, what is made of code is current."""

from __future__ import annotations

import ast
import re
import shlex
import tempfile
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import typer
from accelerate.state import AcceleratorState

import flexvarlen as fv
from flexvarlen import env as switches
from flexvarlen.attention.backends.registry import NOT_SAME_BITS
from flexvarlen.bench.report import report
from flexvarlen.cli import app
from flexvarlen.patches import IMPLEMENTATIONS
from flexvarlen.report.records import read_records
from tests.docs.scripts import ROOT, module_at

DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [*(ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING")), *DOCS]
EXAMPLES = sorted((ROOT / "examples").glob("*.md")) + sorted((ROOT / "examples").glob("[0-9]*.py"))
RUN = [page for page in DOCS if page.parent.name not in ("benchmarks", "reference")]

NEEDS = re.compile(r"# needs a (GPU|download)")
NOT_RUN = dict.fromkeys(("quick-start", "preference", "embeddings"), 1)
"""How many blocks of a page say in their first line that they need a GPU or a download."""


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


class Block(NamedTuple):
    """Of code: fenced, with its language, or indented, with none."""

    line: int
    language: str
    text: str


def split(markdown: str) -> tuple[str, list[Block]]:
    """The text without code blocks (its lines stay where they are), and the blocks."""
    prose: list[str] = []
    blocks: list[Block] = []
    fence, begin, code = None, 0, []
    for number, line in enumerate(markdown.splitlines(), 1):
        opened = re.match(r"\s*(`{3,})\s*([\w-]*)\s*$", line)
        if fence is None and opened:
            fence, begin, code, language = opened[1], number, [], opened[2]
        elif fence is not None and line.strip() == fence:
            blocks.append(Block(begin + 1, language, "\n".join(code)))
            fence = None
        elif fence is not None:
            code.append(line)
        elif line.startswith("    "):
            blocks.append(Block(number, "", line.strip()))
        else:
            prose.append(line)
            continue
        prose.append("")
    assert fence is None, f"the fence of line {begin} is never closed"
    return "\n".join(prose), blocks


@cache
def anchors(page: Path) -> frozenset[str]:
    """Of the headings, as GitHub makes them."""
    found: list[str] = []
    for line in split(page.read_text(encoding="utf-8"))[0].splitlines():
        heading = re.match(r"#{1,6}\s+(.+?)\s*#*$", line)
        if heading:
            text = re.sub(r"\[([^]]*)]\([^)]*\)", r"\1", heading[1])
            slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
            again = sum(1 for each in found if re.fullmatch(rf"{re.escape(slug)}(-\d+)?", each))
            found.append(f"{slug}-{again}" if again else slug)
    return frozenset(found)


def links(markdown: str) -> Iterator[tuple[int, str]]:
    """Line and target of each link and image that stays in the repository."""
    prose, _ = split(markdown)
    prose = re.sub(r"(`+)[^`].*?\1", "", prose)
    for number, line in enumerate(prose.splitlines(), 1):
        for target in re.findall(r"\]\(<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\)", line):
            if not re.match(r"[a-z][a-z0-9+.-]*:", target):
                yield number, target


def broken_link(page: Path, target: str) -> str | None:
    """Why a link leads nowhere, or None."""
    path, _, anchor = target.partition("#")
    file = (page.parent / path).resolve() if path else page
    if not file.exists():
        return f"there is no {path}"
    if ROOT not in (file, *file.parents):
        return f"{path} is outside the repository"
    if anchor and (file.suffix != ".md" or anchor not in anchors(file)):
        return f"{file.name} has no heading #{anchor}"
    return None


@pytest.mark.parametrize("page", [*PAGES, *EXAMPLES], ids=named)
def test_links_lead_somewhere(page):
    broken = [
        f"{named(page)}:{line}: {target}: {reason}"
        for line, target in links(page.read_text(encoding="utf-8"))
        if (reason := broken_link(page, target)) is not None
    ]
    assert not broken, "\n".join(broken)


def test_broken_links_are_seen(tmp_path):
    page = ROOT / "docs" / "index.md"
    text = (
        "# 1\n[a](nowhere.md) ![b](index.md#no) `[c](code.md)` [d](https://x.org)\n    [e](x.md)\n"
    )
    assert [target for _, target in links(text)] == ["nowhere.md", "index.md#no"]
    assert broken_link(page, "nowhere.md")
    assert broken_link(page, "index.md#no")
    assert broken_link(page, "../../elsewhere.md")
    assert broken_link(page, "quick-start.md#patch-a-model") is None
    (tmp_path / "p.md").write_text("# A `b`: c, d\n## Same\n## Same\n```\n# no\n```\n")
    assert anchors(tmp_path / "p.md") == {"a-b-c-d", "same", "same-1"}


def test_each_page_is_in_the_table_of_contents():
    page = ROOT / "docs" / "index.md"
    linked = {target.partition("#")[0] for _, target in links(page.read_text(encoding="utf-8"))}
    assert {each.relative_to(page.parent).as_posix() for each in DOCS} - {"index.md"} <= linked


# ---- Python ----


def python_blocks(page: Path) -> list[Block]:
    _, blocks = split(page.read_text(encoding="utf-8"))
    return [block for block in blocks if block.language in ("python", "py")]


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_python_is_python(page):
    for block in python_blocks(page):
        ast.parse("\n" * (block.line - 1) + block.text, filename=str(page))


@pytest.fixture
def _as_it_was(monkeypatch, tmp_path):
    """Trainer leaves a state in the process; the pages write where they are."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    torch.manual_seed(0)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.usefixtures("_as_it_was", "timed_briefly")
@pytest.mark.parametrize("page", RUN, ids=named)
def test_python_runs(page):
    namespace: dict[str, Any] = {"__name__": "page"}
    not_run = 0
    for block in python_blocks(page):
        if NEEDS.match(block.text):
            not_run += 1
            continue
        code = compile("\n" * (block.line - 1) + block.text, str(page), "exec")
        exec(code, namespace)
    assert not_run == NOT_RUN.get(page.stem, 0)


# ---- commands ----


def script(path: Path) -> Any:
    """What `typer.run(main)` of a script makes."""
    made = typer.Typer(add_completion=False)
    made.command()(module_at(path).main)
    return typer.main.get_command(made)


@cache
def command_of(program: str) -> Any:
    return typer.main.get_command(app) if program == "flexvarlen" else script(ROOT / program)


_PROGRAMS = r"(?:flexvarlen|(?:accelerate launch (?:--\S+ )*|python )examples/\w+\.py)"


def command_lines(markdown: str) -> list[str]:
    """Those of code blocks and of code in the text, without their comments."""
    prose, blocks = split(markdown)
    lines = [
        line.strip()
        for block in blocks
        if block.language not in ("python", "py")
        for line in block.text.replace("\\\n", " ").splitlines()
    ]
    lines += [" ".join(span.split()) for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", prose)]
    return [re.sub(r"\s+#\s.*", "", line) for line in lines]


def wrong_command(line: str) -> str | None:
    """Why the line is not one that the program takes, or None."""
    words = [word for word in shlex.split(line) if word not in ("...", "…")]
    at = next((i for i, word in enumerate(words) if word.startswith("examples/")), 0)
    program, words = words[at], words[at + 1 :]
    command = command_of(program)
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        if words[0].isupper():  # SUITE stands for any
            return None
        if words[0] not in command.commands:
            return f"there is no command {words[0]}"
        command, words = command.commands[words[0]], words[1:]
    known = {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
    for word in words:
        if word.startswith("-") and word.partition("=")[0] not in {*known, "--help"}:
            return f"there is no option {word}"
    if words and not hasattr(command, "commands") and "--help" not in words:
        try:
            command.make_context(program, list(words))  # values too; nothing is run
        except _USAGE_ERROR as error:
            return error.format_message()
    return None


_USAGE_ERROR: Any = typer.BadParameter.__base__  # of the click that typer brings


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_commands_exist(page):
    wrong = [
        f"{named(page)}: {line}: {reason}"
        for line in command_lines(page.read_text(encoding="utf-8"))
        if re.match(rf"{_PROGRAMS} ", line) and (reason := wrong_command(line)) is not None
    ]
    assert not wrong, "\n".join(wrong)


def test_wrong_commands_are_seen():
    text = "`flexvarlen doctor --no-such`\n\n    flexvarlen drift op --dtype 'a;b'  # --no-such\n"
    assert command_lines(text) == [
        "flexvarlen drift op --dtype 'a;b'",
        "flexvarlen doctor --no-such",
    ]
    assert [wrong_command(line) is None for line in command_lines(text)] == [True, False]
    assert wrong_command("flexvarlen nothing")
    assert wrong_command("flexvarlen doctor --tokens many")
    assert wrong_command("accelerate launch examples/train.py --no-such 3")
    assert wrong_command("accelerate launch examples/train.py --steps 3") is None


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_modules_and_make_targets_exist(page):
    lines = command_lines(page.read_text(encoding="utf-8"))
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line in lines:
        module = re.match(r"python -m (flexvarlen[\w.]*\w|tests\.\w+)", line)
        assert module is None or find_spec(module[1]) is not None, line
        target = re.match(r"make ([a-z-]+)(?: [A-Z_]+=.*)?$", line)
        assert target is None or target[1] in targets, line


# ---- tables of the pages ----


def table(page: str, heading: str) -> dict[str, list[str]]:
    """The first table under a heading: the cells of each row, by each name in its first."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    below = text.split(f"{heading}\n", 1)[1]
    found: dict[str, list[str]] = {}
    for line in re.search(r"(?:^\|.*\n)+", below, re.MULTILINE)[0].splitlines()[2:]:
        first, *cells = (cell.strip() for cell in line.strip("|").split(" | "))
        found |= dict.fromkeys(re.findall(r"`([^`]+)`", first), cells)
    return found


def test_each_backend_is_on_its_page():
    shown = table("backends.md", "# Backends")
    assert {name: cells[0].strip("`") for name, cells in shown.items()} == {
        backend: name for name, backend in reversed(IMPLEMENTATIONS.items())
    }


CAPABILITIES = ROOT / "bench" / "results" / "capabilities-h200.jsonl"


def test_pages_and_tables_are_what_the_records_say(tmp_path):
    """The figures' titles apart, which only `make report` makes."""
    there = {page: page.read_text("utf-8") for page in PAGES if "<!-- bench:" in page.read_text()}
    copies = {page: tmp_path / page.relative_to(ROOT) for page in there}
    for page, copy in copies.items():
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(there[page], "utf-8")
    results, tables = CAPABILITIES.parent, tmp_path / "tables"
    report(sorted(results.glob("*.jsonl")), pages=copies.values(), tables=tables)
    stale = [named(page) for page, copy in copies.items() if copy.read_text("utf-8") != there[page]]
    made, kept = (
        {path.name: path.read_text("utf-8") for path in folder.iterdir()}
        for folder in (tables, results / "tables")
    )
    stale += [name for name in made.keys() | kept.keys() if made.get(name) != kept.get(name)]
    assert not stale, f"make report; stale: {', '.join(stale)}"


def test_excerpt_of_compare_is_from_its_record():
    record = report([ROOT / "bench" / "results" / "compare-h200.jsonl"]).splitlines()
    excerpt = table("verification.md", "## `compare`: are the numbers right?")
    assert len(excerpt) == 5
    for backend, cells in excerpt.items():
        line = next(line for line in record if line.startswith(f"| {backend.strip('`')} |"))
        assert set(cells) <= {cell.strip() for cell in line.split("|")}, backend


def test_guarantees_are_those_of_the_checks():
    """Of the GPU, as the checks there were asked: rows of bench/results."""
    shown = table("backends.md", "## `deterministic`, `batch_invariant` and `same_bits`")
    assert set(shown) == set(fv.BACKENDS)
    rows = read_records([CAPABILITIES])
    assert {row.case["variant"] for row in rows} == set(shown)
    for row in rows:
        *of_call, same_bits = shown[row.case["variant"]]
        assert same_bits.startswith("yes") is (row.case["variant"] not in NOT_SAME_BITS)
        for cell, measure in zip(of_call, ("deterministic", "batch invariant"), strict=True):
            refused = row.measures["why_not"][measure] is not None
            assert refused is not cell.startswith("yes"), (row.case["variant"], measure, cell)


def sources() -> Iterator[str]:
    """Of the package, but for the benchmarks."""
    for folder in (ROOT / "flexvarlen", ROOT / "patches"):
        yield from (path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py")))


def test_each_environment_variable_is_on_its_page():
    uses = re.compile(r"(\w+) in os\.environ|os\.environ(?:\.\w+\(|\[)\"?(\w+)|getenv\(\"?(\w+)")
    used = {"".join(names) for text in sources() for names in uses.findall(text)}
    constants = {name: value for name, value in vars(switches).items() if name.isupper()}
    read = {constants.get(name, name) for name in used if name.isupper()}
    assert {"XDG_CACHE_HOME", switches.CACHE, switches.FA4_KEEPS} <= read
    listed = table("reference/environment.md", "# Environment variables")
    assert read | set(constants.values()) <= listed.keys()


# ---- the reference ----


def test_each_public_name_is_on_one_page_of_the_reference():
    pages = (ROOT / "docs" / "reference").glob("*.md")
    shown = re.findall(r"^::: .*\b(\w+)$", "\n".join(map(Path.read_text, pages)), re.MULTILINE)
    assert sorted(name for name in shown if name in fv.__all__) == sorted(fv.__all__)


def test_pages_that_docstrings_name_are_there():
    named = {each for text in sources() for each in re.findall(r"\bdocs/[\w/-]+\.md#?[\w-]*", text)}
    assert "docs/families.md" in named
    assert not [each for each in named if broken_link(ROOT / "README.md", each)]


# ---- what is made from the code ----


@pytest.fixture
def make_families():
    return module_at(ROOT / "docs" / "make_families.py")


def test_the_made_page_is_current(make_families):
    assert make_families.main(["--check"]) == 0, "run: python docs/make_families.py"


def test_a_page_that_is_not_current_is_seen(make_families, tmp_path, monkeypatch):
    current = make_families.PAGE.read_text()
    page = tmp_path / "page.md"
    page.write_text(current.replace("`llama4_text`", "`lama`"))
    monkeypatch.setattr(make_families, "PAGE", page)
    assert make_families.main(["--check"]) == 1
    assert make_families.main([]) == 0
    assert page.read_text() == current
