"""`compare`: every backend against each document alone, on one packed row, or row of trees.

1. Each document runs alone, in fp64 (the reference) and in the tested dtype (the baseline).
2. Each variant runs the packed row: errors, leaks, other packings.
3. The variants that run are timed, interleaved; then their peak memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from flexvarlen.measure import environment
from flexvarlen.patches.isolation.documents import units_of
from flexvarlen.reference.model import (
    baseline_model,
    own_parameters,
    run_alone,
    without_router_loss,
)
from flexvarlen.report.records import Record
from flexvarlen.runner.suite import Finding, Options
from flexvarlen.verify.compare.accuracy import describe, error_measures, is_whole, reference_of
from flexvarlen.verify.compare.check import Checks, check_variant
from flexvarlen.verify.compare.report import BASELINE, SUITE, Report
from flexvarlen.verify.corpus import row_of
from flexvarlen.verify.experiment.batch import PackedBatch, recut
from flexvarlen.verify.experiment.measure import LIMITS, CheckedVariant, check_and_time
from flexvarlen.verify.experiment.step import causal_step, free
from flexvarlen.verify.experiment.tree_batch import Row, TreeBatch
from flexvarlen.verify.experiment.variant import Sizes, make_variant, variant_names

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Progress = Callable[[int, int, str], None]
"""Called with the steps done, all steps, and a description of the current step."""

TIMING_BUDGET_S = 3.0  # of each variant
MOST_REPEATS = 20
STOPPED = "not timed: stopped before."
NOT_TIMED = "not timed: some documents are too long for eager attention."


def compare(
    model: PreTrainedModel,
    batch: PackedBatch | Mapping[str, Any] | None = None,
    backends: str | Sequence[str] = "all",
    *,
    dtype: torch.dtype | None = None,
    train: bool = True,
    compile: bool = False,
    tokens: int | None = None,
    seed: int = 0,
    packings: int = 3,
    name: str | None = None,
    progress: Progress | None = None,
) -> Report:
    """Compare backends on one model and one packed row with each document alone in float64.

    The model is not changed, whether it is patched or not; everything runs on its device.

    Args:
        model: a transformers model of a verified family, with a causal language modelling head.
        batch: a forward's keyword arguments (boundaries found by the contract of `patch_model`;
            labels are not used), or a `PackedBatch`. Default: real text, packed to `tokens`. With a
            `packed_layout` of trees, such as `fv.share_prefixes(samples).batch()`, each sample, a
            path from a root to a leaf, is compared with the sample alone; the loss is `tree_loss`
            of `shift_labels` and `label_counts`, if the batch has them. Images come as from
            `PackedCollator`: each document runs alone with its own.
        backends: "all" (flexvarlen's, "auto", and transformers' own for contrast), or names.
        dtype: dtype of the comparison; default: the model's.
        train: whether to run forward and backward; else only the forward, under `no_grad`.
        compile: whether to use torch.compile (inductor; graph breaks are counted; cold caches).
        tokens: size of the default batch; default 1,024 on the CPU, 8,192 on CUDA.
        seed: random seed.
        packings: other packings of the same tokens, to count recompilations; none for trees or
            images.
        name: name of the model in the report.
        progress: called with the steps done, all steps, and a description of the current step.

    Returns:
        A report; `print` shows its table, and `passed` is the verdict. It has a record of the
        baseline (each document alone), then one of each backend, usable or not.

    Raises:
        ValueError: `model` is not a transformers model, a backend is unknown, the batch breaks
            the contract, or there is too little memory for the reference.
        NotImplementedError: the model type is not verified; or images in trees, or images whose
            numbers of tokens follow sizes that only a processor can read.
        DeviceLost: a kernel broke the device.
        Interrupted: a KeyboardInterrupt, with the results so far.

    >>> print(fv.compare(model, tokens=8192))  # doctest: +SKIP
    """
    from transformers import PreTrainedModel

    from flexvarlen.patches import unpatch_model
    from flexvarlen.patches.models.verified import require_verified

    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"model must be a transformers PreTrainedModel, got {model!r:.80}; load it with "
            "AutoModelForCausalLM.from_pretrained."
        )
    require_verified(model.config.model_type)
    names = variant_names(backends, model.device)
    base = unpatch_model(own_parameters(model, model.dtype if dtype is None else dtype))
    base = without_router_loss(base)
    packed = row_of(base, batch, tokens=tokens, seed=seed)
    lengths = packed.samples.lengths
    case = {
        "model": name or str(model.config.name_or_path or model.config.model_type),
        "dtype": str(base.dtype).removeprefix("torch."),
        "passes": "forward+backward" if train else "forward",
        "compiled": compile,
        "tokens": packed.total_tokens,
        "documents": len(lengths),
        "longest_document": max(lengths),
        "seed": seed,
        "source": packed.source,
    }
    if isinstance(packed, TreeBatch):
        case["segments"] = len(units_of(packed.trees))
    with torch._dynamo.config.patch(LIMITS) if compile else nullcontext():
        comparison = _Comparison(base, packed, case, packings, progress)
        try:
            return comparison.report(names)
        except KeyboardInterrupt as stop:
            raise Interrupted(comparison.report_so_far()) from stop


class Interrupted(KeyboardInterrupt):
    """Ctrl-C; `report` has the results so far."""

    def __init__(self, report: Report) -> None:
        super().__init__()
        self.report = report


class _Comparison:
    """The shared state of one comparison."""

    def __init__(
        self,
        base: PreTrainedModel,
        batch: Row,
        case: dict[str, Any],
        packings: int,
        progress: Progress | None,
    ) -> None:
        self.base, self.batch, self.case, self.progress = base, batch, case, progress
        self.train, self.packings = case["passes"] != "forward", packings
        self.environment = environment(base.device)
        self.why_no_backward: dict[str, str | None] = {}
        self.checked: dict[str, dict[str, Any]] = {}
        self.done, self.total = 0, 0

    def report(self, names: Sequence[str]) -> Report:
        """All records, in order."""
        self.total = 2 + len(names)
        self._say(f"each {self.batch.sample} alone, in fp64")
        self.checks = self._checks()
        self._did()
        reference = self.checks.reference
        self.case["reference"] = describe(reference)
        self.errors = error_measures(reference.baseline)
        timed = [BASELINE] if is_whole(reference) else []
        del reference  # before the variants run again
        findings = check_and_time(
            [*timed, *names],
            self._check,
            Options(self.base.device, seconds=TIMING_BUDGET_S, say=lambda line: None),
            most_repeats=MOST_REPEATS,
            slow_s=math.inf,
            after_checks=self._drop_references,
        )
        self._did()
        records = {finding.variant: self._record(finding) for finding in findings}
        baseline = records.get(BASELINE) or self._record(
            Finding(BASELINE, "ok", NOT_TIMED, self.errors)
        )
        return Report((baseline, *(records[name] for name in names)))

    def report_so_far(self) -> Report:
        """Records of the variants that were checked, without times."""
        if not self.checked:
            return Report(())
        measures = {BASELINE: self.errors} | self.checked
        findings = [Finding(name, "ok", STOPPED, found) for name, found in measures.items()]
        return Report(tuple(map(self._record, findings)))

    def _checks(self) -> Checks:
        seed, others, last = self.case["seed"], [], None
        reference = reference_of(self.base, self.batch, train=self.train, seed=seed)
        if isinstance(self.batch, PackedBatch) and not self.batch.images.columns and self.packings:
            sizes = Sizes.of(self.batch)
            room = {"capacity": sizes.capacity, "longest": sizes.max_seqlen_bound}
            others = [recut(self.batch, seed + i, **room) for i in range(self.packings)]
            last = reference_of(self.base, others[-1], train=False, seed=seed)
        return Checks(reference, others, last, self.case["compiled"], seed)

    def _check(self, name: str) -> CheckedVariant:
        """Check a variant; the report decides whether the result is right.

        Raises:
            Unsupported: the variant cannot run here.
        """
        if name == BASELINE:
            return self._baseline()
        self._did()
        sizes = Sizes.of(self.batch)
        variant = make_variant(name, self.base, sizes, train=self.train, or_forward=True)
        if self.checks.compile:  # graph breaks are counted
            variant = variant.compiled("inductor", fullgraph=False)
        self.why_no_backward[name] = variant.why_no_backward
        measures = check_variant(variant, self.checks, self._say)
        measures["passes"] = "forward+backward" if variant.train else "forward"
        self.checked[name] = measures
        labels = self.batch.labels()
        step = partial(causal_step, variant, self.batch, labels, self.batch.counted(labels))
        return CheckedVariant(step, measures, conclude=self._speed)

    def _baseline(self) -> CheckedVariant:
        model, samples = baseline_model(self.base), self.batch.samples
        documents = self.checks.reference.documents
        loss = self.batch.loss_alone(model, documents) if self.train else None
        step = partial(
            run_alone,
            model,
            samples.input_ids,
            samples.lengths,
            documents=documents,
            loss=loss,
            images=samples.images_alone,
        )
        return CheckedVariant(step, dict(self.errors), conclude=self._speed)

    def _drop_references(self) -> None:
        """Free the references: their fp64 tensors would count in the peak memory of variants."""
        self._say("speed of all, in turns")
        del self.checks
        free(self.base.device, self.base)

    def _speed(self, ms: float) -> dict[str, Any]:
        return {"tokens_per_s": self.batch.total_tokens / ms * 1e3}

    def _record(self, finding: Finding) -> Record:
        status, reason = finding.status, finding.reason
        if finding.variant == BASELINE:
            status = "ok"  # its errors are known, even if timing it failed
        reason = reason or self.why_no_backward.get(finding.variant)
        case = self.case | {"variant": finding.variant}
        return Record(SUITE, case, status, reason, dict(finding.measures), self.environment)

    # ---- progress ----

    def _say(self, what: str) -> None:
        if self.progress is not None:
            self.progress(self.done, self.total, what)

    def _did(self) -> None:
        self.done += 1
        self._say("")
