"""`Suite`: what a benchmark brings to the runner: cases, their variants, how a case is measured.

A *case* is what variants are compared on, all in one process and interleaved: one shape of
attention, one model on one batch. Measuring it gives `Finding`s; the runner makes rows of them,
adds where it ran, and appends all of a case at once.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from flexvarlen.rows import Row, Status

if TYPE_CHECKING:
    import torch


class Case(Protocol):
    """What variants are compared on."""

    @property
    def name(self) -> str:
        """Short, unique in the suite: for `--cases` and the progress bar."""

    def data(self) -> dict[str, Any]:
        """What JSON can hold; with the variant and the pass the case of a row."""


@dataclass(frozen=True)
class Finding:
    """What one variant gave on one pass of a case; names in `measures` carry their units.

    `status` and `reason` are as in `flexvarlen.rows.Row`; `pass_` is "" where a case has one only.
    """

    variant: str
    status: Status
    reason: str | None = None
    measures: Mapping[str, Any] = field(default_factory=dict)
    pass_: str = ""


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


class Suite(ABC):
    """A benchmark. Instances hold no state of a run."""

    name: ClassVar[str]
    """Of the command and of the rows' `suite`."""

    @abstractmethod
    def cases(self, options: Options) -> Sequence[Case]:
        """All cases, in an order in which those cut off by a limit of time matter least."""

    @abstractmethod
    def variants(self, case: Case, options: Options) -> Sequence[str]:
        """The variants that a case is measured on, if none are named."""

    @abstractmethod
    def measure(self, case: Case, variants: Sequence[str], options: Options) -> Sequence[Finding]:
        """Check, then time the variants; at least one finding a variant, whatever becomes of it.

        Raises:
            DeviceLost: nothing can be measured any more in this process.
        """

    @abstractmethod
    def section(self, rows: Sequence[Row]) -> str:
        """The suite's tables as Markdown, from its rows alone."""

    def figures(self, rows: Sequence[Row], folder: Path) -> Sequence[Path]:
        """Draw the suite's figures into a folder, from its rows alone; returns their files."""
        return ()


SUITES: dict[str, str] = {
    "varlen-study": "flexvarlen.bench.attention.varlen_study",
    "varlen-overhead": "flexvarlen.bench.attention.varlen_overhead",
    "scaling": "flexvarlen.bench.attention.scaling",
    "padding": "flexvarlen.bench.attention.padding",
    "sdpa-backends": "flexvarlen.bench.attention.sdpa_backends",
    "sdpa-gradients": "flexvarlen.bench.attention.sdpa_gradients",
    "model": "flexvarlen.bench.model.suite",
    "mask-build": "flexvarlen.bench.mask_build.suite",
    "kernels": "flexvarlen.bench.attention.kernels",
    "clock-check": "flexvarlen.bench.clock_check",
}
"""The module of each suite, which holds it as `SUITE`; none is imported before it is asked for."""


def suite_of(name: str) -> Suite:
    """The suite of that name.

    Raises:
        ValueError: there is none.
    """
    if name not in SUITES:
        raise ValueError(
            f"suite must be one of {', '.join(SUITES)}, or all, got {name!r}; choose one."
        )
    found: Suite = importlib.import_module(SUITES[name]).SUITE
    return found
