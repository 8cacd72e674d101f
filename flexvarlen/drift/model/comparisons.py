"""`model_drift`: how far a model's outputs and gradients move when one thing alone changes.

| comparison | found | truth |
|---|---|---|
| packed-alone | the packed row | each document in a row of its own |
| packed-padded | the packed row | one document a row, padded |
| backend-backend | the packed row | the same on another backend |
| eager-compiled | the packed row, compiled | the same, eager |
| dtype | the packed row in low precision | the same, of the same weights, in float32 |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack

import torch

from flexvarlen.drift.model.measures import run_measures, why_not_finite
from flexvarlen.drift.model.run import ModelRun, compiled, run_alone, run_packed, run_padded
from flexvarlen.drift.model.setting import (
    BASELINE,
    LEAN_COMPILED,
    LEAN_LEFT_OUT,
    Broken,
    ModelSetting,
    Progress,
    Shared,
    caught,
    is_lean,
    left_out,
)
from flexvarlen.equivalence.batch import PackedBatch
from flexvarlen.equivalence.truth import clean
from flexvarlen.equivalence.variants import Unsupported, Variant, variant_names
from flexvarlen.rows import Row, Status

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SUITE = "drift-model"

COMPARISONS = ("packed-alone", "packed-padded", "backend-backend", "eager-compiled", "dtype")

# On the CPU inductor's C++ compiler alone takes a minute a model.
DEFAULT_COMPILERS = {"cpu": "aot_eager", "cuda": "inductor"}


def model_drift(
    model: PreTrainedModel,
    batch: PackedBatch | Mapping[str, Any] | None = None,
    backends: str | Sequence[str] = "all",
    *,
    comparisons: str | Sequence[str] = "all",
    baseline: str | None = None,
    compiler: str | None = None,
    lean: bool | None = None,
    append: Callable[[Row], None] | None = None,
    progress: Progress | None = None,
    **shared: Unpack[Shared],
) -> list[Row]:
    """Run a model in pairs of ways that ought to agree, and measure how far they do.

    The model is not changed, whether it is patched or not; its device is where all runs.

    Args:
        model: a transformers model of a verified family, with a head for causal language modelling.
        batch: a forward's keyword arguments (boundaries found by the contract of `patch_model`;
            labels are not used), or a `PackedBatch`. Default: real text, packed to `tokens`.
        backends: "all" (flexvarlen's, and transformers' own for contrast), or names; also
            "transformers:sdpa" and such.
        comparisons: "all", or names of `COMPARISONS`.
        baseline: the backend of the truth in "backend-backend"; default `sdpa`.
        compiler: torch.compile's backend; default "inductor", on the CPU "aot_eager".
        lean: leave out what compiles long; default: where `backends` is "all", on the CPU. To be
            said where `backends` are names that remain of "all".
        append: called with each row as it is made.
        progress: see `Progress`.
        **shared: dtype, train, tokens, seed, name, commit; see `Shared`.

    Returns:
        For each comparison of each backend one row of the batch, one a document, one a layer; or
        one that says why there are none.

    Raises:
        ValueError: an unknown backend or comparison, or a batch that breaks the contract.
        NotImplementedError: the model type is not verified.
        DeviceLostError: a backend broke the device, after its row.

    At most two runs' logits and hidden states are held at once. In "dtype" a model in float32 runs
    in bfloat16, and the truth is of its weights so rounded: they differ by arithmetic alone. Where
    a backend has no float32, the truth is that of `sdpa`.
    """
    names = variant_names(backends, model.device)
    wanted = comparison_names(comparisons)
    setting = ModelSetting.of(model, batch, **shared)
    run = _ModelDrift(
        setting,
        wanted,
        variant_names([baseline or BASELINE], model.device)[0],
        compiler or DEFAULT_COMPILERS.get(model.device.type, "inductor"),
        append,
        progress,
        total=len(names) * len(wanted),
        lean=is_lean(backends, model.device) if lean is None else lean,
    )
    for backend in names:
        run.compare(backend)
    return run.rows


def comparison_names(comparisons: str | Sequence[str]) -> list[str]:
    """Those asked for, in the order in which they run.

    Raises:
        ValueError: an unknown one.
    """
    asked = comparisons.split(",") if isinstance(comparisons, str) else list(comparisons)
    asked = list(COMPARISONS) if asked == ["all"] else [name.strip() for name in asked]
    for name in asked:
        if name not in COMPARISONS:
            raise ValueError(
                f"comparisons must be all, or of {', '.join(COMPARISONS)}, got {name!r}; choose "
                "among these."
            )
    return [name for name in COMPARISONS if name in asked]


class _ModelDrift:
    """One call of `model_drift`: its rows so far, and how each comparison is run."""

    def __init__(
        self,
        setting: ModelSetting,
        comparisons: Sequence[str],
        baseline: str,
        compiler: str,
        append: Callable[[Row], None] | None,
        progress: Progress | None,
        total: int,
        lean: bool,
    ) -> None:
        self.setting, self.comparisons, self.lean = setting, comparisons, lean
        self.baseline, self.compiler = baseline, compiler
        self.append, self.progress = append, progress
        self.done, self.total = 0, total
        self.rows: list[Row] = []

    def compare(self, backend: str) -> None:
        """All comparisons of one backend; its own packed run is made once."""
        if self.lean and backend in LEAN_LEFT_OUT:
            for comparison in self.comparisons:
                self._refuse(backend, comparison, Broken("skipped", left_out(backend)))
            self.done += len(self.comparisons)
            return
        packed: ModelRun | None = None
        variant: Variant | None = None
        broken: list[Broken] = []
        self._say(f"{backend}: the packed row")
        device = self.setting.base.device
        with caught(broken, device):
            variant = self.setting.variant(backend)
            if set(self.comparisons) - {"dtype"} or not self._is_wide:
                packed = run_packed(variant, self.setting.batch)
        for comparison in self.comparisons:
            self._say(f"{backend}: {comparison}")
            if comparison == "dtype" and self._is_wide:
                packed = None  # it makes two runs of its own
            if broken or variant is None:
                self._refuse(backend, comparison, broken[0])
            elif self.lean and comparison == "eager-compiled" and backend not in LEAN_COMPILED:
                self._refuse(backend, comparison, Broken("skipped", left_out(backend)))
            else:
                own: list[Broken] = []
                rows: list[Row] = []
                with caught(own, device):
                    rows = self._compare(comparison, variant, packed)
                for row in rows:
                    self._append(row)
                if own:
                    self._refuse(backend, comparison, own[0])
            clean(self.setting.base)
            self.done += 1
        self._say("")

    @property
    def _is_wide(self) -> bool:
        return bool(self.setting.base.dtype.itemsize >= 4)

    def _compare(self, comparison: str, variant: Variant, packed: ModelRun | None) -> list[Row]:
        """The rows of one comparison; `packed` is there but for "dtype" of a wide model."""
        backend, batch = variant.name, self.setting.batch
        if comparison == "dtype":
            return self._compare_dtypes(variant, packed)
        assert packed is not None
        other = None
        if comparison == "packed-alone":
            found, truth = packed, run_alone(variant, batch)
        elif comparison == "packed-padded":
            found, truth = packed, run_padded(variant, batch)
        elif comparison == "backend-backend":
            other = self.baseline
            found, truth = packed, run_packed(self.setting.variant(other), batch)
        else:
            again = self.setting.variant(backend)
            with compiled(again.model, self.compiler) as call:
                found, truth = run_packed(again, batch, call=call), packed
        return self._rows_of(self.setting, comparison, variant, found, truth, other=other)

    def _compare_dtypes(self, variant: Variant, packed: ModelRun | None) -> list[Row]:
        """In low precision against float32, both of weights that low precision holds."""
        low = self.setting.in_dtype(torch.bfloat16) if self._is_wide else self.setting
        if packed is None:
            variant = low.variant(variant.name)
            packed = run_packed(variant, low.batch)
        wide = low.in_dtype(torch.float32)
        try:
            truth_variant = wide.variant(variant.name)
        except Unsupported:
            truth_variant = wide.variant(BASELINE)
        truth = run_packed(truth_variant, wide.batch)
        other = truth_variant.name if truth_variant.name != variant.name else None
        return self._rows_of(
            low, "dtype", variant, packed, truth, other=other, other_dtype="float32"
        )

    def _case(
        self,
        setting: ModelSetting,
        comparison: str,
        backend: str,
        scope: str = "batch",
        index: int | None = None,
        other: str | None = None,
        other_dtype: str | None = None,
    ) -> dict[str, Any]:
        return setting.case(
            comparison=comparison,
            backend=backend,
            other=other,
            other_dtype=other_dtype,
            scope=scope,
            index=index,
        )

    def _rows_of(
        self,
        setting: ModelSetting,
        comparison: str,
        variant: Variant,
        found: ModelRun,
        truth: ModelRun,
        **others: str | None,
    ) -> list[Row]:
        """Of two runs; "wrong" is the batch's where either is not finite."""
        reason = why_not_finite(found, truth)
        rows = []
        for scope, index, measures in run_measures(found, truth, setting.batch):
            if scope == "batch":
                measures["longest_document"] = max(setting.batch.lengths)
                measures["source"] = setting.batch.source
                measures["compiler"] = self.compiler if comparison == "eager-compiled" else None
                if variant.why_no_backward is not None:
                    measures["why_no_gradients"] = variant.why_no_backward
            case = self._case(setting, comparison, variant.name, scope, index, **others)
            why = reason if scope == "batch" else None
            status: Status = "wrong" if why else "ok"
            rows.append(Row(SUITE, case, status, why, measures, setting.environment))
        return rows

    def _refuse(self, backend: str, comparison: str, broken: Broken) -> None:
        other = self.baseline if comparison == "backend-backend" else None
        other_dtype = "float32" if comparison == "dtype" else None
        case = self._case(self.setting, comparison, backend, other=other, other_dtype=other_dtype)
        environment = self.setting.environment
        self._append(Row(SUITE, case, broken.status, broken.reason, broken.measures, environment))
        broken.end_if_lost(f"{backend}, {comparison}, of {self.setting.label}")

    def _append(self, row: Row) -> None:
        self.rows.append(row)
        if self.append is not None:
            self.append(row)

    def _say(self, what: str) -> None:
        if self.progress is not None:
            self.progress(self.done, self.total, what)
