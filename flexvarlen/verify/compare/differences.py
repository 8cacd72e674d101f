"""How far two runs of a model are apart: logits, log-probabilities, hidden states, gradients.

Shapes: T = tokens of all documents, n = tokens of some; V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flexvarlen.reference.attention import PIECE_ELEMENTS
from flexvarlen.reference.model import IGNORE_INDEX
from flexvarlen.report.table import nan_last
from flexvarlen.verify.compare.model_run import ModelRun, Targets
from flexvarlen.verify.experiment.difference import Difference
from flexvarlen.verify.experiment.tree_batch import Row


def run_measures(found: ModelRun, other: ModelRun, row: Row) -> dict[str, Any]:
    """All differences between two runs, as a record's measures.

    `layers_relative` lists the embeddings, then each block; `documents_relative` the logits of each
    document.

    Args:
        found, other: runs of the same documents, on one device.
        row: the documents, or for trees the samples.
    """
    layers = [Difference.between(*two) for two in zip(found.hidden, other.hidden, strict=True)]
    documents = [
        Difference.between(found.logits[start:end], other.logits[start:end])
        for start, end in row.samples.spans()
    ]
    logits = Difference.between(found.logits, other.logits)
    measures: dict[str, Any] = {
        **logits.measures("logits"),
        **token_measures(found.logits, other.logits, torch.cat(Targets.of(row).labels)),
        "loss": found.loss,
        "other_loss": other.loss,
        "loss_difference": found.loss - other.loss,
        **first_difference(layers, logits),
        "layers_relative": [layer.error.relative for layer in layers],
        "documents_relative": [document.error.relative for document in documents],
    }
    if found.gradients is not None and other.gradients is not None:
        measures |= gradient_measures(found.gradients, other.gradients)
    return measures


def why_not_finite(found: ModelRun, other: ModelRun) -> str | None:
    """A sentence about what is not finite in two runs, or None."""
    bad = []
    for who, run in (("the run", found), ("what it is compared with", other)):
        parts = {"logits": [run.logits], "hidden states": run.hidden}
        parts["gradients"] = list((run.gradients or {}).values())
        for name, tensors in parts.items():
            count = sum(int(x.numel() - x.isfinite().sum()) for x in tensors)
            if count:
                share = count / sum(x.numel() for x in tensors)
                bad.append(f"{100 * share:.3g}% of the {name} of {who}")
    return f"not finite: {', '.join(bad)}." if bad else None


def token_measures(found_TV: Tensor, other_TV: Tensor, targets_T: Tensor) -> dict[str, Any]:
    """KL divergence, agreement on the most likely token, and labels' log-probabilities.

    In at least fp32, some tokens at a time.

    Args:
        found_TV, other_TV: logits, on one device.
        targets_T: int64, labels; -100 without a label.
    """
    pieces = [x.split(max(1, PIECE_ELEMENTS // found_TV.shape[1])) for x in (found_TV, other_TV)]
    targets = targets_T.split(len(pieces[0][0]))
    each = [_of_tokens(*three) for three in zip(*pieces, targets, strict=True)]
    kl, logprob, same = (torch.cat(part).double() for part in zip(*each, strict=True))
    measures = {
        "kl_mean": kl.mean().item(),
        "kl_max": kl.max().item(),
        "top1": same.mean().item(),
    }
    moved = logprob[targets_T != IGNORE_INDEX].abs()
    if len(moved):
        measures |= {
            "logprob_mean_abs": moved.mean().item(),
            "logprob_p99": moved.quantile(0.99).item(),
            "logprob_max_abs": moved.max().item(),
        }
    return measures


def _of_tokens(found_nV: Tensor, other_nV: Tensor, targets_n: Tensor) -> tuple[Tensor, ...]:
    wide = torch.promote_types(torch.promote_types(found_nV.dtype, other_nV.dtype), torch.float32)
    found, other = (x.to(wide).log_softmax(-1) for x in (found_nV, other_nV))
    kl = (other.exp() * (other - found)).sum(-1)
    labels = targets_n.clamp(min=0)[:, None]
    logprob = (found.gather(1, labels) - other.gather(1, labels))[:, 0]
    return kl, logprob, found_nV.argmax(-1) == other_nV.argmax(-1)


def first_difference(layers: Sequence[Difference], logits: Difference) -> dict[str, Any]:
    """Where the runs differ first.

    Args:
        layers: differences of the embeddings, then of each block.
        logits: difference of the logits.

    Returns:
        "first_layer": the first block (-1: the embeddings) that is not bit-equal, or None;
        "first_part": the same in words, "head" where the logits alone differ.
    """
    for index, layer in enumerate(layers, -1):
        if layer.equal != 1:
            return {
                "first_layer": index,
                "first_part": "embeddings" if index < 0 else f"block {index}",
            }
    return {"first_layer": None, "first_part": None if logits.equal == 1 else "head"}


def gradient_measures(found: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> dict[str, Any]:
    """Relative difference of all parameters as one vector, and the worst parameter.

    Args:
        found, other: gradients by the parameters' names, on one device, of any dtypes.
    """
    whole = Difference.over((found[name], other[name]) for name in other)
    each = {name: Difference.between(found[name], other[name]).error.relative for name in other}
    name, worst = max(each.items(), key=lambda one: nan_last(one[1]))
    return {
        "gradient_relative": whole.error.relative,
        "worst_parameter": name if worst else None,
        "worst_parameter_relative": worst,
    }
