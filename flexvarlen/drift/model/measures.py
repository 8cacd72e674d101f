"""What two runs of a model differ by: logits, log-probabilities, hidden states, gradients.

Shapes: T tokens of all documents, n of some; V = vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flexvarlen.drift.difference import Difference, relative_norm
from flexvarlen.drift.model.run import ModelRun, targets_of
from flexvarlen.equivalence.batch import IGNORE_INDEX, PackedBatch

CHUNK_ELEMENTS = 2**26  # logits that are widened at once: 256 MiB in fp32, and a few such
TOP = 5
WORST = 10  # tokens named

BIN_EDGES = tuple(10.0 ** (k / 2) for k in range(-16, 5))
"""Of the histogram, above 0: two a decade from 1e-8, below the rounding of fp32, to 100."""

_PIECE = 1 << 24  # elements of a gradient that are widened to fp64 at once


@dataclass(frozen=True)
class TokenDrift:
    """Two runs, token by token.

    Attributes:
        logprob: `[T]`, label's log-probability found minus the true one; at tokens with a label.
        counted: bool `[T]`, tokens that have one.
        kl: `[T]`, of the found distribution from the true one.
        same_top1: bool `[T]`, whether the most likely token is the same.
        top5: `[T]`, share of the five most likely tokens that both have.
    """

    logprob: Tensor
    counted: Tensor
    kl: Tensor
    same_top1: Tensor
    top5: Tensor

    @classmethod
    def between(
        cls, found_TV: Tensor, truth_TV: Tensor, targets_T: Tensor, *, chunk: int | None = None
    ) -> TokenDrift:
        """In at least fp32, some tokens at a time.

        Args:
            found_TV, truth_TV: logits, on one device.
            targets_T: int64, labels; -100 where there is none.
            chunk: tokens at a time; default: as many as `CHUNK_ELEMENTS` hold.
        """
        chunk = chunk or max(1, CHUNK_ELEMENTS // found_TV.shape[1])
        parts = [
            _token_drift(*three)
            for three in zip(
                found_TV.split(chunk), truth_TV.split(chunk), targets_T.split(chunk), strict=True
            )
        ]
        logprob, kl, same_top1, top5 = (torch.cat(part) for part in zip(*parts, strict=True))
        return cls(logprob, targets_T != IGNORE_INDEX, kl, same_top1, top5)

    def of(self, tokens: slice) -> TokenDrift:
        """Of some tokens."""
        return TokenDrift(
            self.logprob[tokens],
            self.counted[tokens],
            self.kl[tokens],
            self.same_top1[tokens],
            self.top5[tokens],
        )

    def to(self, device: str) -> TokenDrift:
        """On another device: many documents are then read without waiting for a GPU each time."""
        return TokenDrift(
            self.logprob.to(device),
            self.counted.to(device),
            self.kl.to(device),
            self.same_top1.to(device),
            self.top5.to(device),
        )

    def measures(self) -> dict[str, Any]:
        """As entries of a row; without labels there is nothing about log-probabilities."""
        found: dict[str, Any] = {
            "kl_mean": self.kl.double().mean().item(),
            "kl_max": self.kl.max().item(),
            "top1": self.same_top1.double().mean().item(),
            "top5": self.top5.double().mean().item(),
        }
        drift = self.logprob[self.counted].double()
        if not len(drift):
            return found
        size = drift.abs()
        p50, p99 = size.quantile(size.new_tensor([0.5, 0.99])).tolist()
        found |= {
            "logprob_mean_abs": size.mean().item(),
            "logprob_max_abs": size.max().item(),
            "logprob_p50": p50,
            "logprob_p99": p99,
            "logprob_histogram": histogram(drift),
        }
        return found


def _token_drift(
    found_nV: Tensor, truth_nV: Tensor, targets_n: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wide = torch.promote_types(torch.promote_types(found_nV.dtype, truth_nV.dtype), torch.float32)
    found = found_nV.to(wide).log_softmax(-1)
    truth = truth_nV.to(wide).log_softmax(-1)
    kl = (truth.exp() * (truth - found)).sum(-1)
    labels = targets_n.clamp(min=0)[:, None]
    logprob = (found.gather(1, labels) - truth.gather(1, labels))[:, 0]
    most = min(TOP, found.shape[1])
    ours, theirs = (x.topk(most, dim=-1).indices for x in (found_nV, truth_nV))
    both = (ours[:, :, None] == theirs[:, None]).any(-1).to(wide).mean(-1)
    return logprob, kl, found_nV.argmax(-1) == truth_nV.argmax(-1), both


def histogram(drift: Tensor) -> dict[str, Any]:
    """Signed differences in bins whose borders are log-spaced and symmetric about 0.

    Returns:
        "edges", of one more than there are "counts"; what lies outside is in the outermost bin.
        "zeros": exact zeros, "nans": both in no bin.

    >>> found = histogram(torch.tensor([0.0, 2e-8, -2e-8, 1e9]))
    >>> found["zeros"], sum(found["counts"]), found["counts"][-1]
    (1, 3, 1)
    """
    edges = [-edge for edge in reversed(BIN_EDGES)] + list(BIN_EDGES)
    drift = drift.detach().double().cpu()
    zeros, nans = int((drift == 0).sum()), int(drift.isnan().sum())
    kept = drift[(drift != 0) & ~drift.isnan()]
    bins = torch.bucketize(kept, drift.new_tensor(edges[1:-1]))
    counts = torch.bincount(bins, minlength=len(edges) - 1).tolist()
    return {"edges": edges, "counts": counts, "zeros": zeros, "nans": nans}


# ---- rows ----

Scoped = tuple[str, int | None, dict[str, Any]]
"""Scope ("batch", "document" or "layer"), index, and the measures."""


def run_measures(found: ModelRun, truth: ModelRun, batch: PackedBatch) -> list[Scoped]:
    """All that two runs differ by: of the batch, then of each document, then of each layer.

    Args:
        found, truth: of the same documents, on one device.
        batch: the documents.
    """
    layers = [Difference.between(*two) for two in zip(found.hidden, truth.hidden, strict=True)]
    drift = TokenDrift.between(found.logits, truth.logits, targets_of(batch)).to("cpu")
    documents: list[Scoped] = []
    for document, (start, end) in enumerate(batch.spans()):
        rows = slice(start, end)
        logits = Difference.between(found.logits[rows], truth.logits[rows])
        own = logits.measures("logits") | drift.of(rows).measures()
        documents.append(("document", document, own | {"length": end - start}))
    logits = Difference.between(found.logits, truth.logits)
    whole: dict[str, Any] = logits.measures("logits") | drift.measures()
    whole |= {
        "loss": found.loss,
        "other_loss": truth.loss,
        "loss_difference": found.loss - truth.loss,
        "worst_tokens": worst_tokens(drift, batch),
        **parting(layers, logits),
    }
    if found.gradients is not None and truth.gradients is not None:
        whole |= gradient_measures(found.gradients, truth.gradients)
    per_layer: list[Scoped] = [
        ("layer", index - 1, layer.measures("hidden")) for index, layer in enumerate(layers)
    ]
    return [("batch", None, whole), *documents, *per_layer]


def why_not_finite(found: ModelRun, truth: ModelRun) -> str | None:
    """What of two runs is not finite, as a reason; None if all is. A NaN may equal a NaN."""
    said = []
    for who, run in (("the run", found), ("what it is held against", truth)):
        parts = {"logits": [run.logits], "hidden states": run.hidden}
        if run.gradients is not None:
            parts["gradients"] = list(run.gradients.values())
        shares = {name: _not_finite(tensors) for name, tensors in parts.items()}
        bad = [f"{100 * share:.3g}% of the {name}" for name, share in shares.items() if share]
        if bad:
            said.append(f"{', '.join(bad)} of {who}")
    return f"not finite: {'; '.join(said)}." if said else None


def _not_finite(tensors: Sequence[Tensor]) -> float:
    """Share of elements."""
    count = torch.stack([x.numel() - x.isfinite().sum() for x in tensors]).sum().item()
    return count / max(1, sum(x.numel() for x in tensors))


def parting(layers: list[Difference], logits: Difference) -> dict[str, Any]:
    """Where the runs part first.

    Args:
        layers: of the embeddings, then of each block.
        logits: of what comes last.

    Returns:
        "first_layer": the first block (-1: the embeddings) not bit-equal, or None; "first_part":
        the same in words, "head" where the logits alone differ.
    """
    first = next((index - 1 for index, layer in enumerate(layers) if not layer.is_zero), None)
    if first is None:
        part = None if logits.is_zero else "head"
    else:
        part = "embeddings" if first < 0 else f"block {first}"
    return {"first_layer": first, "first_part": part}


def worst_tokens(drift: TokenDrift, batch: PackedBatch) -> list[list[float]]:
    """The labels whose log-probability moved most: document, position in it, by how much."""
    size = torch.where(drift.counted, drift.logprob.abs(), 0).nan_to_num(nan=math.inf)
    most, tokens = size.topk(min(WORST, len(size)))
    starts = [start for start, _ in batch.spans()]
    documents = torch.searchsorted(tokens.new_tensor(starts), tokens, right=True) - 1
    return [
        [document, token + 1 - starts[document], moved]  # the label is the token after
        for document, token, moved in zip(
            documents.tolist(), tokens.tolist(), most.tolist(), strict=True
        )
        if moved != 0
    ]


# ---- gradients ----


def gradient_measures(found: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> dict[str, Any]:
    """Cosine and relative difference of all parameters as one vector, and the worst parameter.

    Args:
        found, truth: gradients by the parameters' names, on one device, of any dtypes.
    """
    names = list(truth)
    sums = torch.stack([_gradient_sums(found[name], truth[name]) for name in names]).tolist()
    dot, ours, theirs, apart = (math.fsum(column) for column in zip(*sums, strict=True))
    relative = [relative_norm(row[3], row[2]) for row in sums]
    sizes = [math.inf if math.isnan(size) else size for size in relative]  # NaN is the worst
    worst = sizes.index(max(sizes))
    moved = relative[worst] != 0
    return {
        "gradient_cosine": _cosine(dot, ours, theirs),
        "gradient_relative": relative_norm(apart, theirs),
        "worst_parameter": names[worst] if moved else None,
        "worst_parameter_relative": relative[worst],
    }


def _gradient_sums(found: Tensor, truth: Tensor) -> Tensor:
    """fp64 `[4]`: product, squares of each, squares of the difference."""
    sums = torch.zeros(4, dtype=torch.float64, device=truth.device)
    pieces = zip(found.reshape(-1).split(_PIECE), truth.reshape(-1).split(_PIECE), strict=True)
    for one, other in pieces:
        a, b = one.double(), other.double()
        sums += torch.stack([(a * b).sum(), (a * a).sum(), (b * b).sum(), (a - b).square().sum()])
    return sums


def _cosine(dot: float, ours: float, theirs: float) -> float:
    if ours == 0 and theirs == 0:
        return 1.0
    if ours == 0 or theirs == 0:
        return 0.0
    # one root of the product: of equal vectors it is exact
    return float(dot / (ours * theirs) ** 0.5)
