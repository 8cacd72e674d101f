"""The notebooks under examples/, as pairs: one edits `NAME.py`, and `NAME.ipynb` is made of it.

`python -m tests.notebooks` (`make notebooks`) runs each .py in a fresh kernel, and writes its
.ipynb, with the outputs if they are small.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jupytext
import nbformat
from nbclient import NotebookClient

EXAMPLES = Path(__file__).parent.parent / "examples"
LARGEST = 300 * 1024  # bytes of an .ipynb; without outputs above
CELL_SECONDS = 240

# Of a kernel: fixed, so that the same cells give the same file on any machine.
METADATA = {
    "jupytext": {"formats": "ipynb,py:percent"},
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def pairs() -> list[Path]:
    """The .py of every pair."""
    marked = "formats: ipynb,py:percent"
    return sorted(file for file in EXAMPLES.glob("*.py") if marked in file.read_text("utf-8"))


def from_script(file: Path) -> Any:
    """The notebook that a .py says, without outputs."""
    notebook = jupytext.read(file)
    notebook.metadata = nbformat.from_dict(METADATA)
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
    return notebook


def executed(notebook: Any) -> Any:
    """The notebook with outputs, from a fresh kernel of this interpreter.

    Raises:
        CellExecutionError: a cell raised.
    """
    with no_configuration(), tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            notebook,
            timeout=CELL_SECONDS,
            record_timing=False,
            coalesce_streams=True,
            resources={"metadata": {"path": folder}},  # cells leave nothing in the checkout
        )
        done = client.execute()
    done.metadata = nbformat.from_dict(METADATA)
    return done


@contextmanager
def no_configuration() -> Iterator[None]:
    """No kernel, profile or startup file of the user's; the checkout can be imported."""
    names = ("JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")
    with tempfile.TemporaryDirectory() as folder:
        own = {name: str(Path(folder, name.lower())) for name in names}
        own |= {"JUPYTER_PATH": "", "PYTHONPATH": str(EXAMPLES.parent), "MPLBACKEND": ""}
        own |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        own |= {"OMP_NUM_THREADS": "1"}  # tensors are tiny on the CPU; more threads cost
        own |= {"PYTHONWARNINGS": "ignore:IProgress not found"}  # tqdm would like ipywidgets
        with patch.dict("os.environ", own):
            yield


def cells(notebook: Any) -> list[tuple[str, str]]:
    """Kind and text of each."""
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def outputs(notebook: Any) -> Iterator[Any]:
    """Of all cells, in order."""
    for cell in notebook.cells:
        yield from cell.get("outputs", [])


def text_of(output: Any) -> str:
    """What a reader sees of it, but pictures."""
    data = {k: v for k, v in output.get("data", {}).items() if not k.startswith("image/")}
    return str(output.get("text", "")) + "".join(map(str, data.values()))


def main(names: list[str]) -> None:
    """Write the .ipynb of these, or of all."""
    for file in pairs():
        if names and file.stem not in names:
            continue
        notebook = executed(from_script(file))
        text = nbformat.writes(notebook)
        kept = len(text.encode()) <= LARGEST
        if not kept:
            text = nbformat.writes(from_script(file))
        file.with_suffix(".ipynb").write_text(text + "\n", encoding="utf-8")
        said = f"{len(text.encode()) // 1024} KiB" if kept else "without outputs: too large"
        sys.stdout.write(f"{file.stem}.ipynb: {said}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
