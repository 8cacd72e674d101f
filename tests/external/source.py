"""transformers' own tests for models, from its source package, put where Python can import them.

The wheel has no tests, so pip fetches the source package of the installed version; pip checks it
against its index. Nothing of it is committed.
"""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tarfile
from pathlib import Path

PACKAGE = "transformers_tests"
"""The name that `tests/` of the source package gets: ours has the name `tests`."""

EXTRA = "parameterized>=0.9"
"""What these tests import and flexvarlen's do not."""

STUBS = {
    "exporters/test_export.py": "class ExportTesterMixin:\n    pass\n",
    "generation/test_utils.py": "class GenerationTesterMixin:\n    pass\n",
}
"""Modules that the tests import and the source package does not hold."""


def prepare(keep: Path) -> list[Path]:
    """Fetch what is missing below `keep`; returns the folders to put on Python's path."""
    version = importlib.metadata.version("transformers")
    unpacked, extra = keep / f"transformers-{version}", keep / "extra"
    if not (unpacked / ".complete").exists():
        _unpack(_source_package(version, keep), unpacked / PACKAGE)
        (unpacked / ".complete").touch()
    if not extra.exists():
        _pip("install", "--no-deps", "--target", str(extra), EXTRA)
    return [unpacked, extra]


def _source_package(version: str, keep: Path) -> Path:
    package = keep / f"transformers-{version}.tar.gz"
    if not package.exists():
        # pip builds the metadata, in an environment of its own: ten seconds
        wanted = ["--no-binary", "transformers", "--no-deps", f"transformers=={version}"]
        _pip("download", "--dest", str(keep), *wanted)
    return package


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run([*command, *arguments], check=True)


def _unpack(package: Path, target: Path) -> None:
    """The test modules of the package in `target`, with the stubs."""
    with tarfile.open(package) as archive:
        for member in archive.getmembers():
            name = re.fullmatch(r"transformers-[^/]+/tests/(.+\.py)", member.name)
            if name is None or not member.isfile():
                continue
            member.name = name[1]
            archive.extract(member, target, filter="data")
    if not (target / "test_modeling_common.py").exists():
        raise ValueError(
            f"{package.name} must hold tests/test_modeling_common.py, got none; this version of "
            "transformers leaves its tests out: use 5.23."
        )
    for name, text in STUBS.items():
        stub = target / name
        if not stub.exists():  # a later source package may hold the real one
            stub.parent.mkdir(parents=True, exist_ok=True)
            stub.write_text(text)
