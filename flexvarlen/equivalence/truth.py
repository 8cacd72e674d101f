"""What variants are held against: sampled documents alone, and the peer's errors on them."""

from __future__ import annotations

import gc
import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from flexvarlen.equivalence.accuracy import Errors, errors_of_answer
from flexvarlen.equivalence.batch import PackedBatch
from flexvarlen.equivalence.oracle import Answer, oracle_answer, peer_answer
from flexvarlen.equivalence.variants import counted_labels

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Attention matrices that the oracle's autograd keeps a layer: scores, probabilities, and a spare.
KEPT_MATRICES = 3
ORACLE_MEMORY_SHARE = 1 / 3  # of what is free
ORACLE_TOKENS = 8192  # on a GPU: fp64 is slow there


@dataclass(frozen=True)
class Truth:
    """A packing, the sampled documents alone in fp64, and the peer's errors.

    Attributes:
        batch: the packing.
        labels: int64 `[1, T]`, of the sampled documents alone.
        counted: 0-d tensor, how many of them count.
        oracle: in fp64.
        peer: the errors of each document alone in the tested dtype.
    """

    batch: PackedBatch
    labels: Tensor
    counted: Tensor
    oracle: Answer
    peer: Errors

    @classmethod
    def of(cls, base: PreTrainedModel, batch: PackedBatch, *, train: bool, seed: int) -> Truth:
        """Run the documents of `batch` that there is room for.

        Raises:
            ValueError: there is no room for the fp64 copy of `base`.
        """
        documents = sample_documents(base, batch, train=train, seed=seed)
        labels = batch.labels(documents)
        try:
            oracle = oracle_answer(base, batch, documents, train=train)
            clean(base)
            peer = errors_of_answer(peer_answer(base, batch, documents, train=train), oracle)
        except torch.OutOfMemoryError as error:
            raise ValueError(
                "model must leave room for its fp64 copy (and, in training, gradients in fp64), "
                "got too little memory; take fewer layers (name@LAYERS) or the forward alone."
            ) from error
        clean(base)
        return cls(batch, labels, counted_labels(labels), oracle, peer)

    def without_tensors(self) -> Truth:
        """What is needed once all variants are checked: which documents, and the peer's errors."""
        oracle = replace(self.oracle, hidden=(), head=nn.Identity(), gradients={})
        return replace(self, oracle=oracle)

    @property
    def whole(self) -> bool:
        """Whether the oracle covers every document."""
        return len(self.oracle.documents) == len(self.batch.lengths)

    @property
    def description(self) -> str:
        """Which documents the oracle covers."""
        lengths = self.batch.lengths
        text = f"{len(self.oracle.documents)} of {len(lengths)} documents alone, fp64"
        if self.whole:
            return text
        longest = max(lengths[document] for document in self.oracle.documents)
        return f"{text} (a sample that fits; the longest of {longest:,} tokens)"


def sample_documents(
    base: PreTrainedModel, batch: PackedBatch, *, train: bool, seed: int
) -> list[int]:
    """The documents that the oracle runs: all on the CPU; a random choice that fits a GPU."""
    everything = list(range(len(batch.lengths)))
    if base.device.type != "cuda":
        return everything
    free, _ = torch.cuda.mem_get_info(base.device)
    layers = base.config.num_hidden_layers if train else 1
    chosen: list[int] = []
    tokens = 0
    for document in random.Random(seed).sample(everything, len(everything)):
        length = batch.lengths[document]
        matrices = layers * KEPT_MATRICES * base.config.num_attention_heads * length * length
        logits = 3 * length * base.config.vocab_size
        fits = 8 * (matrices + logits) <= free * ORACLE_MEMORY_SHARE
        if fits and tokens + length <= ORACLE_TOKENS:
            chosen.append(document)
            tokens += length
    shortest = min(everything, key=lambda document: batch.lengths[document])
    return sorted(chosen) or [shortest]


def clean(base: PreTrainedModel) -> None:
    """Drop gradients; on a GPU also what the allocator keeps for reuse."""
    base.zero_grad(set_to_none=True)
    if base.device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
