"""The cache file of "auto": `auto.json` in the cache folder, shared between processes.

It holds the user's measurements, and which kernels passed the check. If the file cannot be read or
the folder cannot be written, "auto" warns and continues without it. Entries of several processes
are merged.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flexvarlen.env import CACHE, cache_folder

try:
    import fcntl
except ImportError:  # not a POSIX system: one of two concurrent writes may be lost
    fcntl = None  # type: ignore[assignment]

FORMAT = 6
_LOCK_S = 5.0  # maximum time to wait for another writer, which needs only milliseconds

Entry = dict[str, Any]

_unwritable: set[Path] = set()


def cache_path() -> Path:
    """Return the path of the cache file, which need not exist."""
    return cache_folder() / "auto.json"


def read_entries(path: Path) -> dict[str, Entry]:
    """Return all entries of the file by key; empty, with a warning, if it cannot be read.

    The file is read again only if it has changed, because some callers need it in every forward.
    """
    try:
        state = path.stat()
    except OSError:
        return _read(path)
    version = (path, state.st_mtime_ns, state.st_size, state.st_ino)
    if _last.get("version") != version:
        _last.update(version=version, entries=_read(path))
    entries: dict[str, Entry] = _last["entries"]
    return entries


_last: dict[str, Any] = {}


def _read(path: Path) -> dict[str, Entry]:
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, UnicodeDecodeError) as error:
        _warn(f"{path} cannot be read ({error}), so it is not used; fix or delete it.")
        return {}
    try:
        found = json.loads(text)
    except ValueError as error:
        _warn(f"{path} is not JSON ({error}), so it is not used; measure again to replace it.")
        return {}
    entries = found.get("entries") if isinstance(found, dict) else None
    if not isinstance(entries, dict) or found.get("format") != FORMAT:
        _warn(f"{path} is not format {FORMAT}, so it is not used; measure again to replace it.")
        return {}
    return entries


def write_entries(path: Path, new: dict[str, Entry]) -> None:
    """Add entries to the file, keeping those that other processes wrote in the meantime."""
    if path in _unwritable:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_suffix(".lock")):
            entries = read_entries(path) | new
            _replace(path, json.dumps({"format": FORMAT, "entries": entries}, indent=1))
    except OSError as error:
        _unwritable.add(path)
        _warn(
            f"{path} cannot be written ({error}), so measurements and checks are kept in this "
            f"process only; set {CACHE} to a writable folder."
        )


def _replace(path: Path, text: str) -> None:
    """Replace the file atomically, so that readers never see a partial file."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lock the file against other writers; after waiting `_LOCK_S` seconds, proceed unlocked."""
    if fcntl is None:
        yield
        return
    with path.open("w") as file:
        deadline = time.monotonic() + _LOCK_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:  # the lock holder or the file system hangs
                    break
                time.sleep(0.01)
        yield  # closing the file releases the lock


def _warn(sentence: str) -> None:
    warnings.warn(f"flexvarlen: {sentence}", stacklevel=2)
