"""`compare`: every backend against each document alone, on one packed row, or row of trees.

1. Each document runs alone, in fp64 (the reference) and in the tested dtype (the baseline).
2. Each variant runs the packed row: errors, leaks, other packings.
3. The variants that run are timed, interleaved; then their peak memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from flexvarlen.measure import Timing, environment, memory_meaning, peak_memory_mib
from flexvarlen.patches.isolation.documents import units_of
from flexvarlen.patches.isolation.tokens import halves_of
from flexvarlen.reference.model import baseline_model, own_parameters, run_alone
from flexvarlen.report.records import Record, Status, one_line
from flexvarlen.runner.failures import Unsupported, is_lost, status_of
from flexvarlen.runner.suite import Finding
from flexvarlen.verify.compare.accuracy import (
    describe,
    error_measures,
    is_whole,
    reference_of,
)
from flexvarlen.verify.compare.check import CheckResult, Checks, check_variant
from flexvarlen.verify.compare.report import BASELINE, SUITE, Report
from flexvarlen.verify.corpus import batch_of
from flexvarlen.verify.experiment.alone import Alone
from flexvarlen.verify.experiment.batch import PackedBatch, recut
from flexvarlen.verify.experiment.measure import FEWEST_REPEATS, LIMITS, time_in_turns
from flexvarlen.verify.experiment.step import causal_step, free
from flexvarlen.verify.experiment.tree_batch import Row, TreeBatch
from flexvarlen.verify.experiment.variant import (
    THEIRS,
    Sizes,
    Variant,
    make_variant,
    variant_names,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Progress = Callable[[int, int, str], None]
"""Called with the steps done, all steps, and what is being done."""

TIMING_BUDGET_S = 3.0  # of each variant
MOST_REPEATS = 20


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

    The model is not changed, whether it is patched or not; its device is where all runs.

    Args:
        model: a transformers model of a verified family, with a head for causal language modelling.
        batch: a forward's keyword arguments (boundaries found by the contract of `patch_model`;
            labels are not used), or a `PackedBatch`. Default: real text, packed to `tokens`. With a
            `packed_layout` of trees, such as `fv.share_prefixes(samples).batch()`, each sample, a
            path from a root to a leaf, is compared with the sample alone; the loss is `tree_loss`
            of `shift_labels` and `sample_counts`, if the batch has them.
        backends: "all" (flexvarlen's, "auto", and transformers' own for contrast), or names.
        dtype: to compare in; default: the model's.
        train: forward and backward; else the forward alone, under `no_grad`.
        compile: under torch.compile (inductor; graph breaks allowed, and counted; cold caches).
        tokens: of the default batch; default 1,024 on the CPU, 8,192 on CUDA.
        seed: of everything random.
        packings: other packings of the same tokens, over which recompilations are counted; none
            of trees.
        name: the model's, for the report.
        progress: see `Progress`.

    Returns:
        A record of each document alone (the baseline), then one of each backend, usable or not.

    Raises:
        ValueError: `model` is not a transformers model, an unknown backend, a batch that breaks the
            contract, or too little memory for the reference.
        NotImplementedError: the model type is not verified.
    """
    from transformers import PreTrainedModel

    from flexvarlen.patches import unpatch_model
    from flexvarlen.patches.models.families import require_verified

    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"model must be a transformers PreTrainedModel, got {model!r:.80}; load it with "
            "AutoModelForCausalLM.from_pretrained."
        )
    require_verified(model.config.model_type)
    names = variant_names(backends, model.device)
    base = unpatch_model(own_parameters(model, model.dtype if dtype is None else dtype))
    packed = _row(base, batch, tokens=tokens, seed=seed)
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
        return _Comparison(base, packed, case, packings, progress).report(names)


def _row(
    base: PreTrainedModel,
    batch: PackedBatch | Mapping[str, Any] | None,
    *,
    tokens: int | None,
    seed: int,
) -> Row:
    trees = TreeBatch.of(batch) if isinstance(batch, Mapping) else None
    if trees is None:
        return batch_of(base, batch, tokens=tokens, seed=seed)
    return trees.to(base.device)


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
        self.train, self.compile = case["passes"] != "forward", case["compiled"]
        self.seed = case["seed"]
        self.environment = environment(base.device)
        self.sizes = sizes = Sizes.of(batch)
        self.others: list[PackedBatch] = []
        if isinstance(batch, PackedBatch):
            self.others = [
                recut(batch, self.seed + i, capacity=sizes.capacity, longest=sizes.max_seqlen_bound)
                for i in range(packings)
            ]
        self.done, self.total = 0, 1

    def report(self, names: Sequence[str]) -> Report:
        """All records, in order."""
        variants, refused = self._make(names)
        self._say(f"each {self.batch.sample} alone, in fp64")
        checks = self._checks()
        self.case["reference"] = describe(checks.reference)
        records = {name: self._record(name, "unsupported", why) for name, why in refused.items()}
        checked: dict[str, CheckResult] = {}
        for name, variant in variants.items():
            found = self._check(variant, checks)
            if isinstance(found, Record):
                records[name] = found
            else:
                checked[name] = found
        reference = checks.reference.without_tensors()
        del checks  # its fp64 tensors would count into everybody's peak memory
        timings = self._time({name: variants[name] for name in checked}, checked, reference)
        for name, done in checked.items():
            records[name] = self._finish(variants[name], done, timings[name])
        self._did(self.total - self.done)
        baseline = self._baseline_record(reference, timings.get(BASELINE))
        return Report((baseline, *(records[name] for name in names)))

    def _make(self, names: Sequence[str]) -> tuple[dict[str, Variant], dict[str, str]]:
        """The variants that can run, and why the others cannot."""
        variants: dict[str, Variant] = {}
        refused: dict[str, str] = {}
        for name in names:
            if name.startswith(THEIRS) and isinstance(self.batch, TreeBatch):
                refused[name] = f"{name} takes no packed_layout of trees."
                continue
            try:
                made = make_variant(name, self.base, self.sizes, train=self.train, or_forward=True)
            except Unsupported as error:
                refused[name] = str(error)
                continue
            # Graph breaks are counted.
            variants[name] = made.compiled("inductor", fullgraph=False) if self.compile else made
        units = units_of(self.batch.layout())
        each = 3 + len(halves_of(range(len(units)), units)) + FEWEST_REPEATS
        self.total = 2 + FEWEST_REPEATS + each * len(variants)
        return variants, refused

    def _checks(self) -> Checks:
        reference = reference_of(self.base, self.batch, train=self.train, seed=self.seed)
        self._did()
        last = None
        if self.others:
            last = reference_of(self.base, self.others[-1], train=False, seed=self.seed)
        self._did()
        return Checks(reference, self.others, last, self.compile, self.seed)

    def _check(self, variant: Variant, checks: Checks) -> CheckResult | Record:
        """What the checks found; a record if the variant broke."""
        try:
            return check_variant(variant, checks, self._say, self._did)
        except Exception as error:  # kernels and compilers raise types of their own: a finding
            if is_lost(error, self.base.device):
                raise
            status, _ = status_of(error)
            return self._record(variant.name, status, one_line(error))
        finally:
            free(self.base.device, self.base)

    def _time(
        self,
        variants: Mapping[str, Variant],
        checked: Mapping[str, CheckResult],
        reference: Alone,
    ) -> dict[str, Timing | Finding]:
        """Time the variants, and each document alone where the reference covers them all."""
        calls = {name: self._step_of(variant) for name, variant in variants.items()}
        if is_whole(reference):
            calls[BASELINE] = self._baseline_step(reference)
        left = dict.fromkeys(calls, FEWEST_REPEATS)

        def progress(name: str) -> None:
            if left[name]:
                left[name] -= 1
                self._did()
            self._say("speed of all, in turns")

        timings = time_in_turns(
            calls,
            {name: done.step_s for name, done in checked.items()},
            self.base.device,
            seconds=TIMING_BUDGET_S,
            most_repeats=MOST_REPEATS,
            progress=progress,
        )
        free(self.base.device, self.base)
        return timings

    def _step_of(self, variant: Variant) -> Callable[[], object]:
        labels = self.batch.labels()
        return partial(causal_step, variant, self.batch, labels, self.batch.counted(labels))

    def _baseline_step(self, reference: Alone) -> Callable[[], object]:
        model, samples, documents = (
            baseline_model(self.base),
            self.batch.samples,
            reference.documents,
        )
        loss = self.batch.loss_alone(model, documents) if self.train else None
        return partial(
            run_alone, model, samples.input_ids, samples.lengths, documents=documents, loss=loss
        )

    # ---- records ----

    def _baseline_record(self, reference: Alone, timing: Timing | Finding | None) -> Record:
        measures = error_measures(reference.baseline)
        if isinstance(timing, Finding):
            return self._record(BASELINE, "ok", f"not timed: {timing.reason}", measures)
        if timing is None:
            why = "not timed: some documents are too long for eager attention."
            return self._record(BASELINE, "ok", why, measures)
        return self._record(BASELINE, "ok", None, measures | self._speed(timing))

    def _finish(self, variant: Variant, checked: CheckResult, timing: Timing | Finding) -> Record:
        self._say(f"{variant.name}: memory")
        free(self.base.device, self.base)
        measures = checked.measures | {"passes": "forward+backward" if variant.train else "forward"}
        if isinstance(timing, Finding):
            return self._record(
                variant.name, timing.status, f"not timed: {timing.reason}", measures
            )
        try:
            peak = peak_memory_mib(self._step_of(variant), self.base.device)
        except Exception as error:  # as in `_check`; what the checks found stays
            if is_lost(error, self.base.device):
                raise
            status, reason = status_of(error)
            return self._record(variant.name, status, f"memory not measured: {reason}", measures)
        self._did()
        memory = {"peak_mib": peak, "peak_meaning": memory_meaning(self.base.device)}
        measures |= self._speed(timing) | memory
        return self._record(variant.name, "ok", variant.why_no_backward, measures)

    def _speed(self, timing: Timing) -> dict[str, Any]:
        return {"tokens_per_s": self.batch.total_tokens / timing.ms_p50 * 1e3, **asdict(timing)}

    def _record(
        self, name: str, status: Status, reason: str | None, measures: dict[str, Any] | None = None
    ) -> Record:
        case = self.case | {"variant": name}
        return Record(SUITE, case, status, reason, measures or {}, self.environment)

    # ---- progress ----

    def _say(self, what: str) -> None:
        if self.progress is not None:
            self.progress(self.done, self.total, what)

    def _did(self, steps: int = 1) -> None:
        self.done = min(self.done + steps, self.total)
        if self.progress is not None:
            self.progress(self.done, self.total, "")
