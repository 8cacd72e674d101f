"""Every form in which documents reach a transformers model, packed or padded.

Documents of 5, 11, 1, 8 and 7 tokens; a form turns their 32 tokens into a forward's arguments, and
says where each document's logits stand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

LENGTHS = (5, 11, 1, 8, 7)

RESTART = (0, 0, 0, 0, 0)
"""Each document's first position, where positions restart."""
ONWARD = (0, 5, 16, 17, 25)
"""Each document's first position, where transformers counts through the row."""


@dataclass(frozen=True)
class Batch:
    """Arguments of a forward, and the row and tokens of each document in its logits."""

    inputs: dict[str, Any]
    slices: list[tuple[int, slice]]


@dataclass(frozen=True)
class Form:
    """A named way to hand documents over.

    Attributes:
        starts: the documents' first positions there.
        train: whether the model is in train().
        cached: whether a cache is handed over.
    """

    name: str
    batch: Callable[[Tensor], Batch]
    starts: Sequence[int] = RESTART
    train: bool = False
    cached: bool = False


def documents_of(ids: Tensor) -> list[Tensor]:
    return list(ids.split(list(LENGTHS)))


def positions(ids: Tensor, starts: Sequence[int] = RESTART) -> Tensor:
    """int64 `[1, T]`: each document counts from its own start."""
    parts = [torch.arange(s, s + n) for s, n in zip(starts, LENGTHS, strict=True)]
    return torch.cat(parts).to(ids.device)[None]


def cu_seq_lens(ids: Tensor, with_max: bool = True) -> dict[str, Any]:
    """The keywords that DataCollatorWithFlattening(return_flash_attn_kwargs=True) makes."""
    ends = torch.tensor([0, *LENGTHS]).cumsum(0).to(ids.device, torch.int32)
    found: dict[str, Any] = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
    return found | (
        {"max_length_q": max(LENGTHS), "max_length_k": max(LENGTHS)} if with_max else {}
    )


def one_row(ids: Tensor, **inputs: Any) -> Batch:
    """All documents in one row; `use_cache=False` unless given (None: the model's default)."""
    inputs = {"input_ids": ids[None], "use_cache": False} | inputs
    slices, offset = [], 0
    for length in LENGTHS:
        slices.append((0, slice(offset, offset + length)))
        offset += length
    return Batch({name: value for name, value in inputs.items() if value is not None}, slices)


def ones(ids: Tensor) -> Tensor:
    """A 2D mask that hides nothing."""
    return torch.ones(1, len(ids), dtype=torch.long, device=ids.device)


def padded_tail(ids: Tensor) -> Batch:
    """Boundaries, positions and a mask over the row and three pad tokens after it."""
    pads = ids.new_zeros(1, 3)
    return one_row(
        ids,
        input_ids=torch.cat([ids[None], pads], dim=1),
        position_ids=torch.cat([positions(ids), ids.new_tensor([[0, 1, 2]])], dim=1),
        attention_mask=torch.cat([ones(ids), pads], dim=1),
        **cu_seq_lens(ids),
    )


def document_numbers(ids: Tensor) -> Tensor:
    """int64 `[1, T]`: the number of each token's document, from 1."""
    return torch.arange(1, 6).repeat_interleave(torch.tensor(LENGTHS)).to(ids.device)[None]


def two_rows(ids: Tensor) -> Batch:
    """5 + 11 tokens in one row, 1 + 8 + 7 in the other."""
    slices = [(0, slice(0, 5)), (0, slice(5, 16))]
    slices += [(1, slice(0, 1)), (1, slice(1, 9)), (1, slice(9, 16))]
    inputs = {"input_ids": ids.view(2, 16), "position_ids": positions(ids).view(2, 16)}
    return Batch(inputs | {"use_cache": False}, slices)


def padded_rows(ids: Tensor, left: bool) -> Batch:
    """One document per row, padded to the longest."""
    width = max(LENGTHS)
    tokens = ids.new_zeros(len(LENGTHS), width)
    mask = torch.zeros_like(tokens)
    slices = []
    for row, document in enumerate(documents_of(ids)):
        begin = width - len(document) if left else 0
        span = slice(begin, begin + len(document))
        tokens[row, span], mask[row, span] = document, 1
        slices.append((row, span))
    return Batch({"input_ids": tokens, "attention_mask": mask, "use_cache": False}, slices)


def counted(
    name: str, starts: Sequence[int] = RESTART, *, train: bool = False, **inputs: Any
) -> Form:
    """The form of one row with positions that count from these starts."""

    def batch(ids: Tensor) -> Batch:
        return one_row(ids, position_ids=positions(ids, starts), **inputs)

    return Form(name, batch, starts, train)


FORMS = (
    counted("position_ids, use_cache=False"),
    counted("position_ids, default use_cache", use_cache=None),
    counted("position_ids, default use_cache, in train()", use_cache=None, train=True),
    Form(
        "position_ids and an attention_mask of ones",
        lambda ids: one_row(ids, position_ids=positions(ids), attention_mask=ones(ids)),
    ),
    Form(
        "position_ids and an empty DynamicCache",
        lambda ids: one_row(
            ids, position_ids=positions(ids), past_key_values=DynamicCache(), use_cache=True
        ),
        cached=True,
    ),
    Form(
        "cu_seq_lens_* and max_length_*, no position_ids",
        lambda ids: one_row(ids, **cu_seq_lens(ids)),
        starts=ONWARD,
    ),
    Form(
        "cu_seq_lens_* without max_length_*",
        lambda ids: one_row(ids, **cu_seq_lens(ids, with_max=False)),
        starts=ONWARD,
    ),
    Form(
        "position_ids, cu_seq_lens_*, max_length_* and seq_idx",
        lambda ids: one_row(
            ids,
            position_ids=positions(ids),
            seq_idx=(document_numbers(ids) - 1).int(),
            **cu_seq_lens(ids),
        ),
    ),
    Form("cu_seq_lens_*, position_ids and a mask with 3 pads", padded_tail),
    Form(
        "2D mask of document ids",
        lambda ids: one_row(ids, attention_mask=document_numbers(ids)),
        starts=ONWARD,
    ),
    Form("two packed rows", two_rows),
    counted("first document continues at position 100", (100, 0, 0, 0, 0)),
    counted("a later document starts at position 2", (0, 2, 0, 0, 0)),
    Form("right padding", lambda ids: padded_rows(ids, left=False)),
    Form("left padding", lambda ids: padded_rows(ids, left=True), starts=(6, 0, 10, 3, 4)),
)
