"""docs/compatibility.md is what its maker makes, and each test that it names exists."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest

from tests import compatibility
from tests.compatibility import COLUMNS, RANKS, SHARED, UNPAD, Column, cell
from tests.docs.scripts import ROOT, module_at
from tests.patches.kinds import KINDS, Kind

pytest.importorskip("trl", reason="needs TRL: pip install -c constraints.txt trl")


class Collected:
    """A plugin that notes the names of all tests, before some are left out of the run."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items):
        self.names = [item.nodeid.removeprefix("tests/") for item in items]


@pytest.fixture(scope="module")
def missing():
    """A function: of some tests, those that pytest does not collect."""
    named = {test for column in COLUMNS.values() for test in column.tests.values()}
    files = sorted({str(ROOT / "tests" / test.partition("::")[0]) for test in named})
    collected = Collected()
    quiet = ("-q", "--collect-only", "-p", "no:cacheprovider", "-p", "no:faulthandler")
    assert pytest.main([*quiet, f"--rootdir={ROOT}", *files], plugins=[collected]) == 0

    def find(tests):
        # In a pattern of fnmatch [ begins a set of characters: here only * is special.
        patterns = {test: test.replace("[", "[[]") for test in tests}
        return [
            test
            for test, pattern in patterns.items()
            if not any(fnmatchcase(name, pattern) for name in collected.names)
        ]

    return find


def test_the_page_is_current():
    maker = module_at(ROOT / "docs" / "make_compatibility.py")
    assert maker.main(["--check"]) == 0, "run: python docs/make_compatibility.py"


def test_each_named_test_exists(missing):
    named = {test for column in COLUMNS.values() for test in column.tests.values()}
    assert len(named) > 50
    assert not missing(named)


def test_a_renamed_test_is_seen(missing):
    file = "patches/test_kinds.py::"
    renamed = [f"{file}test_trainers[dense]", f"{file}test_trainer[sparse]", f"{file}test_train*r"]
    assert missing([f"{file}test_trainer[*]", *renamed]) == renamed


@pytest.mark.parametrize(
    ("kind", "column"),
    [
        ("longrope", Column({"longrope": "a test"}, SHARED)),  # refused
        ("images", Column({})),
        ("images", Column({}, raises={"images": lambda: None})),
    ],
)
def test_a_cell_is_either_tested_or_refused(kind, column, monkeypatch):
    monkeypatch.setitem(COLUMNS, "new", column)
    with pytest.raises(AssertionError, match="new of"):
        cell(kind, "new")


@pytest.mark.parametrize("settings", [{}, UNPAD, SHARED, RANKS])
def test_experts_without_a_router_loss_are_refused_nothing(settings, monkeypatch):
    monkeypatch.setitem(KINDS, "experts", Kind("mixtral"))
    monkeypatch.setitem(COLUMNS, "new", Column({}, settings))
    assert compatibility.refusal("experts", "new") is None
