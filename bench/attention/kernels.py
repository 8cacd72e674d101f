"""Suite "kernels": every backend beside the raw kernel that it wraps, and what "auto" takes.

    flexvarlen bench kernels --cases ^readme/

For each cell of the grid: each variant's output and gradients held against fp64 on sampled
documents, and against one another on the whole row; what is right is timed, forward and backward
alone, interleaved, behind 2 ms of other work for the device, which evicts its L2 cache:

    device  what the kernels take, back to back: what counts in a compiled graph
    host    until the call returns: Python and launches; eagerly the slower of the two decides

The names of the cells that the README shows begin with "readme/", of all others with "grid/".
Variants: a backend's name, or "raw:" and that name. "auto" measures into a folder that is new in
each process.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch

from flexvarlen.attention.backends.registry import BACKENDS
from flexvarlen.bench.attention.engine import (
    PASSES,
    RAW_PREFIX,
    Inputs,
    Prepare,
    findings_of_all,
    measure_attention,
    ours,
    raw,
    ways_of,
)
from flexvarlen.bench.attention.kernels_cells import SUBSETS, Cell
from flexvarlen.bench.attention.raw_kernels import RAW
from flexvarlen.bench.suite import Case, Finding, Options, Suite
from flexvarlen.rows import Row, one_line

CACHE = "FLEXVARLEN_CACHE"  # where "auto" keeps what it measured
OURS = ("flex", "flex_fa4", "varlen", "fa2", "fa3", "fa4", "nested", "cudnn", "auto")
OURS_ON_CPU = ("sdpa", "reference")


@dataclass(frozen=True)
class KernelCase:
    """A cell of the grid; `subset` is one of `SUBSETS`, and stands in its name."""

    cell: Cell
    subset: str

    @property
    def name(self) -> str:
        return f"{self.subset}/{self.cell.name}"

    def data(self) -> dict[str, Any]:
        return self.cell.data()


class Kernels(Suite):
    """The grid; the README's cells first, those of one kind together and small ones first."""

    name: ClassVar[str] = "kernels"

    def cases(self, options: Options) -> Sequence[KernelCase]:
        if options.quick:
            return _cases("quick", SUBSETS["quick"]())
        readme = SUBSETS["readme"]()
        rest = [cell for cell in SUBSETS["grid"]() if cell not in set(readme)]
        return [*_cases("readme", readme), *_cases("grid", rest)]

    def variants(self, case: Case, options: Options) -> Sequence[str]:
        assert isinstance(case, KernelCase)
        found = default_variants(on_cpu=not options.on_gpu)
        if not options.on_gpu and case.cell.causal:  # to compile it takes seconds there: once
            found = [name for name in found if name.removeprefix(RAW_PREFIX) != "flex"]
        return found

    def measure(self, case: Case, variants: Sequence[str], options: Options) -> Sequence[Finding]:
        assert isinstance(case, KernelCase)
        ways = ways_of(variants, known_ways())
        cell = case.cell
        heads = (cell.num_heads, cell.num_kv_heads)
        dtype: torch.dtype = getattr(torch, cell.dtype)
        try:
            inputs = Inputs.random(
                cell.lengths(), heads, cell.head_dim, dtype, options.device, cell.causal, cell.seed
            )
        except torch.OutOfMemoryError as error:
            return findings_of_all(variants, PASSES, "oom", one_line(error))
        with auto_cache():
            findings = measure_attention(inputs, ways, options)
        for finding in findings:
            _say_auto(finding, case, options)
        return findings

    def section(self, rows: Sequence[Row]) -> str:
        from flexvarlen.bench.attention.kernels_tables import kernels_section

        return kernels_section(rows)

    def figures(self, rows: Sequence[Row], folder: Path) -> Sequence[Path]:
        from flexvarlen.bench.attention.kernels_figure import drawn
        from flexvarlen.bench.attention.kernels_tables import kernels_groups
        from flexvarlen.bench.series_figure import figure_path, save_figure

        return [
            save_figure(drawn(group), figure_path(folder, self.name, group))
            for group in kernels_groups(rows)
        ]


def default_variants(*, on_cpu: bool) -> list[str]:
    """Each backend, then the raw kernel that it wraps.

    >>> default_variants(on_cpu=True)[:4]
    ['sdpa', 'reference', 'flex', 'raw:flex']
    """
    names = [*(OURS_ON_CPU if on_cpu else ()), *OURS]
    found = []
    for name in names:
        # cudnn is a candidate where torch has it, and wraps no function that users call.
        if name == "cudnn" and name not in BACKENDS:
            continue
        found.append(name)
        if name in RAW:
            found.append(RAW_PREFIX + name)
    return found


def known_ways() -> dict[str, Prepare]:
    """Every variant that can be named."""
    names = dict.fromkeys((*OURS, *OURS_ON_CPU, *BACKENDS))
    return {name: ours(name) for name in names} | {RAW_PREFIX + name: raw(name) for name in RAW}


def _cases(subset: str, cells: list[Cell]) -> list[KernelCase]:
    """Those of one kind together and small ones first: kernels are shared."""
    kinds = list(dict.fromkeys(cell.kind for cell in cells))
    cells = sorted(cells, key=lambda cell: (kinds.index(cell.kind), cell.tokens))
    return [KernelCase(cell, subset) for cell in cells]


def _say_auto(finding: Finding, case: Case, options: Options) -> None:
    if finding.variant != "auto" or finding.pass_ != PASSES[0] or finding.status != "ok":
        return
    measures = finding.measures
    names = dict.fromkeys(measures[key] for key in ("resolved_compiled", "resolved"))
    options.say(f"{case.name}: auto takes {', eagerly '.join(names)} ({measures['auto_s']:.1f} s)")


@cache
def _fresh_folder() -> tempfile.TemporaryDirectory[str]:
    """Of this process, which deletes it when it ends."""
    return tempfile.TemporaryDirectory(prefix="flexvarlen-auto-")


@contextlib.contextmanager
def auto_cache() -> Iterator[None]:
    """What "auto" measures meanwhile is kept apart from what it knew before this process."""
    before = os.environ.get(CACHE)
    os.environ[CACHE] = _fresh_folder().name
    try:
        yield
    finally:
        os.environ.pop(CACHE)
        if before is not None:
            os.environ[CACHE] = before


SUITE = Kernels()
