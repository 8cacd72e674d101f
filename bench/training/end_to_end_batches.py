"""A step's documents as batches of `end_to_end.py`: in groups, and a group as a forward gets it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from transformers import DataCollatorWithFlattening

import flexvarlen as fv
from flexvarlen.bench.training.convergence_documents import padded

Documents = list[list[int]]


def split_evenly(documents: Documents, batches: int) -> list[Documents]:
    """Documents in order, dealt to so many batches of equal count (but for one)."""
    edges = np.linspace(0, len(documents), batches + 1).round().astype(int)
    return [documents[begin:end] for begin, end in pairwise(edges.tolist())]


def padded_batches(steps: Sequence[Documents], positions: int) -> list[list[Documents]]:
    """Of each step as many batches as the others, the fewest that hold `positions` at most each.

    Where even one document a batch were needed: as many as the step of fewest documents has.
    """
    most = min(map(len, steps))
    for count in range(1, most + 1):
        found = [split_evenly(documents, count) for documents in steps]
        largest = max(len(b) * max(map(len, b)) for batches in found for b in batches)
        if largest <= positions:
            break
    return found


class Flatten:
    """transformers' packed batch of a group of documents."""

    def __init__(self, flash: bool) -> None:
        self.collator = DataCollatorWithFlattening(return_flash_attn_kwargs=flash)

    def __call__(self, groups: list[Documents]) -> dict[str, Any]:
        (documents,) = groups
        batch: dict[str, Any] = self.collator([{"input_ids": ids} for ids in documents])
        return batch


class Pack:
    """Our packed batch of a group of documents; shapes are those of all steps."""

    def __init__(self, tokens: int, steps: Sequence[Documents]) -> None:
        longest = max(len(ids) for documents in steps for ids in documents)
        self.collator = fv.PackedCollator(tokens, max(map(len, steps)), longest)

    def __call__(self, groups: list[Documents]) -> dict[str, Any]:
        (documents,) = groups
        return self.collator([{"input_ids": ids} for ids in documents])


def pad(groups: list[Documents]) -> dict[str, Any]:
    """The padded batch of a group of documents."""
    (documents,) = groups
    return padded(documents)
