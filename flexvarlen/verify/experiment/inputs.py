"""The documents of a row as forwards: one packed row, padded batches, one document at a time.

All hold the same tokens and labels, in the documents' order or in that of `by_length`, so that
their outputs and gradients can be compared with the same reference. Shapes: T tokens of all
documents; B rows of S positions, S = T in the packed row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.reference.model import IGNORE_INDEX
from flexvarlen.verify.experiment.batch import ModelInputs, PackedBatch

SORTED = "padded-sorted"
BATCHINGS = ("packed", "padded", SORTED, "serial")
"""How the documents come: in one row, padded in order or by length, or one after another."""


def forwards_of(
    batching: str,
    row: PackedBatch,
    boundaries: Callable[[PackedBatch], Mapping[str, Any]],
    grad_output: Tensor | None = None,
) -> list[ModelInputs]:
    """The documents as one of `BATCHINGS`.

    Args:
        boundaries: gives the keyword arguments that mark the documents of a packed row.
        grad_output: `[T, hidden]`, where the backward starts, if not from a loss.
    """
    if batching == "packed":
        return packed(row, boundaries(row), grad_output)
    if batching == "serial":
        labels = row.next_tokens()
        return [
            ModelInputs(
                {"input_ids": row.input_ids[:, start:end], "use_cache": False},
                labels=labels[:, start:end],
            )
            for start, end in row.spans()
        ]
    order = by_length(row) if batching == SORTED else range(len(row.lengths))
    groups = padded_groups([row.lengths[index] for index in order], row.total_tokens)
    return [padded(row, [order[i] for i in group], grad_output) for group in groups]


def packed(
    row: PackedBatch, boundaries: Mapping[str, Any], grad_output: Tensor | None = None
) -> list[ModelInputs]:
    """One row of T.

    Args:
        boundaries: the keyword arguments that mark the documents.
        grad_output: `[T, hidden]`.
    """
    inputs = {"input_ids": row.input_ids, **boundaries}
    start = None if grad_output is None else grad_output[None]
    return [ModelInputs(inputs, labels=row.next_tokens(), grad_output=start)]


def padded(row: PackedBatch, documents: Sequence[int], grad_output: Tensor | None) -> ModelInputs:
    """These documents, each in a row, right-padded."""
    spans = row.spans()

    def put(of_tokens: Tensor, fill: int) -> Tensor:
        each = [of_tokens[slice(*spans[index])] for index in documents]
        return pad_sequence(each, batch_first=True, padding_value=fill)

    real = put(torch.ones_like(row.input_ids[0], dtype=torch.bool), 0)
    inputs = {
        "input_ids": put(row.input_ids[0], 0),
        "attention_mask": real.long(),
        "use_cache": False,
    }
    labels = put(row.next_tokens()[0], IGNORE_INDEX)
    start = None if grad_output is None else put(grad_output, 0)
    return ModelInputs(inputs, real, labels, grad_output=start)


def padded_groups(lengths: Sequence[int], positions: int) -> Iterator[list[int]]:
    """Documents of each padded batch: as many in a row as fit, pads included, at least one.

    With the tokens of the packed row as positions, a batch fits wherever that row fits: with the
    same memory a user would batch this way, and sum the gradients.

    >>> list(padded_groups([3, 1, 4, 1, 1], 8))
    [[0, 1], [2, 3], [4]]
    """
    group: list[int] = []
    for index, length in enumerate(lengths):
        longest = max((lengths[i] for i in group), default=0)
        if group and (len(group) + 1) * max(longest, length) > positions:
            yield group
            group = []
        group.append(index)
    if group:
        yield group


def by_length(row: PackedBatch) -> list[int]:
    """Indices of the documents, the longest first.

    The fewest pads that `train_sampling_strategy="group_by_length"` of transformers' `Trainer` can
    reach: it sorts at most 50 batches at a time (`transformers.trainer_pt_utils`).
    """
    return sorted(range(len(row.lengths)), key=lambda index: -row.lengths[index])


def in_order(row: PackedBatch, outputs: Tensor, batching: str) -> Tensor:
    """Outputs `[T, …]` of `forwards_of`, one after another, in the order of the documents."""
    if batching != SORTED:
        return outputs
    order = by_length(row)
    pieces = outputs.split([row.lengths[index] for index in order])
    at = sorted(range(len(order)), key=order.__getitem__)
    return torch.cat([pieces[index] for index in at])


def positions_of(forwards: Sequence[ModelInputs]) -> int:
    """Positions computed, pads included."""
    return sum(each.inputs["input_ids"].numel() for each in forwards)


def shapes_of(forwards: Sequence[ModelInputs]) -> int:
    """How many different shapes the forwards get."""
    return len({tuple(each.inputs["input_ids"].shape) for each in forwards})


# ---- how a forward marks the documents, in the words of transformers or ours ----

THEIRS = "transformers:"
"""Begins the names of variants whose attention is transformers'."""
FORMS = (
    *("packed_layout", "position_ids", "cu_seq_lens", "both", "default_cache", "mask_of_ones"),
    *("cu_seq_lens_alone", "document_ids"),
)


def forms_of(attention: str) -> list[str]:
    """The names in `FORMS` that an attention supports."""
    is_theirs = attention.startswith(THEIRS)
    return [form for form in FORMS if not (is_theirs and form == "packed_layout")]


def inputs_of(form: str, layout: PackedLayout, lengths: Sequence[int]) -> dict[str, Any]:
    """Keyword arguments of a forward on `[1, T]` that mark the documents of the row.

    Args:
        form: of `FORMS`. "packed_layout"; or, without a cache, "position_ids", "cu_seq_lens"
            (beside position_ids, as DataCollatorWithFlattening makes them), "both" (these and
            seq_idx, which recurrent layers need), "mask_of_ones" (an attention_mask that hides
            nothing, beside position_ids), "cu_seq_lens_alone" or "document_ids" (a 2D
            attention_mask that numbers the documents from 1); or "default_cache": position_ids, and
            the cache that transformers makes where nobody says use_cache, also in training.
        lengths: tokens of each document.
    """
    if form == "packed_layout":
        return {"packed_layout": layout}
    device = layout.device
    positions = {"position_ids": layout.position_ids()[None]}
    if form == "default_cache":
        return positions
    documents = torch.arange(len(lengths), dtype=torch.int32)
    numbers = documents.repeat_interleave(torch.tensor(lengths))[None].to(device)
    ends = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
    cu_seq_lens: dict[str, Any] = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
    cu_seq_lens |= {"max_length_q": max(lengths), "max_length_k": max(lengths)}
    marks: dict[str, dict[str, Any]] = {
        "position_ids": positions,
        "cu_seq_lens": positions | cu_seq_lens,
        "both": positions | cu_seq_lens | {"seq_idx": numbers},
        "mask_of_ones": positions | {"attention_mask": torch.ones_like(numbers)},
        "cu_seq_lens_alone": cu_seq_lens,
        "document_ids": {"attention_mask": numbers + 1},
    }
    return marks[form] | {"use_cache": False}
