"""Suite "scaling-ranks": packed training on several GPUs of one host, by torchrun.

    ddp, fsdp2  tokens per second of whole training steps, a packed row for each rank and step, rows
                in a shuffled order or in `BalancedSampler`'s. The rows are the same whatever the
                number of ranks: Python's help topics in random order, cut where a row ends. FSDP2
                shards each layer and the rest.
    sequence    a whole model on one row over all ranks, against one GPU
    trainer, sft    Trainer and SFTTrainer under FSDP2, all ranks on one row, by one line

Each measurement is a launch of torchrun with one of `ranks_child`'s functions on every rank.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from flexvarlen.bench.suites.model.geometries import GeometryCase, is_hybrid
from flexvarlen.bench.suites.training import scaling_ranks_tables
from flexvarlen.runner.each import measure_each
from flexvarlen.runner.failures import Unsupported
from flexvarlen.runner.suite import Finding, Findings, Options, Suite, require_known

CHILD = "flexvarlen.bench.suites.training.ranks_child"
RANKS = (1, 2, 4)
LIMIT_S = 1800.0


@dataclass(frozen=True)
class RanksCase(GeometryCase):
    """What all three kinds of case have; `tokens` are those of a packed row."""

    geometry: str = "qwen3-1.7b"
    layers: int = 28
    ranks: int = 1
    backend: str = "auto"
    tokens: int = 32_768
    checkpointing: bool = True

    kinds: ClassVar[tuple[str, ...]]
    """The variants."""

    @property
    def name(self) -> str:
        return f"{self.kinds[0]}-{self.ranks}"


@dataclass(frozen=True)
class TrainingCase(RanksCase):
    """A packed row for each rank and step.

    Attributes:
        order: of the rows, "shuffled" or "balanced".
        timed_rows: over all ranks, after `warmup` steps.
    """

    order: str = "shuffled"
    timed_rows: int = 32
    warmup: int = 3

    kinds: ClassVar[tuple[str, ...]] = ("ddp", "fsdp2")

    @property
    def name(self) -> str:
        return f"training-{self.ranks}-{self.order}"


@dataclass(frozen=True)
class SequenceCase(RanksCase):
    """A whole model on one row over all ranks, and on each rank alone.

    A row of `tokens` is compared with the reference first.

    Attributes:
        row: that is timed, of documents that are "cut", or all lie "whole" on a rank.
        document: tokens of the row that is timed.
        steps: timed.
    """

    layers: int = 14
    row: str = "cut"
    document: int = 65_536
    steps: int = 3

    kinds: ClassVar[tuple[str, ...]] = ("sequence",)

    @property
    def name(self) -> str:
        return f"sequence-{self.ranks}-{self.row}{'-hybrid' * self.hybrid}"

    @property
    def hybrid(self) -> bool:
        return is_hybrid(self.geometry)


@dataclass(frozen=True)
class SharedTrainerCase(RanksCase):
    """A Trainer under FSDP2 whose ranks share each row, by `context_parallel`."""

    tokens: int = 131_072
    steps: int = 3

    kinds: ClassVar[tuple[str, ...]] = ("trainer", "sft")


CASES: dict[str, type[RanksCase]] = {
    kind: each for each in (TrainingCase, SequenceCase, SharedTrainerCase) for kind in each.kinds
}
"""The kind of case by variant."""


class ScalingRanks(Suite[RanksCase]):
    name: ClassVar[str] = "scaling-ranks"

    def cases(self, options: Options) -> Sequence[RanksCase]:
        training, sequence, shared = TrainingCase(), SequenceCase(), SharedTrainerCase()
        hybrid: dict[str, Any] = {"geometry": "qwen3.5-2b", "layers": 12}
        if options.quick:
            model: dict[str, Any] = {
                "dtype": "float32",
                "backend": "sdpa",
                "geometry": "qwen3-tiny",
                "layers": 2,
                "tokens": 96,
            }
            training = replace(training, **model, timed_rows=4, warmup=1)
            sequence = replace(sequence, **model, document=160, steps=2)
            shared = replace(shared, **model, steps=2)
            hybrid = {"geometry": "qwen3.5-tiny"}
        several = [ranks for ranks in RANKS if 1 < ranks <= (2 if options.quick else 4)]
        return [
            training,
            *(
                replace(training, ranks=ranks, order=order)
                for ranks in several
                for order in ("shuffled", "balanced")
            ),
            *(replace(shared, ranks=ranks) for ranks in (1, *several)),
            *(
                replace(sequence, ranks=ranks, row=kind)
                for ranks in several
                for kind in ("cut", "whole")
            ),
            *(replace(sequence, ranks=ranks, **hybrid) for ranks in several),
        ]

    def variants(self, case: RanksCase, options: Options) -> Sequence[str]:
        return case.kinds

    def measure(self, case: RanksCase, variants: Sequence[str], options: Options) -> Findings:
        require_known(variants, case.kinds)
        measure = partial(launch, case, device=options.device)
        return measure_each(case.name, variants, measure, options.device)

    tables = staticmethod(scaling_ranks_tables.tables)
    page_tables = staticmethod(scaling_ranks_tables.page_tables)
    figures = staticmethod(scaling_ranks_tables.draw)


def launch(case: RanksCase, variant: str, device: torch.device) -> Finding:
    """Run a variant on `case.ranks` processes, and read rank 0's finding.

    Raises:
        Unsupported: there are fewer GPUs.
        RuntimeError: a rank ended otherwise; the message is the last line of its error.
        TimeoutExpired: it took longer than `LIMIT_S`; the ranks are ended.
    """
    if device.type == "cuda" and torch.cuda.device_count() < case.ranks:
        raise Unsupported(f"needs {case.ranks} GPUs, has {torch.cuda.device_count()}")
    if not dist.is_available():
        raise Unsupported("this torch has no torch.distributed")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "finding.json"
        task = json.dumps({"variant": variant, "case": case.data(), "device": device.type})
        torchrun = ("torch.distributed.run", "--standalone", f"--nproc-per-node={case.ranks}")
        process = subprocess.Popen(
            [sys.executable, "-m", *torchrun, "-m", CHILD, task, str(out)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            _, stderr = process.communicate(timeout=LIMIT_S)
        finally:
            if process.poll() is None:
                # Not killed: torchrun ends its ranks first, which are in sessions of their own.
                process.terminate()
                process.communicate()
        if not out.exists():
            raise RuntimeError(_error_of(stderr))
        return Finding(variant, **json.loads(out.read_text(encoding="utf-8")))


def _error_of(stderr: str) -> str:
    """The first error that a rank printed: torchrun's own come after it."""
    error = re.search(r"^(?:\[rank\d+\]: )?[\w.]*Error: .*", stderr, re.MULTILINE)
    return "the ranks ended without a finding" if error is None else error[0]


SUITE = ScalingRanks()
