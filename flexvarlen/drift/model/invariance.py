"""A whole model batch invariant, and the proof: packed and alone, bit for bit, backward included.

Attention by the backend's own promise (`patch_model(..., batch_invariant=True,
deterministic=True)`), linear layers, norms and embeddings in fixed shapes. All else is elementwise,
or works on one token. A parameter's gradient sums over documents, so what can be equal is each
document's own: the backward of its loss alone through the packed row, where the other documents'
cotangents are zero. The sum over documents then depends on their order only.

Shapes: N documents.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

import flexvarlen as fv
from flexvarlen.attention.backends.registry import refusal
from flexvarlen.drift.difference import Difference
from flexvarlen.drift.model.fixed_shapes import fixed_shapes
from flexvarlen.drift.model.measures import gradient_measures, why_not_finite
from flexvarlen.drift.model.run import (
    ModelRun,
    alone_batch,
    document_losses,
    run_alone,
    run_packed,
    targets_of,
)
from flexvarlen.drift.model.setting import ModelSetting
from flexvarlen.equivalence.batch import PackedBatch
from flexvarlen.equivalence.truth import clean
from flexvarlen.equivalence.variants import Unsupported, Variant


def invariant_variant(setting: ModelSetting, backend: str) -> Variant:
    """A backend under both promises; forward alone where it has only that.

    Raises:
        Unsupported: it cannot, and why.
    """
    variant = setting.variant(backend)
    if variant.train:
        reason = why_not_invariant(variant, needs_grad=True)
        if reason is not None:
            variant = replace(variant, train=False, why_no_backward=reason)
    reason = why_not_invariant(variant, needs_grad=False)
    if reason is not None:
        raise Unsupported(reason)
    variant.model.train(variant.train)
    fv.patch_model(variant.model, backend, deterministic=True, batch_invariant=True)
    return variant


def why_not_invariant(variant: Variant, *, needs_grad: bool) -> str | None:
    """Why a variant's backend cannot be batch invariant and deterministic on its model, or None."""
    from flexvarlen.patches.models.layers import kinds_of

    guarantees: Any = {"deterministic": True, "batch_invariant": True}
    for kind in kinds_of(variant.model):
        model = variant.model
        call = kind.call(model.device, model.dtype, needs_grad=needs_grad, **guarantees)
        reason = refusal(variant.name, call)
        if reason is not None:
            return reason
    return None


def invariance(setting: ModelSetting, variant: Variant, piece: int, sample: int) -> dict[str, Any]:
    """What packed and alone differ by, both batch invariant: all zeros if the promises hold.

    Args:
        setting: the documents.
        variant: of `invariant_variant`.
        piece: tokens of a piece.
        sample: so many documents' own gradients are compared.

    Returns:
        As `differences`; "equal_logits", "equal_hidden" (of the worst block) and "equal_gradients":
        shares of elements that are bit-equal; "any_hidden_max_abs": over all blocks;
        "document_gradients_*": as `Difference.measures`.
    """
    batch = setting.batch
    with fixed_shapes(variant.model, batch.lengths, piece):
        run = run_packed(variant, batch)
    alone = _alone_runs(variant, batch, piece)
    hidden = [Difference.between(*two) for two in zip(run.hidden, alone.hidden, strict=True)]
    found = differences(run, alone, variant)
    found |= {
        "equal_logits": found["logits_equal"],
        "equal_hidden": min(layer.equal for layer in hidden),
        "any_hidden_max_abs": largest([layer.max_abs for layer in hidden]),
        "piece_tokens": piece,
    }
    del run, alone
    if variant.train:
        clean(setting.base)
        everything = range(len(batch.lengths))
        chosen = random.Random(setting.seed).sample(everything, min(sample, len(everything)))
        gradients = _own_gradients(variant, batch, sorted(chosen), piece)
        found |= gradients.measures("document_gradients")
        found |= {"equal_gradients": gradients.equal, "gradient_documents": sorted(chosen)}
    return found


def differences(run: ModelRun, truth: ModelRun, variant: Variant) -> dict[str, Any]:
    """Logits, the last block's hidden states, and the gradients if both have them.

    "why_wrong" is there where either is not finite.
    """
    found = Difference.between(run.logits, truth.logits).measures("logits")
    found |= Difference.between(run.hidden[-1], truth.hidden[-1]).measures("hidden")
    if run.gradients is not None and truth.gradients is not None:
        found |= gradient_measures(run.gradients, truth.gradients)
    if variant.why_no_backward is not None:
        found["why_no_gradients"] = variant.why_no_backward
    reason = why_not_finite(run, truth)
    if reason is not None:
        found["why_wrong"] = reason
    return found


def why_not_equal(measures: Mapping[str, Any], documents: int) -> str | None:
    """What differs that must be equal bit for bit, and by how much; or None.

    Args:
        measures: of `invariance`, or of `differences` of a run that is documents alone.
        documents: how many the batch has.
    """
    parts: list[tuple[str, str, str]]
    if "equal_logits" in measures:
        chosen = len(measures.get("gradient_documents", ()))
        own = f"own gradients of {chosen} of {documents} documents"
        parts = [
            ("logits", "equal_logits", "logits_max_abs"),
            ("hidden states", "equal_hidden", "any_hidden_max_abs"),
            (own, "equal_gradients", "document_gradients_max_abs"),
        ]
    else:
        parts = [
            ("logits", "logits_equal", "logits_max_abs"),
            ("the last block's hidden states", "hidden_equal", "hidden_max_abs"),
        ]
    apart = [
        f"{name} differ in {100 * (1 - measures[equal]):.3g}% of their elements, by at most "
        f"{measures[size]:.1e}"
        for name, equal, size in parts
        if measures.get(equal, 1) != 1
    ]
    return f"packed and alone must have the same bits: {'; '.join(apart)}." if apart else None


def largest(sizes: Sequence[float]) -> float:
    """The largest; NaN is larger than any."""
    return max(sizes, key=lambda size: math.inf if math.isnan(size) else size)


def _own_gradients(
    variant: Variant, batch: PackedBatch, documents: Sequence[int], piece: int
) -> Difference:
    """Each document's own gradient in the packed row against that of the document alone."""
    with fixed_shapes(variant.model, batch.lengths, piece):
        losses = _losses(variant, batch)
    parts = []
    for document in documents:
        found = _gradient(variant, losses[document], keep=True)
        single = alone_batch(batch, document)
        with fixed_shapes(variant.model, single.lengths, piece):
            truth = _gradient(variant, _losses(variant, single)[0], keep=False)
        parts.append(Difference.over(zip(found, truth, strict=True)))
    return _joined(parts)


def _alone_runs(variant: Variant, batch: PackedBatch, piece: int) -> ModelRun:
    """Each document alone in fixed shapes, put in the order of the row."""
    runs = []
    for document in range(len(batch.lengths)):
        single = alone_batch(batch, document)
        with fixed_shapes(variant.model, single.lengths, piece):
            runs.append(run_alone(replace(variant, train=False), single))
    states = zip(*(run.hidden for run in runs), strict=True)
    hidden = tuple(torch.cat(state) for state in states)
    return ModelRun(torch.cat([run.logits for run in runs]), hidden, 0.0)


def _losses(variant: Variant, batch: PackedBatch) -> Tensor:
    """`[N]`, with their graph."""
    inputs = {"input_ids": batch.input_ids, **variant.boundaries(batch)}
    logits = variant.model(**inputs).logits[0]
    return document_losses(logits, targets_of(batch), batch.lengths)


def _gradient(variant: Variant, loss: Tensor, *, keep: bool) -> list[Tensor]:
    parameters = [p for p in variant.model.parameters() if p.requires_grad]
    found = torch.autograd.grad(loss, parameters, retain_graph=keep, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for g, p in zip(found, parameters, strict=True)]


def _joined(parts: Sequence[Difference]) -> Difference:
    """Of several, never held at once: the largest of the maxima, the mean of all else."""
    elements = sum(part.elements for part in parts)

    def joined(name: str) -> float:
        own = [getattr(part, name) for part in parts]
        if name.startswith("max_"):
            return largest(own)
        weighted = (value * part.elements for value, part in zip(own, parts, strict=True))
        return float(sum(weighted) / max(1, elements))

    names = [field.name for field in fields(Difference) if field.name != "elements"]
    return Difference(**{name: joined(name) for name in names}, elements=elements)
