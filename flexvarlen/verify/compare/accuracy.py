"""The reference of a comparison: which documents have room, and their errors as measures.

In a row of trees, samples take the place of documents.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import torch

from flexvarlen.reference.acceptance import allowed, largest
from flexvarlen.reference.model import baseline_model
from flexvarlen.report.table import nan_last
from flexvarlen.verify.experiment.alone import Alone, Errors
from flexvarlen.verify.experiment.batch import PackedBatch
from flexvarlen.verify.experiment.tree_batch import Row

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Attention matrices that the reference's autograd keeps a layer: scores, probabilities, a spare.
KEPT_MATRICES = 3
REFERENCE_MEMORY_SHARE = 1 / 3  # of what is free
REFERENCE_TOKENS = 8192  # on a GPU: fp64 is slow there


def reference_of(base: PreTrainedModel, row: Row, *, train: bool, seed: int) -> Alone:
    """The documents that fit, each alone; the baseline is eager attention.

    Raises:
        ValueError: there is not enough memory for the fp64 copy of `base`.
    """
    documents = sample_documents(base, row.samples, train=train, seed=seed)
    try:
        return Alone.of(
            base,
            row,
            outputs="logits",
            documents=documents,
            loss=(lambda model: row.loss_alone(model, documents)) if train else None,
            baseline=baseline_model,
            checkpoint=False,
        )
    except torch.OutOfMemoryError as error:
        raise ValueError(
            "there is not enough memory for an fp64 copy of the model (and, in training, fp64 "
            "gradients); use fewer layers (name@LAYERS) or only the forward."
        ) from error


def sample_documents(
    base: PreTrainedModel, batch: PackedBatch, *, train: bool, seed: int
) -> list[int]:
    """The documents of the reference: all on the CPU; a random choice that fits a GPU."""
    everything = list(range(len(batch.lengths)))
    if base.device.type != "cuda":
        return everything
    free, _ = torch.cuda.mem_get_info(base.device)
    config: Any = base.config.get_text_config()
    layers = config.num_hidden_layers if train else 1
    chosen: list[int] = []
    tokens = 0
    for document in random.Random(seed).sample(everything, len(everything)):
        length = batch.lengths[document]
        matrices = layers * KEPT_MATRICES * config.num_attention_heads * length * length
        logits = 3 * length * config.vocab_size
        fits = 8 * (matrices + logits) <= free * REFERENCE_MEMORY_SHARE
        if fits and tokens + length <= REFERENCE_TOKENS:
            chosen.append(document)
            tokens += length
    shortest = min(everything, key=lambda document: batch.lengths[document])
    return sorted(chosen) or [shortest]


def is_whole(reference: Alone) -> bool:
    """Whether the reference covers every document."""
    return len(reference.documents) == len(reference.row.samples.lengths)


def describe(reference: Alone) -> str:
    """Describe which documents the reference covers."""
    lengths = reference.row.samples.lengths
    text = f"{len(reference.documents)} of {len(lengths)} {reference.row.sample}s alone, fp64"
    if is_whole(reference):
        return text
    longest = max(lengths[document] for document in reference.documents)
    return f"{text} (a sample that fits; the longest of {longest:,} tokens)"


def error_measures(errors: Errors) -> dict[str, Any]:
    """The errors as measures of a record."""
    assert errors.outputs is not None
    found = {
        "logits_max": errors.outputs.max_abs,
        "logits_mean": errors.outputs.mean_abs,
        "argmax_agreement": errors.argmax,
    }
    if errors.loss is not None:
        found["loss_error"] = errors.loss.max_abs
    if errors.gradients:
        gradients = errors.gradients.values()
        found["gradient_max"] = largest([error.max_abs for error in gradients])
        found["gradient_mean"] = sum(x.mean_abs for x in gradients) / len(gradients)
    return found


def limit_measures(reference: Alone, errors: Errors) -> dict[str, Any]:
    """The limits of the rule, and the gradient nearest to its limit, as measures of a record."""
    assert reference.baseline.outputs is not None
    limits = allowed(reference.baseline.outputs, reference.dtype)
    found: dict[str, Any] = {"logits_limit": limits.max_abs}
    ratios = {
        name: allowed(reference.baseline.gradients[name], reference.dtype, gradient=True).ratio(x)
        for name, x in errors.gradients.items()
    }
    if ratios:
        nearest, worst = max(ratios.items(), key=lambda one: nan_last(one[1]))
        found |= {"worst_gradient": nearest, "worst_gradient_ratio": worst}
    return found
