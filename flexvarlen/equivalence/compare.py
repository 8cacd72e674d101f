"""`compare`: every backend against each document alone, on one packed row.

1. The oracle (fp64) and the peer (the tested dtype) run each document alone.
2. Each variant runs the packed row: errors, leak, other packings.
3. The variants that run are timed, interleaved; then their peak memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from flexvarlen.equivalence.batch import PackedBatch, recut
from flexvarlen.equivalence.check import Checked, Checks, check_variant, error_measures
from flexvarlen.equivalence.corpus import batch_of
from flexvarlen.equivalence.isolation import halves
from flexvarlen.equivalence.oracle import alone, own_parameters, peer_model
from flexvarlen.equivalence.report import PEER, Report, Role, Row
from flexvarlen.equivalence.truth import Truth, clean
from flexvarlen.equivalence.variants import (
    THEIRS,
    Sizes,
    Unsupported,
    Variant,
    counted_labels,
    make_variant,
    variant_names,
)
from flexvarlen.measure import (
    Timing,
    environment,
    memory_meaning,
    peak_memory_mib,
    time_interleaved,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Progress = Callable[[int, int, str], None]
"""Called with the steps done, all steps, and what is being done."""

TIMING_BUDGET_S = 3.0  # a variant
FEWEST_REPEATS, MOST_REPEATS = 3, 20

# Dynamo gives up on a function after 8 compilations; all variants share the model's functions.
RECOMPILE_LIMIT = 256


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
    """Compare backends on one model and one packed row, with each document alone as the truth.

    The model is not changed, whether it is patched or not; its device is where all runs.

    Args:
        model: a transformers model of a verified family, with a head for causal language modelling.
        batch: a forward's keyword arguments (boundaries found by the contract of `patch_model`;
            labels are not used), or a `PackedBatch`. Default: real text, packed to `tokens`.
        backends: "all" (flexvarlen's, and transformers' own for contrast), or names.
        dtype: to compare in; default: the model's.
        train: forward and backward; else the forward alone, under `no_grad`.
        compile: under torch.compile (inductor; graph breaks allowed, and counted; cold caches).
        tokens: of the default batch; default 1,024 on the CPU, 8,192 on CUDA.
        seed: of everything random.
        packings: other packings of the same tokens, over which recompilations are counted.
        name: the model's, for the report.
        progress: see `Progress`.

    Returns:
        One row for each document alone (the peer), then one a backend, usable or not.

    Raises:
        ValueError: an unknown backend, a batch that breaks the contract, or no room for the oracle.
        NotImplementedError: the model type is not verified.
    """
    from flexvarlen.patches import unpatch_model
    from flexvarlen.patches.models.families import require_verified

    require_verified(model.config.model_type)
    names = variant_names(backends, model.device)
    base = unpatch_model(own_parameters(model, model.dtype if dtype is None else dtype))
    packed = batch_of(base, batch, tokens=tokens, seed=seed)
    label = name or str(model.config.name_or_path or model.config.model_type)
    row = Row(
        model=label,
        backend=PEER,
        role="peer",
        status="ok",
        reason=None,
        dtype=str(base.dtype).removeprefix("torch."),
        device=base.device.type,
        passes="forward+backward" if train else "forward",
        compiled=compile,
        tokens=packed.total_tokens,
        documents=len(packed.lengths),
        longest_document=max(packed.lengths),
        seed=seed,
        source=packed.source,
        oracle="",
        environment=environment(base.device),
    )
    with _many_recompilations(compile):
        return _Comparison(base, packed, row, packings, progress).report(names)


@contextmanager
def _many_recompilations(compile: bool) -> Iterator[None]:
    if not compile:
        yield
        return
    import torch._dynamo

    with torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT):  # type: ignore[attr-defined]
        yield


class _Comparison:
    """The shared state of one comparison."""

    def __init__(
        self,
        base: PreTrainedModel,
        batch: PackedBatch,
        row: Row,
        packings: int,
        progress: Progress | None,
    ) -> None:
        self.base, self.batch, self.row, self.progress = base, batch, row, progress
        self.train, self.compile, self.seed = row.passes != "forward", row.compiled, row.seed
        self.sizes = sizes = Sizes.of(batch)
        self.others = [
            recut(batch, self.seed + i, capacity=sizes.capacity, longest=sizes.max_seqlen_bound)
            for i in range(packings)
        ]
        self.done, self.total = 0, 1

    def report(self, names: Sequence[str]) -> Report:
        """All rows, in order."""
        rows: dict[str, Row] = {}
        variants = self._make(names, rows)
        self._say("each document alone, in fp64")
        checks = self._checks()
        self.row = replace(self.row, oracle=checks.truth.description)
        rows = {name: replace(row, oracle=self.row.oracle) for name, row in rows.items()}
        checked: dict[str, Checked] = {}
        for name, variant in variants.items():
            found = self._check(variant, checks)
            if isinstance(found, Row):
                rows[name] = found
            else:
                checked[name] = found
        truth = checks.truth.without_tensors()
        del checks  # its fp64 tensors would count into everybody's peak memory
        timings = self._time({name: variants[name] for name in checked}, checked, truth)
        for name, done in checked.items():
            rows[name] = self._finish(variants[name], done, timings[name])
        self._did(self.total - self.done)
        peer = self._peer_row(truth, timings.get(PEER))
        return Report((peer, *(rows[name] for name in names)))

    def _make(self, names: Sequence[str], rows: dict[str, Row]) -> dict[str, Variant]:
        """The variants that can run; rows of those that cannot go to `rows`."""
        variants: dict[str, Variant] = {}
        for name in names:
            try:
                variants[name] = make_variant(
                    name, self.base, self.sizes, train=self.train, compile=self.compile
                )
            except Unsupported as error:
                rows[name] = self._row_of(name, status="unsupported", reason=str(error))
        each = 3 + len(halves(len(self.batch.lengths))) + FEWEST_REPEATS
        self.total = 2 + FEWEST_REPEATS + each * len(variants)
        return variants

    def _checks(self) -> Checks:
        truth = Truth.of(self.base, self.batch, train=self.train, seed=self.seed)
        self._did()
        last = None
        if self.others:
            last = Truth.of(self.base, self.others[-1], train=False, seed=self.seed)
        self._did()
        return Checks(truth, self.others, last, self.base.dtype, self.compile, self.seed)

    def _check(self, variant: Variant, checks: Checks) -> Checked | Row:
        """What the checks found; the variant's row if it broke."""
        try:
            return check_variant(variant, checks, self._say, self._did)
        except NotImplementedError as error:
            return self._row_of(variant.name, status="unsupported", reason=_one_line(error))
        except torch.OutOfMemoryError as error:
            return self._row_of(variant.name, status="oom", reason=_one_line(error))
        except RuntimeError as error:  # what kernels and compilers raise: a finding, not a crash
            return self._row_of(variant.name, status="failed", reason=_one_line(error))
        finally:
            clean(self.base)

    def _time(
        self, variants: Mapping[str, Variant], checked: Mapping[str, Checked], truth: Truth
    ) -> dict[str, Timing]:
        """Time the variants, and each document alone where the oracle covers them all."""
        steps = {name: self._step_of(variant) for name, variant in variants.items()}
        seconds = {name: done.step_s for name, done in checked.items()}
        if truth.whole:
            steps[PEER] = self._peer_step(truth)
            begin = time.perf_counter()
            steps[PEER]()
            seconds[PEER] = time.perf_counter() - begin
        repeats = {
            name: min(MOST_REPEATS, max(FEWEST_REPEATS, int(TIMING_BUDGET_S / took)))
            for name, took in seconds.items()
        }
        left = dict.fromkeys(steps, FEWEST_REPEATS)

        def progress(name: str) -> None:
            if left[name]:
                left[name] -= 1
                self._did()
            self._say("speed of all, in turns")

        timings = time_interleaved(
            steps,
            device=self.base.device,
            warmup=1,
            repeats=repeats,
            flush_l2=False,  # a model's step evicts it by itself
            progress=progress,
        )
        clean(self.base)
        return timings

    def _step_of(self, variant: Variant) -> Callable[[], object]:
        labels = self.batch.labels()
        counted = counted_labels(labels)

        def step() -> None:
            variant.step(self.batch, labels, counted)

        return step

    def _peer_step(self, truth: Truth) -> Callable[[], object]:
        model = peer_model(self.base)

        def step() -> None:
            alone(model, self.batch, truth.oracle.documents, train=self.train)

        return step

    # ---- rows ----

    def _peer_row(self, truth: Truth, timing: Timing | None) -> Row:
        row = replace(self.row, compiled=False, **error_measures(truth.peer))
        if timing is None:
            return replace(
                row, reason="not timed: some documents are too long for eager attention."
            )
        return replace(row, **self._speed(timing))

    def _finish(self, variant: Variant, checked: Checked, timing: Timing) -> Row:
        self._say(f"{variant.name}: memory")
        clean(self.base)
        peak = peak_memory_mib(self._step_of(variant), self.base.device)
        self._did()
        reason = variant.why_no_backward
        return self._row_of(
            variant.name,
            status="ok" if reason is None else "forward only",
            reason=reason,
            passes="forward+backward" if variant.train else "forward",
            peak_mib=peak,
            peak_meaning=memory_meaning(self.base.device),
            **checked.measures,
            **self._speed(timing),
        )

    def _speed(self, timing: Timing) -> dict[str, Any]:
        return {
            "tokens_per_s": self.batch.total_tokens / timing.ms_p50 * 1e3,
            "ms_p20": timing.ms_p20,
            "ms_p50": timing.ms_p50,
            "ms_p80": timing.ms_p80,
            "repeats": timing.repeats,
        }

    def _row_of(self, name: str, **measures: Any) -> Row:
        role: Role = "transformers" if name.startswith(THEIRS) else "flexvarlen"
        return replace(self.row, backend=name, role=role, **measures)

    # ---- progress ----

    def _say(self, what: str) -> None:
        if self.progress is not None:
            self.progress(self.done, self.total, what)

    def _did(self, steps: int = 1) -> None:
        self.done = min(self.done + steps, self.total)
        if self.progress is not None:
            self.progress(self.done, self.total, "")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
