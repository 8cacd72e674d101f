"""`python -m tests.mutations`: the tests still fail when a guarantee is broken.

Each mutation changes one line of the runtime in a copy of the checkout; the test file that it names
must fail then. Takes half a minute each; `--only WORD` runs those whose name has the word in it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mutations.mutation import Mutation, listed

ROOT = Path(__file__).parents[2]
TABLES = ("packages.txt", "models.txt", "images.txt", "recurrent_layers.txt", "trees.txt")
MUTATIONS = [x for name in TABLES for x in listed(Path(__file__).with_name(name))]


def survives(mutation: Mutation) -> str | None:
    """Why a mutation is not killed, or None."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "checkout"
        ignored = shutil.ignore_patterns(".git", ".venv", "build", "results", "__pycache__", ".*")
        shutil.copytree(ROOT, copy, symlinks=True, ignore=ignored)
        file = copy / mutation.file
        text = file.read_text()
        if mutation.before not in text:
            return f"{mutation.file} has no line {mutation.before!r}"
        file.write_text(text.replace(mutation.before, mutation.after, 1))
        command = [sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider"]
        done = subprocess.run(
            [*command, mutation.killer],
            cwd=copy,
            env=os.environ | {"PYTHONPATH": str(copy)},
            capture_output=True,
            text=True,
        )
    if done.returncode == 1:
        return None
    last = (done.stdout + done.stderr).strip().splitlines()[-1:]
    return f"{mutation.killer} ends with code {done.returncode}: {' '.join(last)}"


def main() -> None:
    """Run them, two at a time; the exit code is the number that survive."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", metavar="WORD")
    only = parser.parse_args().only
    chosen = [mutation for mutation in MUTATIONS if only in mutation.name]
    alive = 0
    with ThreadPoolExecutor(2) as pool:
        for mutation, reason in zip(chosen, pool.map(survives, chosen), strict=True):
            alive += reason is not None
            print(f"{'killed' if reason is None else 'SURVIVES'}  {mutation.name}", flush=True)
            if reason is not None:
                print(f"          {reason}", flush=True)
    sys.exit(alive)


if __name__ == "__main__":
    main()
