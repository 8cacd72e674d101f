"""Suite "drift-op": attention alone, on random inputs, computed in several ways that should agree.

| comparison | of what |
|---|---|
| exact | all documents in one call, and one call per document, each against the fp64 reference |
| batch-serial | all documents in one call, against one call per document |
| run-run | the same call again |
| backend-backend | one call per document, against another backend |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, ClassVar

import torch

from flexvarlen.attention.api import packed_attention
from flexvarlen.attention.backends.registry import BACKENDS, our_name, why_not
from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.reference.acceptance import Error, allowed, why_wrong
from flexvarlen.reference.attention import GRADIENTS, Results, with_baseline
from flexvarlen.report.records import Record
from flexvarlen.report.table import nan_last
from flexvarlen.runner.each import measure_each
from flexvarlen.runner.failures import Unsupported
from flexvarlen.runner.run import records_of
from flexvarlen.runner.suite import Finding, Findings, GivenCases, Options, checked_names
from flexvarlen.verify.experiment.difference import Difference
from flexvarlen.verify.experiment.operator_cases import BASELINE, Inputs, OpCase

COMPARISONS = ("exact", "batch-serial", "run-run", "backend-backend")


class OperatorDrift(GivenCases[OpCase]):
    """Cases of attention, each in each comparison."""

    name: ClassVar[str] = "drift-op"

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
        every = product(cases, dtypes, checked_names("comparisons", comparisons, COMPARISONS))
        return cls(
            [
                replace(case, dtype=dtype, comparison=comparison, train=train, seed=seed)
                for case, dtype, comparison in every
            ]
        )

    def variants(self, case: OpCase, options: Options) -> Sequence[str]:
        """All backends."""
        return BACKENDS

    def measure(self, case: OpCase, variants: Sequence[str], options: Options) -> Findings:
        """The comparison of each backend."""
        inputs = Inputs.random(case, options.device)
        reference = _Reference(case, inputs) if case.comparison == "exact" else None

        def compare(name: str) -> Finding:
            measures, reasons = _compared(_Backend(name, case, inputs), reference)
            reason = next(iter(reasons), None)
            return Finding(name, "wrong" if reason else "ok", reason, measures)

        return measure_each(case.name, variants, compare, options.device)


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
        cases: each is compared in the dtypes and comparisons given here; see
            `flexvarlen.verify.experiment.operator_cases.SUITES`.
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
    names = checked_names("backends", [our_name(name) for name in backends], BACKENDS)
    return None if "all" in backends else tuple(names)


class _Backend:
    """One backend on a case, whose `train` is off where the backend has no backward.

    Raises:
        Unsupported: it cannot serve the case.
    """

    def __init__(self, name: str, case: OpCase, inputs: Inputs) -> None:
        refusal: Callable[..., str | None] = partial(
            why_not,
            name,
            device=inputs.q.device,
            dtype=case.dtype,
            num_heads=case.num_heads,
            num_kv_heads=case.num_kv_heads,
            head_dim=case.head_dim,
            causal=case.causal,
            window=case.window,
        )
        reason = refusal(needs_grad=False)
        if reason is not None:
            raise Unsupported(reason)
        self.name, self.case, self.inputs = name, case, inputs
        self.train = case.train and refusal(needs_grad=True) is None
        self.returns_lse = refusal(needs_grad=self.train, return_lse=True) is None

    def together(self) -> Results:
        """All documents in one call."""
        return self._attend(self.case.lengths, self.inputs)

    def alone(self) -> Results:
        """One call per document."""
        lengths = self.case.lengths
        documents = zip(lengths, self.inputs.documents(lengths), strict=True)
        return Results.joined([self._attend((n,), own) for n, own in documents])

    def _attend(self, lengths: tuple[int, ...], inputs: Inputs) -> Results:
        leaves = [x.detach().requires_grad_(self.train) for x in (inputs.q, inputs.k, inputs.v)]
        q, k, v = leaves
        with torch.set_grad_enabled(self.train):
            result = packed_attention(
                q,
                k,
                v,
                PackedLayout.from_lengths(lengths, device=inputs.q.device),
                causal=self.case.causal,
                window=self.case.window,
                backend=self.name,
                return_lse=self.returns_lse,
            )
        out, lse = result if isinstance(result, tuple) else (result, None)
        grads = torch.autograd.grad(out, leaves, inputs.grad_out) if self.train else ()
        return Results(out.detach(), None if lse is None else lse.detach(), *grads)


class _Reference:
    """The documents of a case alone: in fp64, and the errors of the low-precision baseline."""

    def __init__(self, case: OpCase, inputs: Inputs) -> None:
        self.lengths = case.lengths
        self.results, self.baseline = with_baseline(
            inputs.q,
            inputs.k,
            inputs.v,
            case.lengths,
            causal=case.causal,
            window=case.window,
            grad_out=inputs.grad_out if case.train else None,
        )

    def check(
        self, found: Results, prefix: str = "", where: str = ""
    ) -> tuple[dict[str, Any], list[str]]:
        """The errors as measures, and a sentence for each that is above what the rule allows.

        Args:
            prefix: of the measures' names.
            where: starts each sentence.
        """
        measures: dict[str, Any] = {}
        reasons = []
        expected = self.results.named()
        for name, x in found.named().items():
            difference = Difference.between(x, expected[name])
            error, baseline, is_gradient = difference.error, self.baseline[name], name in GRADIENTS
            limits = allowed(baseline, x.dtype, gradient=is_gradient)
            measures |= difference.measures(f"{prefix}{name}")
            measures[f"{prefix}ratio_{name}"] = limits.ratio(error)
            what = f"{where}{name}"
            reason = why_wrong(what, error, baseline, x.dtype, gradient=is_gradient)
            reasons += [] if reason is None else [f"{reason} {self._worst(name, found)}"]
        return measures, reasons

    def _worst(self, name: str, found: Results) -> str:
        """The document with the largest error, which tells a boundary from a wrong scale."""
        each = (x.documents(self.lengths) for x in (found, self.results))
        pairs = ([getattr(x, name) for x in pair] for pair in zip(*each, strict=True))
        errors = [nan_last(Error.between(*pair).max_abs) for pair in pairs]
        index = errors.index(max(errors))
        return f"It is largest in document {index} ({self.lengths[index]} tokens)."


def _compared(backend: _Backend, reference: _Reference | None) -> tuple[dict[str, Any], list[str]]:
    """The measures of a comparison, and a sentence for each thing that is wrong."""
    comparison = backend.case.comparison
    if comparison == "exact":
        assert reference is not None
        measures, reasons = reference.check(backend.together())
        serial, more = reference.check(backend.alone(), "serial_", "one call per document: ")
        return measures | serial, reasons + more
    if comparison == "batch-serial":
        return _differences(backend.together(), backend.alone())
    if comparison == "run-run":
        return _differences(backend.together(), backend.together())
    baseline = _Backend(BASELINE, backend.case, backend.inputs)
    return _differences(backend.alone(), baseline.alone())


def _differences(found: Results, other: Results) -> tuple[dict[str, Any], list[str]]:
    """Differences of all results that both returned; values that are not finite are wrong."""
    results, other_results = found.named(), other.named()
    measures: dict[str, Any] = {}
    reasons = []
    for name in [name for name in results if name in other_results]:
        difference = Difference.between(results[name], other_results[name])
        measures |= difference.measures(name)
        if not math.isfinite(difference.error.max_abs):
            reasons.append(f"{name}: a value of the two results is not finite.")
    return measures, reasons
