"""A step's documents as batches: packed by flexvarlen, packed by transformers, padded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import DataCollatorWithFlattening, PreTrainedModel

import flexvarlen as fv
from flexvarlen.bench.suites.model.utilisation import taken_by_auto
from flexvarlen.bench.suites.training.texts import Document
from flexvarlen.reference.model import IGNORE_INDEX

Inputs = dict[str, Any]
"""Keyword arguments of a forward."""
Collate = Callable[[Sequence[Document]], Inputs]


def pack(tokens: int, rows: Sequence[Sequence[Document]]) -> Collate:
    """`PackedCollator` for rows of `tokens`; its shapes are those of all `rows`."""
    longest = max(len(ids) for row in rows for ids in row)
    collator = fv.PackedCollator(
        total_tokens=tokens, capacity=max(map(len, rows)), max_seqlen_bound=longest
    )
    return lambda documents: collator([{"input_ids": ids} for ids in documents])


def taken_for(model: PreTrainedModel, batch: Mapping[str, Any], dtype: torch.dtype) -> str:
    """The kernel that "auto" takes for a packed batch."""
    return taken_by_auto(model, batch["packed_layout"].to(model.device), dtype)


def flatten(*, flash: bool) -> Collate:
    """transformers' packed batch; `flash`: with FlashAttention's arguments."""
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=flash)
    return lambda documents: collator([{"input_ids": ids} for ids in documents])


def pad(documents: Sequence[Document]) -> Inputs:
    """Documents padded on the right; a first token is no label, as in a packed row."""
    ids = [torch.tensor(document) for document in documents]
    lengths = torch.tensor([len(document) for document in ids])
    real = torch.arange(int(lengths.max()))[None] < lengths[:, None]
    input_ids = pad_sequence(ids, batch_first=True)
    labels = input_ids.masked_fill(~real, IGNORE_INDEX)
    labels[:, 0] = IGNORE_INDEX
    return {
        "input_ids": input_ids,
        "attention_mask": real.long(),
        "labels": labels,
        "use_cache": False,
    }


def split_evenly(documents: Sequence[Document], batches: int) -> list[list[Document]]:
    """Documents in order, in `batches` batches of equal count, or one apart."""
    edges = np.linspace(0, len(documents), batches + 1).round().astype(int)
    return [list(documents[begin:end]) for begin, end in pairwise(edges.tolist())]


def padded_batches(
    steps: Sequence[Sequence[Document]], positions: int
) -> list[list[list[Document]]]:
    """Each step in equally many batches, the fewest that hold at most `positions` each.

    If even one document a batch is too many: as many batches as the smallest step has documents.
    """
    for count in range(1, min(map(len, steps)) + 1):
        found = [split_evenly(documents, count) for documents in steps]
        if max(len(b) * max(map(len, b)) for batches in found for b in batches) <= positions:
            break
    return found
