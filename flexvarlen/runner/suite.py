"""`Suite`: what a benchmark brings to the runner: cases, their variants, how a case is measured.

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
        """What JSON can hold; with the variant and the pass the case of a record."""


C = TypeVar("C", bound=Case)


@dataclass(frozen=True)
class Finding:
    """What one variant gave on one pass of a case; names in `measures` carry their units.

    `status` and `reason` are as in `flexvarlen.report.records.Record`; `pass_` is "" where a case
    has one only.
    """

    variant: str
    status: Status
    reason: str | None = None
    measures: Mapping[str, Any] = field(default_factory=dict)
    pass_: str = ""


Findings = Sequence[Finding]


class DeviceLost(Exception):
    """An error after which the device serves this process no more.

    Args:
        message: which variant did it, as far as that is known.
        findings: of the case, those of the culprits marked `"fatal": True` in their measures. The
            runner writes them, and gives a variant so marked no second chance.
    """

    def __init__(self, message: str, findings: Sequence[Finding]) -> None:
        super().__init__(message)
        self.findings = findings


@dataclass(frozen=True)
class Options:
    """What a run was asked for.

    Attributes:
        device: where all is measured.
        quick: small cases, that all works; also the sizes for a CPU.
        variants: only these; None for the suite's own.
        seconds: of timing a case, about.
        text: files of documents, where a suite's lengths come from a collection; None for Python's
            help topics.
        say: takes a line for the log.
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
        """Of cases of which nothing else is asked: in half precision a CPU is slow."""
        return "bfloat16" if self.on_gpu else "float32"

    @property
    def compiler(self) -> str:
        """The backend of torch.compile: on a CPU inductor would compile for minutes."""
        return "inductor" if self.on_gpu else "aot_eager"


class Suite(ABC, Generic[C]):
    """A benchmark, of cases of one type. Instances hold no state of a run."""

    name: ClassVar[str]
    """Of the command and of the records' `suite`."""
    reads_text: ClassVar[bool] = False
    """Whether `Options.text` means something to it."""
    page_parts: ClassVar[Sequence[str]] = ()
    """Values of its cases' field `part` that have page tables of their own, as "SUITE-PART"."""
    whole_on_cpu: ClassVar[bool] = False
    """Whether a CPU measures all cases too, unless asked to be quick."""

    @abstractmethod
    def cases(self, options: Options) -> Sequence[C]:
        """All cases, in an order in which those cut off by a limit of time matter least."""

    @abstractmethod
    def variants(self, case: C, options: Options) -> Sequence[str]:
        """The variants that a case is measured on, if none are named."""

    @abstractmethod
    def measure(self, case: C, variants: Sequence[str], options: Options) -> Findings:
        """Check, then time the variants; at least one finding a variant, whatever becomes of it.

        Raises:
            DeviceLost: nothing can be measured any more in this process.
        """

    def tables(self, records: Sequence[Record]) -> Iterable[Table]:
        """All of the suite's tables, from its records alone."""
        return ()

    def page_tables(self, records: Sequence[Record]) -> Iterable[Table]:
        """The few lines that a page shows; nothing where it shows all tables.

        Where there are some, `flexvarlen bench report --tables` writes all tables into a file.
        """
        return ()

    def section(self, records: Sequence[Record]) -> str:
        """All tables as Markdown."""
        return all_markdown(self.tables(records))

    def figures(self, records: Sequence[Record], folder: Path) -> Sequence[Path]:
        """Draw the suite's figures into a folder, from its records alone; returns their files."""
        return ()


class GivenCases(Suite[C]):
    """A suite of the cases that its caller gives, which shows its records by itself."""

    def __init__(self, cases: Sequence[C]) -> None:
        self._cases = tuple(cases)

    def cases(self, options: Options) -> Sequence[C]:
        return self._cases


class UnknownVariant(ValueError):
    """A variant that was named and that the suite does not know."""


def require_known(names: Sequence[str], known: Collection[str]) -> None:
    """Refuse a name of no variant.

    Raises:
        UnknownVariant: a name that the suite does not know.
    """
    for name in names:
        if name not in known:
            raise UnknownVariant(
                f"variants must be among {', '.join(known)}, got {name!r}; choose from these."
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
        ValueError: an unknown name; the message starts with `what`.
    """
    for name in names:
        if name not in (*known, "all"):
            raise ValueError(
                f"{what} must be all, or of {', '.join(known)}, got {name!r}; choose among these."
            )
    return [name for name in known if name in names or "all" in names]
