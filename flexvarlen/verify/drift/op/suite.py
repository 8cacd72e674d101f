"""`OperatorDrift`: attention alone, on random inputs, computed in several ways that should agree.

| comparison | of what |
|---|---|
| exact | all documents in one call, and one call per document, each against the fp64 reference |
| batch-serial | all documents in one call, against one call per document |
| run-run | the same call again |
| eager-compiled | torch.compile(fullgraph=True), against eager and the fp64 reference |
| backend-backend | one call per document, against another backend |
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, ClassVar

import torch

import flexvarlen as fv
from flexvarlen.attention.backends.registry import our_name
from flexvarlen.reference.acceptance import Error, allowed, largest, why_wrong
from flexvarlen.reference.attention import GRADIENTS, Results, attend_alone
from flexvarlen.report.records import Record, Status
from flexvarlen.runner.each import measure_each
from flexvarlen.runner.suite import Case, Finding, Options, Suite
from flexvarlen.verify.drift.difference import Difference
from flexvarlen.verify.drift.each import checked_names, records_of
from flexvarlen.verify.drift.op.calls import BackendCalls
from flexvarlen.verify.drift.op.cases import Inputs, OpCase

COMPARISONS = ("exact", "batch-serial", "run-run", "eager-compiled", "backend-backend")
BASELINE = "sdpa"
"""What "backend-backend" compares with: it runs anywhere."""

QUICKLY_COMPILED = ("sdpa", "reference")
"""What is compiled on the CPU unless others are named: they take many seconds a case."""


@dataclass(frozen=True)
class OperatorCase:
    """One comparison of one call of attention.

    Attributes:
        op: documents, heads and mask.
        dtype: of the tensors.
        comparison: of `COMPARISONS`.
        train: whether gradients are compared.
        seed: of the inputs.
    """

    op: OpCase
    dtype: torch.dtype
    comparison: str
    train: bool = True
    seed: int = 0

    @property
    def name(self) -> str:
        """For the progress bar."""
        return f"{self.op.name} {self.dtype} {self.comparison}".replace("torch.", "")

    def data(self) -> dict[str, Any]:
        """As in a record."""
        return self.op.as_record_case(self.dtype) | {
            "train": self.train,
            "seed": self.seed,
            "comparison": self.comparison,
            "other": BASELINE if self.comparison == "backend-backend" else None,
        }


class OperatorDrift(Suite):
    """Cases of attention, each in each comparison."""

    name: ClassVar[str] = "drift-op"

    def __init__(self, cases: Sequence[OperatorCase]) -> None:
        self._cases = tuple(cases)

    @classmethod
    def of(
        cls,
        cases: Sequence[OpCase],
        dtypes: Sequence[torch.dtype],
        comparisons: Sequence[str] = ("all",),
        *,
        train: bool = True,
        seed: int = 0,
    ) -> OperatorDrift:
        """Each case in each dtype and comparison; raises a ValueError for an unknown comparison."""
        names = checked_names("comparisons", comparisons, COMPARISONS)
        every = product(cases, dtypes, names)
        return cls([OperatorCase(*one, train=train, seed=seed) for one in every])

    def cases(self, options: Options) -> Sequence[Case]:
        """Those given."""
        return self._cases

    def variants(self, case: Case, options: Options) -> Sequence[str]:
        """All backends; on the CPU few are compiled."""
        assert isinstance(case, OperatorCase)
        quick = case.comparison == "eager-compiled" and not options.on_gpu
        return QUICKLY_COMPILED if quick else fv.BACKENDS

    def measure(self, case: Case, variants: Sequence[str], options: Options) -> Sequence[Finding]:
        """The comparison of each backend."""
        assert isinstance(case, OperatorCase)
        inputs = Inputs.random(case.op, case.dtype, options.device, case.seed)
        needs_reference = case.comparison in ("exact", "eager-compiled")
        reference = _Reference.of(case, inputs) if needs_reference else None

        def compare(backend: str) -> Finding:
            calls = BackendCalls.of(backend, case.op, inputs, train=case.train)
            if case.comparison == "exact":
                assert reference is not None
                measures, reasons = reference.check(calls.together(inputs), inputs)
                serial, more = reference.check(
                    calls.alone(inputs), inputs, "serial_", "one call per document: "
                )
                measures, reasons = measures | serial, reasons + more
            else:
                measures, reasons = _compared(case, calls, inputs, reference)
            status: Status = "wrong" if reasons else "ok"
            return Finding(backend, status, reasons[0] if reasons else None, measures)

        return measure_each(case.name, variants, compare, options.device)

    def section(self, records: Sequence[Record]) -> str:
        """The table of docs/verification.md."""
        from flexvarlen.verify.drift.page_tables import section

        return section(records)


def operator_drift(
    cases: Sequence[OpCase],
    backends: Sequence[str] = ("all",),
    *,
    device: torch.device | str,
    dtypes: Sequence[torch.dtype] = (torch.bfloat16,),
    comparisons: Sequence[str] = ("all",),
    train: bool = True,
    seed: int = 0,
) -> list[Record]:
    """Compare backends on cases; nothing is written.

    Args:
        cases: see `flexvarlen.verify.drift.op.cases.SUITES`.
        backends: names of `flexvarlen.BACKENDS`, or "all". One that cannot serve a case gets a
            record "unsupported" with its reason; one without a backward is compared forward only.
        device: where all of it runs.
        dtypes: of the tensors.
        comparisons: of `COMPARISONS`, or "all".
        train: whether gradients are compared.
        seed: of the inputs.

    Returns:
        A record for each case, dtype, comparison and backend.

    Raises:
        ValueError: an unknown backend or comparison.
        DeviceLost: a kernel broke the device.

    Synchronizes the device.
    """
    suite = OperatorDrift.of(cases, dtypes, comparisons, train=train, seed=seed)
    options = Options(torch.device(device), variants=backend_variants(backends))
    return records_of(suite, options)


def backend_variants(backends: Sequence[str]) -> tuple[str, ...] | None:
    """`Options.variants` of these names; "all" is None, the suite's own.

    Raises:
        ValueError: an unknown backend.
    """
    names = checked_names("backends", [our_name(name) for name in backends], fv.BACKENDS)
    return None if "all" in backends else tuple(names)


@dataclass(frozen=True)
class _Reference:
    """The documents of a case alone: in fp64, and the errors of the low-precision baseline."""

    dtype: torch.dtype
    results: dict[str, torch.Tensor] = field(repr=False)
    baseline: dict[str, Error]

    @classmethod
    def of(cls, case: OperatorCase, inputs: Inputs) -> _Reference:
        results, baseline = (
            attend_alone(
                inputs.q,
                inputs.k,
                inputs.v,
                inputs.lengths,
                dtype=dtype,
                causal=case.op.causal,
                window=case.op.window,
                grad_out=inputs.dout if case.train else None,
            ).named()
            for dtype in (torch.float64, case.dtype)
        )
        errors = {name: Error.between(x, results[name]) for name, x in baseline.items()}
        return cls(case.dtype, results, errors)

    def check(
        self, found: Results, inputs: Inputs, prefix: str = "", where: str = ""
    ) -> tuple[dict[str, Any], list[str]]:
        """The errors as measures, and a sentence for each that is above what the rule allows.

        Args:
            prefix: of the measures' names.
            where: starts each sentence.
        """
        measures: dict[str, Any] = {}
        reasons = []
        for name, x in found.named().items():
            difference = Difference.between(x, self.results[name])
            limits = allowed(self.baseline[name], x.dtype, gradient=name in GRADIENTS)
            measures |= difference.measures(f"{prefix}{name}")
            measures[f"{prefix}ratio_{name}"] = limits.ratio(difference.error)
            reason = why_wrong(
                f"{where}{name}",
                difference.error,
                self.baseline[name],
                x.dtype,
                gradient=name in GRADIENTS,
            )
            reasons += [] if reason is None else [f"{reason} {self._worst(name, x, inputs)}"]
        return measures, reasons

    def _worst(self, name: str, found: torch.Tensor, inputs: Inputs) -> str:
        """The document with the largest error, which tells a boundary from a wrong scale."""
        axis, lengths = 1 if name == "lse" else 0, list(inputs.lengths)
        documents = zip(
            found.split(lengths, axis), self.results[name].split(lengths, axis), strict=True
        )
        errors = [Error.between(*pair).max_abs for pair in documents]
        worst = largest(errors)
        index = next(i for i, error in enumerate(errors) if error == worst or error != error)
        return f"It is largest in document {index} ({inputs.lengths[index]} tokens)."


def _compared(
    case: OperatorCase, calls: BackendCalls, inputs: Inputs, reference: _Reference | None
) -> tuple[dict[str, Any], list[str]]:
    """The differences of everything that both computations return, and what is wrong.

    The compiled call is checked against the reference too: `ratio_*`.
    """
    measures: dict[str, Any] = {}
    reasons: list[str] = []
    if case.comparison == "batch-serial":
        found, other = calls.together(inputs), calls.alone(inputs)
    elif case.comparison == "run-run":
        found, other = calls.together(inputs), calls.together(inputs)
    elif case.comparison == "eager-compiled":
        found, other = calls.compiled(inputs), calls.together(inputs)
        assert reference is not None
        errors, reasons = reference.check(found, inputs, where="compiled: ")
        measures = {name: x for name, x in errors.items() if name.startswith("ratio_")}
    else:
        baseline = BackendCalls.of(BASELINE, case.op, inputs, train=case.train)
        found, other = calls.alone(inputs), baseline.alone(inputs)
    ours, theirs = found.named(), other.named()
    for name in ours:
        if name in theirs:
            difference = Difference.between(ours[name], theirs[name])
            measures |= difference.measures(name)
            if not math.isfinite(difference.error.max_abs):
                reasons.append(f"{name}: a value of the two results is not finite.")
    return measures, reasons
