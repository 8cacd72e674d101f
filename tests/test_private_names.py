"""Each name of another package that we rely on is there: the first thing to run on a new release.

`tests/private_names/` is the list. A name that only moved gets an alternative there ("a | b").
"""

import ast
import dataclasses
import importlib
import inspect
import re
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

import flexvarlen
from tests.private_names import NAMES

ROOT = Path(flexvarlen.__file__).parent
PACKAGES = ("torch", "transformers", "accelerate", "trl", "peft", "fla")


@pytest.mark.parametrize("name", NAMES, ids=lambda x: x.dotted.partition(" ")[0])
def test_name_is_there(name):
    package = name.dotted.partition(".")[0]
    if package == "fla" and find_spec("fla") is None:
        pytest.skip("fla-core is not installed")
    candidates = name.dotted.split(" | ")
    find = _in_source if package == "fla" else _imported
    found = [x for x in map(find, candidates) if x is not None]
    where = f"{package} {version({'fla': 'fla-core'}.get(package, package))}"
    needs = f"on which flexvarlen/{', flexvarlen/'.join(name.used_by)} depends"
    assert found, f"{where} has no {name.dotted}, {needs}"
    _check_parameters(found[0], name, f"{name.dotted} of {where}", needs)
    if name.holds is not None:
        try:
            name.holds()
        except Exception as error:
            error.add_note(f"{name.dotted} of {where} behaves otherwise, {needs}")
            raise


def _check_parameters(found, name, what, needs):
    for words in name.takes:
        taken = _parameters(found)
        assert {*words.split("|")} & taken, f"{what} takes no {words}, {needs}; it takes {taken}"
    for words in name.says:
        text = inspect.getsource(found)
        assert any(x in text for x in words.split("|")), f"{what} says no {words}, {needs}"


# ---- by import ----


def _imported(dotted):
    """The object of that name, or the class whose methods set it; None: there is none."""
    *path, last = dotted.split(".")
    found = owner = None
    for index, part in enumerate([*path, last]):
        owner = found
        found = _attribute(found, part, ".".join(dotted.split(".")[: index + 1]))
        if found is None:
            break
    else:
        return found
    if part == last and isinstance(owner, type) and _sets(owner, last):
        return owner
    return None


def _attribute(owner, part, dotted):
    if owner is not None and hasattr(owner, part):
        found = getattr(owner, part)
        return owner if found is None else found  # an attribute of a class that is None
    if owner is None or inspect.ismodule(owner):
        try:
            return importlib.import_module(dotted)
        except ModuleNotFoundError as error:
            if error.name != dotted:
                raise
    return None


def _sets(owner, name):
    """Whether a class, or one that it is made of, declares or sets an attribute."""
    if dataclasses.is_dataclass(owner) and name in owner.__dataclass_fields__:
        return True
    pattern = rf"\bself\.{name}\b(, self\.\w+)* *(: [^=\n]+)?=(?!=)|^    {name}:"
    classes = [x for x in owner.__mro__ if x.__module__.partition(".")[0] in PACKAGES]
    return any(re.search(pattern, inspect.getsource(x), re.MULTILINE) for x in classes)


def _parameters(found):
    if isinstance(found, ast.FunctionDef):
        return {x.arg for x in (*found.args.args, *found.args.kwonlyargs)}
    return {*inspect.signature(inspect.unwrap(found)).parameters}


# ---- by source: fla's modules import Triton ----


def _in_source(dotted):
    """The function, class or assignment of that name in fla's source."""
    *path, last = dotted.split(".")
    (folder,) = find_spec(path[0]).submodule_search_locations
    place = Path(folder, *path[1:])
    files = [x for x in (place.with_suffix(".py"), place / "__init__.py") if x.exists()]
    for node in [node for file in files for node in ast.parse(file.read_text()).body]:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == last:
            return node
        names = [x.asname or x.name for x in getattr(node, "names", ())]
        assigned = [getattr(node, "target", None), *getattr(node, "targets", ())]
        if last in (*names, *(ast.unparse(x) for x in assigned if x is not None)):
            return node
    return None


# ---- the list is whole ----


def test_list_holds_every_private_name_that_the_code_uses():
    """Imports with an underscore in them, and attributes that no file of ours defines."""
    listed = {x for name in NAMES for x in re.split(r"[. |]+", " ".join([name.dotted, *name.says]))}
    listed |= PYTHONS | FLASH_ATTENTIONS
    ours, used = set(), {}
    for file in _files():
        for node in ast.walk(ast.parse(file.read_text())):
            ours |= _defined(node)
            for private in filter(_is_private, _used(node)):
                used.setdefault(private, file.relative_to(ROOT).as_posix())
    known = listed | ours
    missing = {x: file for x, file in used.items() if x not in known}
    assert missing == {}, "add them to tests/private_names/"


def test_list_names_files_that_use_the_name():
    texts = {file.relative_to(ROOT).as_posix(): _words(file.read_text()) for file in _files()}
    stale = [
        (name.dotted, used_by)
        for name in NAMES
        for used_by in name.used_by
        if not _own_words(name) & texts.get(used_by, set())
    ]
    assert stale == []


def _own_words(name):
    """Its last part, and the words by which our code may use it."""
    last = {place.rpartition(".")[2] for place in name.dotted.split(" | ")}
    return last | _words(" ".join([*name.takes, *name.says]))


PYTHONS = {"_asdict", "_fields", "_make", "_replace", "_getframe"}
FLASH_ATTENTIONS = {
    "_flash_attn_bwd",
    "_flash_attn_fwd",
    "_flash_attn_varlen_backward",
    "_flash_attn_varlen_forward",
}
"""Of packages that are not on this list; the backends' own tests run them."""


def _files():
    return sorted([*ROOT.rglob("*.py"), *(ROOT / "patches").rglob("*.py")])


def _words(text):
    return {*re.findall(r"\w+", text)}


def _is_private(name):
    return re.match("_(?!_|flexvarlen)", name) and name != "_"


def _defined(node):
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return {node.id}
    on_self = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    return {node.attr} if on_self and ast.unparse(node.value) == "self" else set()


def _used(node):
    if isinstance(node, ast.Attribute):
        return [node.attr]
    if isinstance(node, ast.Import | ast.ImportFrom):
        module = getattr(node, "module", None) or ""
        outside = not module.startswith("flexvarlen")
        names = [part for each in node.names for part in f"{module}.{each.name}".split(".")]
        return names if outside else []
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
        return [x.value for x in node.args[1:2] if isinstance(x, ast.Constant)]
    return []
