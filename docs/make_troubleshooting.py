"""The second half of docs/troubleshooting.md: every error and warning, read from the code.

    python docs/make_troubleshooting.py             # writes the page
    python docs/make_troubleshooting.py --check     # exit code 1 if it would change

Nothing is imported: the sources are parsed. A text is what an exception is made with, what
`warnings.warn` and `torch._assert_async` are given, what a check of a backend returns, and what a
command prints as an error.
"""

from __future__ import annotations

import ast
import builtins
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "troubleshooting.md"
BEGIN, END = "<!-- messages begin -->", "<!-- messages end -->"

GROUPS = {
    "patches": "Models: `patch_model`, forwards, decoding",
    "layout": "Layouts and masks",
    "packing": "Packing",
    "backends": "Backends and attention",
    "auto": "`auto`",
    "parallel": "Across ranks",
    "equivalence": "Verifying and comparing",
    "drift": "Drift",
    "bench": "Benchmarks",
    "cli": "Commands",
    "other": "The rest",
}
_GROUP_OF = {
    **dict.fromkeys(("boundaries", "bounds", "block_mask", "mask", "mask_picture"), "layout"),
    **dict.fromkeys(("positions", "tables", "chunks", "launch", "kernels"), "layout"),
    **dict.fromkeys(("attention", "switches"), "backends"),
    **dict.fromkeys(("trainer", "testing"), "equivalence"),
}

_NO_MESSAGE = {"StopIteration", "SystemExit", "Exit", "KeyboardInterrupt"}
_BUILTIN = {
    name
    for name, value in vars(builtins).items()
    if isinstance(value, type) and issubclass(value, BaseException)
} - _NO_MESSAGE
_PRINTS = ("errors.print", "parser.error", "typer.BadParameter")
_CHECKS = re.compile(r"why_not|why_missing|why_no_|refusal$|_problem$|^unavailable$")
_LONGEST_PLACEHOLDER = 24  # characters of an expression that still reads as a name


@dataclass(frozen=True)
class Message:
    """One text.

    Attributes:
        path: of the file, below the repository.
        kind: the exception's name, "warning", "device assertion", "refusal" or "printed".
        text: with <placeholders>.
    """

    path: str
    kind: str
    text: str

    def says_and_advises(self) -> tuple[str, str]:
        """What is wrong; what to do, which follows the first semicolon."""
        says, _, advice = self.text.partition("; ")
        return says, advice


@dataclass
class _File:
    path: str
    tree: ast.Module
    constants: dict[str, ast.expr] = field(default_factory=dict)
    sentences: dict[str, ast.expr] = field(default_factory=dict)
    """What functions that do nothing else return."""


def sources() -> list[Path]:
    """Every module of the package, where `patches` and `bench` are links, and the script."""
    modules = [
        path
        for folder in ("flexvarlen", "patches", "bench")
        for path in (ROOT / folder).rglob("*.py")
        if path.resolve() == path  # not by a link
    ]
    return sorted([*modules, ROOT / "examples" / "train.py"])


def collect(paths: list[Path] | None = None) -> tuple[list[Message], list[str]]:
    """The messages, and the raises whose sentence is made elsewhere."""
    files = [_read(path) for path in (sources() if paths is None else paths)]
    shared = {
        name: value for file in files for name, value in file.constants.items() if name.isupper()
    }
    exceptions = _BUILTIN | {
        node.name
        for file in files
        for node in ast.walk(file.tree)
        if isinstance(node, ast.ClassDef)
        and any(_name(base).endswith(("Error", "Exception", "Warning")) for base in node.bases)
    }
    passing = {kind: found for file in files for kind, found in _passing_on(file, exceptions)}
    messages: dict[Message, None] = {}
    unresolved: list[str] = []
    for file in files:
        for kind, expression, scope, is_raise in _texts(file, exceptions, passing):
            resolver = _Resolver(scope, {**shared, **file.constants}, file.sentences)
            found = [text for text in resolver.texts(expression) if _is_sentence(text, kind)]
            for text in found:
                messages[Message(file.path, kind, text)] = None
            if is_raise and not found and not _is_parameter(expression, scope):
                unresolved.append(f"{file.path}: {kind}({ast.unparse(expression)})")
    return list(messages), list(dict.fromkeys(unresolved))


def _read(path: Path) -> _File:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for parent in ast.walk(tree):
        for child in ast.iter_child_nodes(parent):
            child.parent = parent  # type: ignore[attr-defined]
    file = _File(path.relative_to(ROOT).as_posix() if ROOT in path.parents else path.name, tree)
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        value = getattr(node, "value", None)
        if isinstance(target, ast.Name) and isinstance(value, ast.expr) and _is_text(value):
            file.constants[target.id] = value
        if isinstance(node, ast.FunctionDef) and len(node.body) == 1:
            returned = getattr(node.body[0], "value", None)
            if isinstance(node.body[0], ast.Return) and _is_text(returned):
                file.sentences[node.name] = returned
    return file


def _is_text(value: object) -> bool:
    if isinstance(value, ast.BinOp):
        return _is_text(value.left) and _is_text(value.right)
    return isinstance(value, ast.JoinedStr) or (
        isinstance(value, ast.Constant) and isinstance(value.value, str)
    )


def _name(node: ast.AST) -> str:
    """The last part of a dotted name."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _scope(node: ast.AST) -> ast.FunctionDef | None:
    while node is not None:
        node = getattr(node, "parent", None)  # type: ignore[assignment]
        if isinstance(node, ast.FunctionDef):
            return node
    return None


def _parameters(scope: ast.FunctionDef) -> list[str]:
    given = scope.args
    return [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]


def _is_parameter(expression: ast.expr, scope: ast.FunctionDef | None) -> bool:
    return (
        isinstance(expression, ast.Name)
        and scope is not None
        and expression.id in _parameters(scope)
    )


def _direct(file: _File, exceptions: set[str]) -> Iterator[tuple[str, ast.expr, bool]]:
    """Kind, text and whether it is raised there, of what is made or warned of in a file."""
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Call):
            name = _name(node.func)
            raised = isinstance(getattr(node, "parent", None), ast.Raise)
            if name in exceptions and node.args and not isinstance(node.args[0], ast.Starred):
                yield name, node.args[0], raised
            elif name == "warn" and node.args:
                yield "warning", node.args[0], False
            elif name == "_assert_async" and len(node.args) > 1:
                yield "device assertion", node.args[1], False
            elif ast.unparse(node.func) in _PRINTS and node.args:
                yield "printed", node.args[0], False
        elif isinstance(node, ast.Return) and node.value is not None:
            scope = _scope(node)
            if scope is not None and _CHECKS.search(scope.name):
                yield "refusal", node.value, False


def _passing_on(file: _File, exceptions: set[str]) -> Iterator[tuple[str, tuple[int, str]]]:
    """Functions that raise what they are given: their name, the argument's place, the kind."""
    for kind, expression, _ in _direct(file, exceptions):
        scope = _scope(expression)
        inner = expression
        if isinstance(expression, ast.JoinedStr) and len(expression.values) == 2:
            last = expression.values[1]
            inner = last.value if isinstance(last, ast.FormattedValue) else expression
        if scope is not None and _is_parameter(inner, scope) and kind != "refusal":
            assert isinstance(inner, ast.Name)
            place = _parameters(scope).index(inner.id) - (_parameters(scope)[0] == "self")
            yield scope.name, (place, kind)


def _texts(
    file: _File, exceptions: set[str], passing: dict[str, tuple[int, str]]
) -> Iterator[tuple[str, ast.expr, ast.FunctionDef | None, bool]]:
    for kind, expression, raised in _direct(file, exceptions):
        yield kind, expression, _scope(expression), raised
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Call) and _name(node.func) in passing:
            place, kind = passing[_name(node.func)]
            if len(node.args) > place >= 0:
                yield kind, node.args[place], _scope(node), False


class _Resolver:
    """Texts that an expression may have, f-string parts as <placeholders>."""

    def __init__(
        self,
        scope: ast.FunctionDef | None,
        constants: dict[str, ast.expr],
        sentences: dict[str, ast.expr],
    ) -> None:
        self.constants, self.sentences = constants, sentences
        self.local: dict[str, list[ast.expr]] = {}
        self.loops: list[tuple[ast.For, list[dict[str, ast.expr]]]] = []
        for node in ast.walk(scope) if scope is not None else ():
            if isinstance(node, ast.For) and (turns := list(_turns(node))):
                self.loops.append((node, turns))
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self.local.setdefault(node.targets[0].id, []).append(node.value)

    def texts(self, node: ast.expr) -> list[str]:
        if isinstance(node, ast.IfExp):
            return self.texts(node.body) + self.texts(node.orelse)
        if isinstance(node, ast.BoolOp):
            return [text for value in node.values for text in self.texts(value)]
        if isinstance(node, ast.Name):
            if node.id in self.local:
                own = [value for value in self.local[node.id] if not _mentions(value, node.id)]
                return [text for value in own for text in self.texts(value)]
            return self.texts(self.constants[node.id]) if node.id in self.constants else []
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            left, right = self.texts(node.left) or ["<…>"], self.texts(node.right) or ["<…>"]
            return [a + b for a in left for b in right]
        if isinstance(node, ast.JoinedStr):
            around = (turns for loop, turns in self.loops if _is_inside(node, loop))
            once: list[dict[str, ast.expr]] = [{}]
            turns = next((each for each in around if _is_told_by(node, each[0])), once)
            return ["".join(self._part(part, turn) for part in node.values) for turn in turns]
        if isinstance(node, ast.Call) and _name(node.func) in self.sentences:
            return self.texts(self.sentences[_name(node.func)])
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return [node.value]
        return []

    def _part(self, node: ast.expr, turn: dict[str, ast.expr]) -> str:
        if isinstance(node, ast.Constant):
            return str(node.value)
        assert isinstance(node, ast.FormattedValue)
        value = node.value
        if isinstance(value, ast.Name) and _is_text(turn.get(value.id)):
            return "".join(self.texts(turn[value.id]))
        if isinstance(value, ast.Name) and value.id in self.constants and value.id.isupper():
            found = self.constants[value.id]
            return "".join(self.texts(found))
        if isinstance(value, ast.IfExp):
            sides = (value.body, value.orelse)
            if all(isinstance(side, ast.Constant) for side in sides):
                words = [str(side.value) for side in sides if side.value]  # type: ignore[attr-defined]
                return f"<{' / '.join(words)}>"
        name = _name(value) or ast.unparse(value)
        fits = len(name) <= _LONGEST_PLACEHOLDER and not re.search(r"['\"{}]", name)
        return f"<{name}>" if fits else "<…>"


def _turns(loop: ast.For) -> Iterator[dict[str, ast.expr]]:
    """What the names of a loop over tuples that are written out are, turn by turn."""
    rows = loop.iter.value if isinstance(loop.iter, ast.Subscript) else loop.iter
    if isinstance(rows, ast.Tuple) and isinstance(loop.target, ast.Tuple):
        for row in rows.elts:
            if isinstance(row, ast.Tuple):
                yield {
                    name.id: value
                    for name, value in zip(loop.target.elts, row.elts, strict=True)
                    if isinstance(name, ast.Name)
                }


def _is_inside(node: ast.AST | None, outer: ast.AST) -> bool:
    while node is not None and node is not outer:
        node = getattr(node, "parent", None)
    return node is outer


def _is_told_by(node: ast.JoinedStr, turn: dict[str, ast.expr]) -> bool:
    """Whether a loop makes more of the text than a name in it, which a placeholder stands for."""
    told = [
        part
        for part in node.values
        if isinstance(part, ast.FormattedValue)
        and isinstance(part.value, ast.Name)
        and _is_text(turn.get(part.value.id))
    ]
    return len(told) > 1


def _mentions(node: ast.expr, name: str) -> bool:
    return any(isinstance(each, ast.Name) and each.id == name for each in ast.walk(node))


def _is_sentence(text: str, kind: str) -> bool:
    """Whether there is more than placeholders; of a check, not a part of another's sentence."""
    bare = re.sub(r"<[^>]*>", "", text.removeprefix("flexvarlen: "))
    return bool(re.search(r"[a-z]{3}", bare)) and (kind != "refusal" or text.endswith("."))


# ---- the page ----


def group_of(path: str) -> str:
    """The group of a file, a key of `GROUPS`."""
    parts = path.split("/")
    room = parts[1] if parts[0] == "flexvarlen" else parts[0]
    room = room.removesuffix(".py")
    room = "cli" if room.startswith("cli") else _GROUP_OF.get(room, room)
    return room if room in GROUPS else "other"


def render(messages: list[Message], unresolved: list[str]) -> str:
    """The generated half of the page."""
    lines = [f"{len(messages)} texts; made by `python docs/make_troubleshooting.py`.", ""]
    for group, title in GROUPS.items():
        own = [message for message in messages if group_of(message.path) == group]
        if not own:
            continue
        lines += [f"### {title}", ""]
        for path in dict.fromkeys(message.path for message in own):
            lines += [f"[`{path}`](../{path})", ""]
            lines += ["| kind | message | what to do |", "| --- | --- | --- |"]
            for message in own:
                if message.path == path:
                    says, advice = message.says_and_advises()
                    lines.append(f"| {message.kind} | {_cell(says)} | {_cell(advice)} |")
            lines.append("")
    if unresolved:
        lines += ["### Passed on", "", "These raise a sentence that is made elsewhere:", ""]
        lines += [f"- {_code(each)}" for each in unresolved]
        lines.append("")
    return "\n".join(lines)


def _cell(text: str) -> str:
    return _code(" ".join(text.split())).replace("|", "\\|") if text else ""


def _code(text: str) -> str:
    ticks = "``" if "`" in text else "`"
    space = " " if ticks == "``" else ""
    return f"{ticks}{space}{text}{space}{ticks}"


def page_with(generated: str, page: str) -> str:
    """The page with its marked half replaced."""
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise ValueError(f"the page must have {BEGIN} and {END} once; put them back.")
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{generated.rstrip()}\n{END}{rest.split(END)[1]}"


@cache
def generated() -> str:
    """The generated half, of the sources as they are."""
    return render(*collect())


def main(arguments: list[str]) -> int:
    """Write the page, or check it."""
    page = PAGE.read_text(encoding="utf-8")
    made = page_with(generated(), page)
    if "--check" in arguments:
        return int(made != page)
    PAGE.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
