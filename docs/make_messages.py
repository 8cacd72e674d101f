"""Makes docs/messages.md: every error, warning and refusal of the library, read from its code.

    python docs/make_messages.py             # writes the page
    python docs/make_messages.py --check     # exit code 1 if it would change

Nothing is imported: the sources are parsed. A text is what an exception is made with, what
`warnings.warn`, `torch._assert_async` and a `Condition` are given, and what a check of a backend
returns. The page is sorted by text, so moving a file does not change it.
"""

from __future__ import annotations

import ast
import builtins
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "messages.md"

GROUPS = {
    "patches": "Models: `patch_model`, batches, decoding",
    "layout": "Layouts",
    "mask": "Masks",
    "packing": "Packing",
    "attention": "Attention and backends",
    "parallel": "Sequence parallelism",
    "verify": "`verify_isolation` and `compare`",
    "other": "The rest",
    "warning": "Warnings",
    "device assertion": "Assertions on the device, in compiled graphs",
}
"""By kind of message, else by package."""

_COMMANDS = (
    *("cli/", "measure/", "report/", "runner/run"),
    *("verify/experiment/difference", "verify/experiment/operator"),
    *("verify/compare/differences", "verify/compare/hidden_states"),
    "verify/compare/thresholds",
)
"""Left out: what they say is about the options just typed."""

_TOP = """# Messages

Every error, warning and refusal of the library, in alphabetical order; what a command says about
its own options is left out. Search for the words of your message: names and numbers in it are
`<placeholders>` here, and what it says after "got" is left out. A refusal of a backend is what
`fv.why_not` returns; it is raised where that backend was named. Symptoms, and what to do about
them: [Troubleshooting](troubleshooting.md).

Made from the sources by `python docs/make_messages.py`.
"""

_NO_MESSAGE = {"AttributeError", "StopIteration", "SystemExit", "KeyboardInterrupt"}
_BUILTIN = {
    name
    for name, value in vars(builtins).items()
    if isinstance(value, type) and issubclass(value, BaseException)
} - _NO_MESSAGE
_REASONS = "patches/why_not.py"  # each of its functions returns one
_CHECKS = re.compile(r"why_not|why_missing|why_no_|refusal$|_problem$|^unavailable$")


@dataclass(frozen=True)
class Message:
    """One text.

    Attributes:
        path: of the file, below the repository.
        kind: the exception's name, "warning", "device assertion" or "refusal".
        text: with <placeholders>.
    """

    path: str
    kind: str
    text: str

    def says_and_advises(self) -> tuple[str, str]:
        """What must be, without what was got; what to do, which follows the first semicolon.

        The whole text where it does not have these parts.
        """
        text = self.text.removeprefix("flexvarlen: ")
        says, _, advice = text.partition("; ")
        return (says.partition(", got ")[0], advice) if advice else (text, "")

    @property
    def group(self) -> str:
        """A key of `GROUPS`."""
        if self.kind in GROUPS:
            return self.kind
        if self.path.startswith("patches/isolation/"):
            return "verify"
        parts = self.path.removeprefix("flexvarlen/").removesuffix(".py").split("/")
        return parts[0] if parts[0] in GROUPS else "other"


@dataclass
class _File:
    path: str
    tree: ast.Module
    constants: dict[str, ast.expr] = field(default_factory=dict)
    sentences: dict[str, ast.expr] = field(default_factory=dict)
    """What functions that do nothing else return."""


def sources() -> list[Path]:
    """Every module of the library; `flexvarlen/patches` and `flexvarlen/bench` are links."""
    modules = (path for name in ("flexvarlen", "patches") for path in (ROOT / name).rglob("*.py"))
    without = tuple(f"{ROOT}/flexvarlen/{name}" for name in _COMMANDS)
    found = (path for path in modules if not str(path).startswith(without))
    return sorted(path for path in found if path.resolve() == path)


def collect(paths: list[Path] | None = None) -> list[Message]:
    """The messages of these files; by default of the library."""
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
    for file in files:
        for kind, expression, scope in _texts(file, exceptions, passing):
            resolver = _Resolver(scope, {**shared, **file.constants}, file.sentences)
            for text in resolver.texts(expression):
                if _is_sentence(text, kind):
                    messages[Message(file.path, kind, text)] = None
    return list(messages)


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
            if isinstance(returned, ast.expr) and _is_text(returned):
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


def _direct(file: _File, exceptions: set[str]) -> Iterator[tuple[str, ast.expr]]:
    """Kind and text of what is made or warned of in a file."""
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Call):
            name = _name(node.func)
            if name in exceptions and node.args and not isinstance(node.args[0], ast.Starred):
                yield name, node.args[0]
            elif name == "Condition" and len(node.args) > 1:
                yield "ValueError", node.args[1]
            elif name == "warn" and node.args:
                yield "warning", node.args[0]
            elif name == "_assert_async" and len(node.args) > 1:
                yield "device assertion", node.args[1]
        elif isinstance(node, ast.Return) and node.value is not None:
            scope = _scope(node)
            if scope is None:
                continue
            if _CHECKS.search(scope.name) or file.path == _REASONS:
                yield "refusal", node.value


def _passing_on(file: _File, exceptions: set[str]) -> Iterator[tuple[str, tuple[int, str]]]:
    """Functions that raise what they are given: their name, the argument's index, the kind."""
    for kind, expression in _direct(file, exceptions):
        scope = _scope(expression)
        inner = expression
        if isinstance(expression, ast.JoinedStr) and len(expression.values) == 2:
            last = expression.values[1]
            inner = last.value if isinstance(last, ast.FormattedValue) else expression
        if scope is not None and _is_parameter(inner, scope) and kind != "refusal":
            assert isinstance(inner, ast.Name)
            index = _parameters(scope).index(inner.id) - (_parameters(scope)[0] == "self")
            yield scope.name, (index, kind)


def _texts(
    file: _File, exceptions: set[str], passing: dict[str, tuple[int, str]]
) -> Iterator[tuple[str, ast.expr, ast.FunctionDef | None]]:
    for kind, expression in _direct(file, exceptions):
        yield kind, expression, _scope(expression)
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Call) and _name(node.func) in passing:
            index, kind = passing[_name(node.func)]
            if len(node.args) > index >= 0:
                yield kind, node.args[index], _scope(node)


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
        for node in ast.walk(scope) if scope is not None else ():
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
            return ["".join(map(self._part, node.values))]
        if isinstance(node, ast.Call) and _name(node.func) in self.sentences:
            return self.texts(self.sentences[_name(node.func)])
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return [node.value]
        return []

    def _part(self, node: ast.expr) -> str:
        if isinstance(node, ast.Constant):
            return str(node.value)
        assert isinstance(node, ast.FormattedValue)
        value = node.value
        if isinstance(value, ast.Name) and value.id in self.constants and value.id.isupper():
            found = self.constants[value.id]
            return "".join(self.texts(found))
        if isinstance(value, ast.IfExp):
            sides = (value.body, value.orelse)
            if all(isinstance(side, ast.Constant) for side in sides):
                words = [str(side.value) for side in sides if side.value]  # type: ignore[attr-defined]
                return f"<{' / '.join(words)}>"
        return f"<{_name(value).strip('_') or '…'}>"


def _mentions(node: ast.expr, name: str) -> bool:
    return any(isinstance(each, ast.Name) and each.id == name for each in ast.walk(node))


def _is_sentence(text: str, kind: str) -> bool:
    """Whether there is more than placeholders; of a check, not a part of another's sentence."""
    bare = re.sub(r"<[^>]*>", "", text.removeprefix("flexvarlen: "))
    return bool(re.search(r"[a-z]{3}", bare)) and (kind != "refusal" or text.endswith("."))


# ---- the page ----


def render(messages: list[Message]) -> str:
    """The page."""
    lines = [_TOP]
    for group, title in GROUPS.items():
        found = {message.says_and_advises() for message in messages if message.group == group}
        if found:
            lines += [f"## {title}", "", "| message | what to do |", "| --- | --- |"]
            lines += [
                f"| {_cell(says)} | {_cell(advice)} |" for says, advice in sorted(found, key=_words)
            ]
            lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _words(says_and_advice: tuple[str, str]) -> tuple[str, str]:
    """To sort by: the words, without marks."""
    says, advice = says_and_advice
    return re.sub(r"[^a-z0-9 ]", "", says.lower()), advice


def _cell(text: str) -> str:
    """As code, so that nothing in it is Markdown."""
    if not text:
        return ""
    ticks, space = ("``", " ") if "`" in text else ("`", "")
    return f"{ticks}{space}{' '.join(text.split())}{space}{ticks}".replace("|", "\\|")


def main(arguments: list[str]) -> int:
    """Write the page, or check it."""
    made = render(collect())
    if "--check" in arguments:
        return int(not PAGE.exists() or PAGE.read_text(encoding="utf-8") != made)
    PAGE.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
