"""FlashAttention kernels of the Hub, which the package `kernels` loads.

`on_disk` only reads the disk: a folder of LOCAL_KERNELS, else the cache of the Hub. `download`
accesses the Hub, so it is called only if a user names the backend or requests the download. The
repositories, their versions and that of `kernels` are the ones that the installed transformers
loads.
"""

from __future__ import annotations

import json
import os
import threading
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from packaging.requirements import Requirement
from packaging.version import Version

from flexvarlen.env import HUB_KERNELS

DOCTOR = "flexvarlen doctor --install"


class Repository(NamedTuple):
    """A repository of the Hub.

    Attributes:
        name: its owner and name.
        versions: pairs of a release of transformers and the major version that it loads from then
            on, the newest first.
        extra: the extra of `kernels` with the packages that the kernel imports.
        other_names: repositories of the same kernel that transformers also accepts.
    """

    name: str
    versions: tuple[tuple[str, int], ...]
    extra: str = ""
    other_names: tuple[str, ...] = ()

    @property
    def version(self) -> int:
        """The major version that the installed transformers loads."""
        installed = Version(version("transformers"))
        older = [major for since, major in self.versions if Version(since) <= installed]
        return (older or [self.versions[-1][1]])[0]

    def __str__(self) -> str:
        return f"{self.name} v{self.version}"


REPOSITORIES = {
    "fa2": Repository("kernels-community/flash-attn2", (("5.22", 4), ("5.17", 3))),
    "fa3": Repository(
        "kernels-community/vllm-flash-attn3",
        (("5.17", 1),),
        other_names=("kernels-community/flash-attn3",),
    ),
    "fa4": Repository("kernels-community/flash-attn4", (("5.17", 0),), extra="curated"),
}
"""Repositories by backend. On ROCm, transformers loads aiter-flash-attn, which returns no LSE."""

BACKEND_OF = {
    name: backend
    for backend, repository in REPOSITORIES.items()
    for name in (repository.name, *repository.other_names)
}
"""The backend that runs the kernel of a repository."""


class HubKernel(NamedTuple):
    """A loaded kernel: its module, and its origin and build."""

    module: ModuleType
    origin: str


class NotLoaded(NamedTuple):
    """Why there is no kernel of the Hub, as part of a sentence, and what to do."""

    reason: str
    remedy: str


_loaded: dict[str, HubKernel] = {}
_not_downloaded: dict[str, NotLoaded] = {}
"""By backend, the kernels loaded in this process, or why a download failed."""

_loading = threading.RLock()


def origin(backend: str) -> str | None:
    """The origin of the backend's kernel, if this process has loaded it from the Hub."""
    return _loaded[backend].origin if backend in _loaded else None


def on_disk(backend: str) -> HubKernel | NotLoaded:
    """Import the backend's kernel from this machine's disk, without network access."""
    repository = REPOSITORIES[backend]
    problem = problem_of_kernels(backend)
    if problem is not None:
        return problem
    local = _local_folder(repository)
    folder = local or _cached_folder(repository)
    if folder is None:
        return _not_downloaded.get(backend) or NotLoaded(
            f"{repository} is not on disk", _how_to_load(repository)
        )
    with _loading:
        if backend not in _loaded:
            remedy = "correct what LOCAL_KERNELS names" if local else _how_to_load(repository)
            found = _imported(repository, folder, remedy)
            if isinstance(found, NotLoaded):
                return _not_downloaded.get(backend, found)
            if local:  # its files may change while its id does not
                found = found._replace(origin=f"{found.origin} of LOCAL_KERNELS, {_date(folder)}")
            _loaded[backend] = found
        return _loaded[backend]


def download(backend: str) -> None:
    """Load the backend's kernel from the Hub to the disk, in the build of this torch.

    Nothing is loaded where HF_HUB_OFFLINE is set, or LOCAL_KERNELS names a copy. If it fails,
    `on_disk` says why.
    """
    repository = REPOSITORIES[backend]
    if is_offline() or problem_of_kernels(backend) or _local_folder(repository) is not None:
        return
    # An error of httpx or httpx2, whichever huggingface_hub uses.
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

    how = {"revision": f"v{repository.version}", "user_agent": {"framework": "flexvarlen"}}
    errors = (ImportError, OSError, RuntimeError, ValueError, HTTPError)
    _not_downloaded.pop(backend, None)
    try:
        import_module("kernels").install_kernel(repository.name, **how)
    except errors as error:  # network errors; no build for this machine; no such version
        _not_downloaded[backend] = NotLoaded(
            f"{repository} cannot be downloaded ({_line(error)})",
            f"set LOCAL_KERNELS={repository.name}=FOLDER to a copy",
        )


def _how_to_load(repository: Repository) -> str:
    remedy = f"run: {DOCTOR}"
    if not is_offline():
        return remedy
    copy = f"set LOCAL_KERNELS={repository.name}=FOLDER to a copy"
    return f"unset HF_HUB_OFFLINE and {remedy}, or {copy}"


def _imported(repository: Repository, folder: Path, remedy: str) -> HubKernel | NotLoaded:
    if any(build.get("kernel-depends") for build in _builds(folder)) and not is_offline():
        reason = f"{repository} needs other kernels, which would be loaded from the Hub"
        return NotLoaded(reason, "set HF_HUB_OFFLINE=1 with those on disk")
    try:
        module = import_module("kernels").get_local_kernel(folder)
    # No build for this system, a missing package, a library of another torch or CUDA.
    except (AttributeError, ImportError, OSError, RuntimeError, ValueError) as error:
        return NotLoaded(f"{repository} does not load here ({_line(error)})", remedy)
    return HubKernel(module, f"{repository} ({module.__name__})")


def _date(folder: Path) -> int:
    """When the newest file was changed, in ns; files that Python compiles are ignored."""
    files = (x for x in folder.rglob("*") if x.is_file() and x.suffix != ".pyc")
    return max((file.stat().st_mtime_ns for file in files), default=0)


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}"


# ---- the package ----


def requirement(backend: str) -> str:
    """The pip requirement of the backend's kernel: `kernels`, as transformers requires it.

    >>> requirement("fa3").startswith("kernels")
    True
    """
    extra = REPOSITORIES[backend].extra
    return f"kernels{f'[{extra}]' if extra else ''}{_requirement().specifier}"


@cache
def _requirement() -> Requirement:
    found = [Requirement(text) for text in requires("transformers") or ()]
    required = [
        x
        for x in found
        if x.name == "kernels" and x.marker is not None and x.marker.evaluate({"extra": "kernels"})
    ]
    return (required or [Requirement("kernels")])[0]


def problem_of_kernels(backend: str) -> NotLoaded | None:
    """Why the package `kernels` cannot be used, or None."""
    if os.environ.get(HUB_KERNELS, "yes").lower() not in ("1", "on", "yes", "true"):
        return NotLoaded(f"{HUB_KERNELS} turns kernels of the Hub off", f"unset {HUB_KERNELS}")
    remedy = f"pip install '{requirement(backend)}' (or run: {DOCTOR})"
    try:
        installed = None if find_spec("kernels") is None else version("kernels")
    except PackageNotFoundError:
        installed = None
    if installed is None:
        return NotLoaded("kernels, which loads it, is not installed", remedy)
    required = _requirement().specifier
    if required.contains(installed, prereleases=True):
        return None
    release = f"transformers {version('transformers')}"
    return NotLoaded(f"kernels is {installed}, and {release} needs kernels{required}", remedy)


# ---- the disk ----


def is_offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def _local_folder(repository: Repository) -> Path | None:
    """The folder that LOCAL_KERNELS names."""
    for entry in os.environ.get("LOCAL_KERNELS", "").split(":"):
        name, _, folder = entry.partition("=")
        if name == repository.name:
            return Path(folder)
    return None


def _cached_folder(repository: Repository) -> Path | None:
    """The snapshot of the version in the cache of the Hub.

    It is the snapshot of the version's branch or, as `kernels` also downloads commits without a
    branch, the newest snapshot with a build of this version.
    """
    from huggingface_hub import constants

    cache_folder = Path(os.environ.get("KERNELS_CACHE") or constants.HF_HUB_CACHE)
    kept = cache_folder / f"kernels--{repository.name.replace('/', '--')}"
    branch = kept / "refs" / f"v{repository.version}"
    if branch.is_file():
        snapshot = kept / "snapshots" / branch.read_text(encoding="utf-8").strip()
        if snapshot.is_dir():
            return snapshot
    snapshots = [
        folder
        for folder in kept.glob("snapshots/*")
        if any(build.get("version") == repository.version for build in _builds(folder))
    ]
    return max(snapshots, key=lambda folder: folder.stat().st_mtime, default=None)


def _builds(folder: Path) -> list[dict[str, Any]]:
    """The metadata of a repository's builds, as far as they can be read."""
    found = []
    for pattern in ("build/*/metadata.json", "*/metadata.json", "metadata.json"):
        for file in folder.glob(pattern):
            try:
                found.append(json.loads(file.read_text(encoding="utf-8")))
            except (OSError, ValueError):  # an interrupted download
                continue
    return [build for build in found if isinstance(build, dict)]
