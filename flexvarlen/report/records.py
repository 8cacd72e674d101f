"""`Record`: one measured case, as a line of JSON, with where it ran."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from flexvarlen.measure import environment

T = TypeVar("T")
K = TypeVar("K")
Status = Literal["ok", "oom", "unsupported", "wrong", "failed", "skipped"]


@dataclass(frozen=True)
class Record:
    """The result of one case.

    `status` is "ok"; "oom": did not fit in memory; "unsupported": cannot run here, or is refused;
    "wrong": ran, but its errors exceed the acceptance rule, so it is not timed; "failed": raised an
    unexpected exception; "skipped": the time was up.
    `reason` says why it is not "ok". The names in `measures` carry their units.
    """

    suite: str
    case: dict[str, Any]
    status: Status
    reason: str | None = None
    measures: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)

    @property
    def outcome(self) -> str:
        """Status and reason for a table, without details of an allocator's state.

        >>> Record("kernels", {}, "oom", "CUDA out of memory. Tried to allocate ...").outcome
        'out of memory'
        >>> Record("kernels", {}, "unsupported", "needs a GPU").outcome
        'unsupported: needs a GPU'
        """
        if self.status == "oom":
            return "out of memory"
        return f"{self.status}: {self.reason}" if self.reason else self.status


def run_environment(device: torch.device, commit: str | None) -> dict[str, Any]:
    """`Record.environment` of a run that starts now.

    A given `commit` takes precedence over git's, which may be stale on a machine with a copy of the
    files; whether there are uncommitted changes is then unknown.
    """
    found = environment(device)
    if commit is not None:
        found |= {"git_commit": commit, "git_dirty": None}
    return found | {"started_utc": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"}


VERSIONS = ("torch", "transformers")


def ran_on(environment: dict[str, Any], packages: Sequence[str] = VERSIONS) -> str:
    """GPU or CPU, and versions, of a record's environment, for a title.

    >>> ran_on({"gpu": "NVIDIA H200", "torch": "2.11.0", "transformers": "5.17.0"})
    'NVIDIA H200, torch 2.11.0, transformers 5.17.0'
    """
    where = environment.get("gpu") or environment.get("cpu")
    return ", ".join(
        [f"{where}", *(f"{x} {environment[x]}" for x in packages if environment.get(x))]
    )


def commit_of(environment: dict[str, Any]) -> str:
    """The commit of a record's environment, to follow its versions; empty if not recorded.

    >>> commit_of({"git_commit": "0123456789abcdef", "git_dirty": True})
    ', commit 0123456 with uncommitted changes'
    """
    commit = environment.get("git_commit")
    if not commit:
        return ""
    return f", commit {commit[:7]}" + (
        " with uncommitted changes" if environment.get("git_dirty") else ""
    )


def commits_of(records: Iterable[Record]) -> str:
    """The commits of all records, each once, as `commit_of` writes one."""
    return "".join(dict.fromkeys(commit_of(record.environment) for record in records))


def provenance(records: Sequence[Record], packages: Sequence[str] = VERSIONS) -> str:
    """The end of a chart's caption: machine, versions, at most two commits, command."""
    commits = commits_of(records)
    if commits.count(", commit ") > 2:
        commits = ", commits in the table below"
    return (
        f"{ran_on(records[0].environment, packages)}{commits}; flexvarlen bench {records[0].suite}."
    )


def records_alike(
    records: Iterable[Record], differ: Collection[str], *, of_one_run: bool = False
) -> list[list[Record]]:
    """Records of one GPU, or of one run, whose cases differ in these fields only."""

    def shared(record: Record) -> str:
        case = {name: value for name, value in record.case.items() if name not in differ}
        run = record.environment.get("started_utc") if of_one_run else None
        return repr((sorted(case.items()), record.environment.get("gpu"), run))

    return list(grouped_by(records, shared).values())


def latest_run(records: Sequence[Record]) -> list[Record]:
    """The records of the run that started last."""
    latest = max(record.environment.get("started_utc") or "" for record in records)
    return [r for r in records if (r.environment.get("started_utc") or "") == latest]


def grouped(records: Iterable[Record], field: str) -> dict[str, list[Record]]:
    """Group records by one field of their cases."""
    return grouped_by(records, lambda record: str(record.case[field]))


def grouped_by(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Group items by `key`, in order of first appearance."""
    found: dict[K, list[T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def by_machine(records: Iterable[Record]) -> list[list[Record]]:
    """The records of each GPU, or of the CPU."""
    return list(grouped_by(records, lambda record: record.environment.get("gpu")).values())


def require_file(path: Path) -> None:
    """Check that records can be appended to a file, before anything is computed for it.

    Leaves nothing behind: a missing file is created with the first result.

    Raises:
        ValueError: records cannot be appended.
    """
    missing = [folder for folder in path.parents if not folder.exists()]
    is_new = not path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab"):
            pass
    except OSError as error:
        raise ValueError(
            f"out must be a writable file, got {str(path)!r} ({error.strerror}); pass another path."
        ) from error
    finally:
        with suppress(OSError):  # never made
            if is_new and path.stat().st_size == 0:
                path.unlink()
        for folder in missing:
            with suppress(OSError):
                folder.rmdir()


def append_records(path: Path, records: Sequence[Record]) -> None:
    """Add records to a file, all or none: one write, then flushed to the disk.

    A last line without an end, which a full disk or a lost machine can leave, is ended first.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(
        json.dumps(asdict(record), ensure_ascii=False, allow_nan=True) + "\n" for record in records
    )
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            lines = "\n" + lines
        data = lines.encode()
        written = os.write(descriptor, data)
        if written != len(data):  # a full disk: half a record is no record
            os.ftruncate(descriptor, size)
            raise OSError(
                f"records must fit on the disk of {path.name}; free some space and run again"
            )
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_records(paths: Iterable[Path]) -> list[Record]:
    """Read the records of the files, in order; of a case's variant on a GPU, only the last run.

    The passes of one run stay together: a record without a pass, of a case that failed as a whole,
    and records with passes of a later run replace one another. An incompletely written line, which
    a lost machine can leave, is skipped with a warning.

    Raises:
        ValueError: a file cannot be read, or a line is JSON but not a record.
    """
    found: dict[str, Record] = {}
    for path in paths:
        for number, line in enumerate(_text_of(path).split("\n"), 1):
            if not line:
                continue
            try:
                record = Record(**json.loads(line))
            except json.JSONDecodeError:
                warnings.warn(
                    f"line {number} of {path.name} is incomplete and is skipped.", stacklevel=2
                )
                continue
            except TypeError as error:
                raise ValueError(
                    f"{path.name} must contain records, got {line[:60]!r} on line {number}"
                    "; pass a file that flexvarlen wrote."
                ) from error
            key = _key(record)
            found.pop(key, None)
            found[key] = record
    runs = {_key(r, "pass"): r.environment.get("started_utc") for r in found.values()}
    return [r for r in found.values() if r.environment.get("started_utc") == runs[_key(r, "pass")]]


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ValueError(
            f"Records must be read from a text file, got {str(path)!r} ({why}); check the path."
        ) from error


def _key(record: Record, *without: str) -> str:
    case = {name: value for name, value in record.case.items() if name not in without}
    return json.dumps([record.suite, case, record.environment.get("gpu")], sort_keys=True)


def not_run(records: Iterable[Record]) -> list[str]:
    """A sentence for each reason why variants could not run, of the records that say so."""
    names: dict[str, dict[str, None]] = {}
    for record in records:
        if record.status == "unsupported":
            on_cpu = record.environment.get("gpu") is None and "CUDA" in (record.reason or "")
            why = "no CUDA device here" if on_cpu else in_short(record.reason or "")
            names.setdefault(why, {})[record.case["variant"]] = None
    return [f"Not run: {', '.join(variants)}: {why}" for why, variants in names.items()]


_TRIED = re.compile(r"(Tried to allocate [\d.]+ \w+\.).*", re.DOTALL)


def in_short(reason: str) -> str:
    """Shorten a reason for a table.

    torch's out-of-memory message includes allocator state that differs on every call.

    >>> in_short("OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...")
    'OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.'
    """
    return _TRIED.sub(r"\1", reason)


def one_line(error: BaseException, limit: int = 300) -> str:
    """An exception as a reason: its type and the first line of its message, and of its cause.

    >>> one_line(ValueError("no\\nmore"))
    'ValueError: no'
    >>> one_line(RuntimeError("the compiler raised:\\nTypeError: no\\nmore"))
    'RuntimeError: the compiler raised: TypeError: no'
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    while len(lines) > 1 and lines[0].endswith(":"):
        lines[:2] = [f"{lines[0]} {lines[1]}"]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:limit]
