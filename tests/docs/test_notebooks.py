"""The notebooks of examples/: cells run, both files of a pair agree, outputs are clean."""

from __future__ import annotations

import ast
import getpass
import re
import socket

import pytest

for tool in ("jupytext", "nbclient"):
    pytest.importorskip(tool, reason="needs the notebooks' tools: pip install -e .[dev]")
nbformat = pytest.importorskip("nbformat", reason="nbclient brings it along")

from tests.notebooks import LARGEST, cells, executed, from_script, outputs, pairs, text_of  # noqa: E402
from tests.slow import with_slow  # noqa: E402

SCRIPTS = pairs()
NOTEBOOKS = [script.with_suffix(".ipynb") for script in SCRIPTS]
named = {"ids": lambda file: file.stem}


def test_seven_pairs_are_found():
    assert [script.name[0] for script in SCRIPTS] == list("1234567")


# Most of their calls also run in test_docs.py, test_examples_train.py and ..._preference.py.
SLOW = SCRIPTS[1:]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("script", with_slow(SCRIPTS, SLOW), **named)
def test_every_cell_runs_and_says_nothing_wrong(script):
    """A fresh kernel; assertions are the last cell's. A warning would be all that a reader sees."""
    done = executed(from_script(script))
    said = [output.text for output in outputs(done) if output.get("name") == "stderr"]
    assert not said, said
    assert text_of(done.cells[-1].outputs[-1]) == "all checks passed\n"
    assert sum("image/png" in output.get("data", {}) for output in outputs(done)) >= 1


@pytest.mark.parametrize("script", SCRIPTS, **named)
def test_last_cell_asserts(script):
    last = ast.parse(from_script(script).cells[-1].source)
    assert sum(isinstance(node, ast.Assert) for node in last.body) >= 3


@pytest.mark.parametrize("notebook", NOTEBOOKS, **named)
def test_script_and_notebook_agree(notebook):
    """One was edited and not the other: `make notebooks`."""
    kept = nbformat.read(notebook, as_version=4)
    nbformat.validate(kept)
    assert cells(kept) == cells(from_script(notebook.with_suffix(".py")))


@pytest.mark.parametrize("notebook", NOTEBOOKS, **named)
def test_kept_outputs_are_small_whole_and_of_no_machine(notebook):
    assert notebook.stat().st_size <= LARGEST
    kept = nbformat.read(notebook, as_version=4)
    counts = [cell.execution_count for cell in kept.cells if cell.cell_type == "code"]
    assert counts in (list(range(1, len(counts) + 1)), [None] * len(counts))
    assert not [o for o in outputs(kept) if o.output_type == "error" or o.get("name") == "stderr"]
    text = "\n".join(map(text_of, outputs(kept)))
    foreign = [r"(?<![\w.:])/(?:\w+/)+", r"(?i)warning", re.escape(socket.gethostname())]
    foreign += [] if getpass.getuser() in ("root", "user") else [re.escape(getpass.getuser())]
    for pattern in foreign:
        assert not (found := re.findall(pattern, text)), (pattern, found)
