"""Suite "drift-model": how far a model's outputs and gradients move when one thing alone changes.

| comparison | of what |
|---|---|
| packed-alone | the packed row, against each document in a row of its own |
| packed-padded | the packed row, against one document per row, padded |
| backend-backend | the packed row, against the same on `sdpa` |
| eager-compiled | the packed row compiled, against eager |
| dtype | the packed row in low precision, against float32 with the same weights |

In a row of trees, samples take the place of documents. Both runs of a comparison are checked
against each document alone in fp64, by the acceptance rule: a run that differs more than rounding
is "wrong".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from flexvarlen.reference.model import own_parameters, without_router_loss
from flexvarlen.report.records import Record
from flexvarlen.runner.each import measure_each
from flexvarlen.runner.failures import Unsupported
from flexvarlen.runner.run import records_of
from flexvarlen.runner.suite import Finding, Findings, GivenCases, Options, checked_names
from flexvarlen.verify.compare.accuracy import describe, is_whole, reference_of
from flexvarlen.verify.compare.differences import run_measures, why_not_finite
from flexvarlen.verify.compare.model_run import ModelRun, run_model
from flexvarlen.verify.corpus import row_of
from flexvarlen.verify.experiment.alone import Alone
from flexvarlen.verify.experiment.batch import PackedBatch
from flexvarlen.verify.experiment.measure import LIMITS
from flexvarlen.verify.experiment.tree_batch import Row
from flexvarlen.verify.experiment.variant import Sizes, Variant, make_variant, variant_names

if TYPE_CHECKING:
    from transformers import PreTrainedModel

COMPARISONS = ("packed-alone", "packed-padded", "backend-backend", "eager-compiled", "dtype")
BASELINE = "sdpa"
"""The backend that "backend-backend" compares with: it runs and differentiates anywhere."""

Load = Callable[[], "tuple[PreTrainedModel, Row]"]


@dataclass(frozen=True)
class ModelCase:
    """One comparison of one model on one packed row.

    Attributes:
        model: its name in records.
        dtype: e.g. "bfloat16".
        tokens: number of tokens of the row.
        comparison: one of `COMPARISONS`.
        train: whether gradients are compared.
        seed: random seed of weights and documents.
        load: returns the model, which is not changed, and the row, on the model's device.
        text: the checksum of the caller's files; 0 for Python's help topics, or a batch.
    """

    model: str
    dtype: str
    tokens: int
    comparison: str
    train: bool
    seed: int
    load: Load = field(compare=False, repr=False)
    text: int = 0

    @property
    def name(self) -> str:
        """The name in the progress bar."""
        return f"{self.model} {self.dtype} {self.comparison}"

    def data(self) -> dict[str, Any]:
        """The case as data of a record."""
        fields = ("model", "dtype", "tokens", "seed", "train", "comparison")
        data = {name: getattr(self, name) for name in fields}
        data["other"] = BASELINE if self.comparison == "backend-backend" else None
        return data | ({"text_crc32": self.text} if self.text else {})


class ModelDrift(GivenCases[ModelCase]):
    """Models, each in each comparison."""

    name: ClassVar[str] = "drift-model"

    def variants(self, case: ModelCase, options: Options) -> Sequence[str]:
        """All backends, and transformers' own; on the CPU few of those that compile."""
        if options.on_gpu:
            return variant_names("all", options.device)
        if case.comparison == "eager-compiled":
            return [BASELINE]
        return [name for name in variant_names("all", options.device) if name != "flex"]

    def measure(self, case: ModelCase, variants: Sequence[str], options: Options) -> Findings:
        """The comparison on each backend. At most two runs' logits are held at once."""
        from flexvarlen.patches import unpatch_model

        model, row = case.load()
        dtype = model.dtype
        if case.comparison == "dtype" and dtype.itemsize >= 4:
            dtype = torch.bfloat16
        base = without_router_loss(unpatch_model(own_parameters(model, dtype)))
        reference = reference_of(base, row, train=case.train, seed=case.seed).of_samples()

        def compare(backend: str) -> Finding:
            try:
                found, other, about = _runs(case, base, row, backend, options.compiler)
            finally:
                base.zero_grad(set_to_none=True)
            measures = run_measures(found, other, row) | about
            measures |= {"documents": len(row.samples.lengths), "source": row.source}
            measures["reference"] = describe(reference)
            reason = why_not_finite(found, other) or _why_wrong(reference, found, other)
            return Finding(backend, "wrong" if reason else "ok", reason, measures)

        return measure_each(case.name, variants, compare, options.device)


def _runs(
    case: ModelCase, base: PreTrainedModel, row: Row, backend: str, compiler: str
) -> tuple[ModelRun, ModelRun, dict[str, Any]]:
    """The two runs of a comparison, and what their record says about them.

    Of dtypes these are bfloat16 (or the model's half precision) and float32 with the same rounded
    weights; if a backend does not support float32, the other run uses `sdpa`.

    Args:
        base: unpatched, with separate gradients.
    """

    def variant(name: str, model: PreTrainedModel = base) -> Variant:
        return make_variant(name, model, Sizes.of(row), train=case.train, or_forward=True)

    own = variant(backend)
    packed = run_model(own, row)
    about: dict[str, Any] = {}
    if own.why_no_backward:
        about["why_no_gradients"] = own.why_no_backward
    if case.comparison == "packed-alone":
        return packed, run_model(own, row, "serial"), about
    if case.comparison == "packed-padded":
        return packed, run_model(own, row, "padded"), about
    if case.comparison == "backend-backend":
        return packed, run_model(variant(BASELINE), row), about
    if case.comparison == "eager-compiled":
        compiled = variant(backend).compiled(compiler, fullgraph=False)
        with torch._dynamo.config.patch(LIMITS):
            return run_model(compiled, row), packed, about | {"compiler": compiler}
    wide = own_parameters(base, torch.float32)
    try:
        other = variant(backend, wide)
    except Unsupported:
        other = variant(BASELINE, wide)
    about |= {"other_backend": other.name, "other_dtype": "float32"}
    return packed, run_model(other, row), about


def _why_wrong(reference: Alone, found: ModelRun, other: ModelRun) -> str | None:
    """Apply the acceptance rule; to loss and gradients only if all documents are checked."""
    for run, who in ((found, ""), (other, "what it is compared with: ")):
        whole = (run.loss, run.gradients) if is_whole(reference) else ()
        reason = reference.why_wrong(reference.errors(run.logits, *whole))
        if reason is not None:
            return f"{who}{reason}"
    return None


def model_drift(
    model: PreTrainedModel,
    batch: PackedBatch | Mapping[str, Any] | None = None,
    backends: str | Sequence[str] = "all",
    *,
    comparisons: Sequence[str] = ("all",),
    tokens: int | None = None,
    train: bool = True,
    seed: int = 0,
) -> list[Record]:
    """Run a model in pairs of ways that should agree, and measure how far they do.

    The model is not changed, whether it is patched or not; everything runs on its device.

    Args:
        model, batch, tokens: as in `compare`. Of trees, each sample runs alone or padded.
        backends: "all" (flexvarlen's, and transformers' own for contrast), or names; also
            "transformers:sdpa" and similar. On the CPU "all" excludes backends that compile long.
        comparisons: names in `COMPARISONS`, or "all".
        train: whether gradients are compared.
        seed: random seed of the default batch's packing.

    Returns:
        A record for each comparison and backend.

    Raises:
        ValueError: a backend or comparison is unknown, or the batch breaks the contract.
        NotImplementedError: the model type is not verified, or the batch has images.
        DeviceLost: a kernel broke the device.
    """
    from flexvarlen.patches.models.verified import require_verified

    require_verified(model.config.model_type)
    names = variant_names(backends, model.device)
    chosen = None if backends in ("all", ["all"], ("all",)) else tuple(names)
    row = row_of(model, batch, tokens=tokens, seed=seed)
    if row.images.columns:
        raise NotImplementedError(
            "model_drift supports documents of text alone, got images; remove them, or check the "
            "batch with fv.compare."
        )
    cases = cases_of(
        comparisons,
        model=str(model.config.name_or_path or model.config.model_type),
        dtype=str(model.dtype).removeprefix("torch."),
        tokens=row.total_tokens,
        train=train,
        seed=seed,
        load=lambda: (model, row),
    )
    return records_of(ModelDrift(cases), Options(model.device, variants=chosen))


def cases_of(comparisons: Sequence[str], **shared: Any) -> list[ModelCase]:
    """A case for each comparison (of `COMPARISONS`, or "all"), with these other fields.

    Raises:
        ValueError: a comparison is unknown.
    """
    names = checked_names("comparisons", comparisons, COMPARISONS)
    return [ModelCase(comparison=name, **shared) for name in names]
