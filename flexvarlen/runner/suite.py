"""`Suite`: what a benchmark gives the runner: cases, their variants, how a case is measured.

A *case* is what variants are compared on, all in one process and interleaved: one shape of
attention, one model on one batch. Measuring it gives `Finding`s; the runner makes records of them,
adds where it ran, and appends all of a case at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

from flexvarlen.report.records import Record, Status
from flexvarlen.report.table import Table, all_markdown

if TYPE_CHECKING:
    import torch


T = TypeVar("T")


class Case(Protocol):
    """What variants are compared on."""

    @property
    def name(self) -> str:
        """Short, unique in the suite: for `--cases` and the progress bar."""

    def data(self) -> dict[str, Any]:
        """The case as JSON data; with the variant and the pass, the case of a record."""


C = TypeVar("C", bound=Case)


@dataclass(frozen=True)
class Finding:
    """The result of one variant on one pass of a case; names in `measures` carry their units.

    `status` and `reason` are as in `flexvarlen.report.records.Record`; `pass_` is "" if a case has
    only one.
    """

    variant: str
    status: Status
    reason: str | None = None
    measures: Mapping[str, Any] = field(default_factory=dict)
    pass_: str = ""


Findings = Sequence[Finding]


class DeviceLost(Exception):
    """An error after which the device is unusable for this process.

    Args:
        message: which variant caused it, if known.
        findings: findings of the case; those of responsible variants have `"fatal": True` in their
            measures. The runner writes them, and does not run these variants again.
    """

    def __init__(self, message: str, findings: Sequence[Finding]) -> None:
        super().__init__(message)
        self.findings = findings


@dataclass(frozen=True)
class Options:
    """The options of a run.

    Attributes:
        device: the device of all measurements.
        quick: small cases, to check that everything works; also the sizes for a CPU.
        variants: the variants to run; None for the suite's own.
        seconds: approximate time spent timing a case.
        text: files of documents, if a suite's lengths come from texts; None for Python's help
            topics.
        say: called with a line for the log.
    """

    device: torch.device
    quick: bool = False
    variants: tuple[str, ...] | None = None
    seconds: float = 3.0
    text: tuple[Path, ...] | None = None
    say: Callable[[str], None] = print

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def is_small(self) -> bool:
        """Whether cases must be small."""
        return self.quick or not self.on_gpu

    @property
    def dtype(self) -> str:
        """Default dtype of cases: a CPU is slow in half precision."""
        return "bfloat16" if self.on_gpu else "float32"

    @property
    def compiler(self) -> str:
        """The backend of torch.compile: on a CPU inductor would compile for minutes."""
        return "inductor" if self.on_gpu else "aot_eager"


class Suite(ABC, Generic[C]):
    """A benchmark, of cases of one type. Instances hold no state of a run."""

    name: ClassVar[str]
    """Name of the command and of the records' `suite`."""
    reads_text: ClassVar[bool] = False
    """Whether the suite reads `Options.text`."""
    page_parts: ClassVar[Sequence[str]] = ()
    """Values of its cases' field `part` that have page tables of their own, as "SUITE-PART"."""
    whole_on_cpu: ClassVar[bool] = False
    """Whether a CPU measures all cases too, unless asked to be quick."""

    @abstractmethod
    def cases(self, options: Options) -> Sequence[C]:
        """All cases, the most important first, as a time limit may drop the last ones."""

    @abstractmethod
    def variants(self, case: C, options: Options) -> Sequence[str]:
        """The variants that a case is measured on, if none are named."""

    @abstractmethod
    def measure(self, case: C, variants: Sequence[str], options: Options) -> Findings:
        """Check, then time the variants; at least one finding per variant, even if it fails.

        Raises:
            DeviceLost: nothing can be measured any more in this process.
        """

    def tables(self, records: Sequence[Record]) -> Iterable[Table]:
        """All of the suite's tables, from its records alone."""
        return ()

    def page_tables(self, records: Sequence[Record]) -> Iterable[Table]:
        """The few lines that a page shows; empty if the page shows all tables.

        If there are any, `flexvarlen bench report --tables` writes all tables into a file.
        """
        return ()

    def section(self, records: Sequence[Record]) -> str:
        """All tables as Markdown."""
        return all_markdown(self.tables(records))

    def figures(self, records: Sequence[Record], folder: Path) -> Sequence[Path]:
        """Draw the suite's figures into a folder, from its records alone; returns their files."""
        return ()


class GivenCases(Suite[C]):
    """A suite with the caller's cases; the caller shows the records."""

    def __init__(self, cases: Sequence[C]) -> None:
        self._cases = tuple(cases)

    def cases(self, options: Options) -> Sequence[C]:
        return self._cases


class UnknownVariant(ValueError):
    """A named variant that the suite does not know."""


def require_known(names: Sequence[str], known: Collection[str]) -> None:
    """Refuse unknown variants.

    Raises:
        UnknownVariant: a name that the suite does not know.
    """
    for name in names:
        if name not in known:
            raise UnknownVariant(
                f"variants must be among {', '.join(known)}, got {name!r}; choose among these."
            )


def choose(names: Sequence[str], known: Mapping[str, T]) -> dict[str, T]:
    """The named variants, in that order.

    Raises:
        UnknownVariant: a name that the suite does not know.
    """
    require_known(names, known)
    return {name: known[name] for name in names}


def checked_names(what: str, names: Sequence[str], known: Sequence[str]) -> list[str]:
    """The names once each, in the order of `known`; "all" is every one.

    Raises:
        ValueError: a name is unknown; the message starts with `what`.
    """
    for name in names:
        if name not in (*known, "all"):
            raise ValueError(
                f"{what} must be all, or among {', '.join(known)}, got {name!r}; choose from these."
            )
    return [name for name in known if name in names or "all" in names]
