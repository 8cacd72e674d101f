"""`PackedCollator`: packs documents into one row of fixed shape, with their boundaries.

Shapes: T = total_tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flexvarlen.layout.packed_layout import PackedLayout

IGNORED = -100
"""The label that torch's cross_entropy and transformers ignore."""

_KNOWN = ("input_ids", "labels", "attention_mask", "position_ids", "seq_lengths", "seq_idx")
_CUMULATIVE = ("cu_seq_lens_q", "cu_seq_lens_k", "packed_layout")
_BOUNDARIES = (*_CUMULATIVE, "max_length_q", "max_length_k")
_NO_COLUMNS = ("max_length_q", "max_length_k", "use_cache")
_TELLING = ("position_ids", "seq_lengths", "seq_idx", "attention_mask", *_CUMULATIVE)
_LOSS_MASKS = ("completion_mask", "assistant_masks")


@dataclass
class PackedCollator:
    """Packs documents into one row of a fixed shape, for a `DataLoader` or `Trainer`.

    Called on the examples of a dataset, it returns a batch for a patched model:

        input_ids     int64 `[1, T]`, `pad_token_id` after the last document
        labels        int64 `[1, T]`; -100 at padding and at each document's first token (which no
                      preceding token may predict)
        position_ids  int64 `[1, T]`, from `position_ids_start` in each document; in padding they
                      repeat, and never exceed those of the longest document
        packed_layout the `PackedLayout`, with boundaries and maximum length on the host, so no
                      forward has to sync with the device
        use_cache     False: with a cache, an unpatched model would not detect documents from
                      position_ids

    With `boundaries="cu_seq_lens"`, the batch has the keywords of transformers' FlashAttention
    instead of the layout: `cu_seq_lens_q`, `cu_seq_lens_k` int32 `[capacity + 1]`, with the last
    value repeated in unused slots, and `max_length_q`, `max_length_k`, the bound. The padding then
    forms extra documents (FlashAttention writes only rows in a document): leave slots for them.

    Each input is one of the following, alone, in a list, or in a list of lists (grouped by `pack`):

        a document       `input_ids`, optionally `labels`; `attention_mask`, whose zeros are dropped
                         so that the tokens around them become adjacent;
                         `completion_mask`, `assistant_masks`, with no loss where they are zero
        several in one   the same with `seq_lengths` (TRL's packing), or `position_ids`, `seq_idx`
                         or document ids in `attention_mask` that separate them
        a batch          from `DataCollatorWithFlattening` or TRL's padding-free collator: the same
                         with a row dimension, and `cu_seq_lens_q`

    Tokens without any of these columns are one document: if they were several, this cannot be
    detected. A mapping with `input_ids` `[1, T]` and none of these columns is rejected, because
    `DataCollatorWithFlattening(return_position_ids=False)` returns several documents like this.

    Args:
        total_tokens: T; the rest of the row is padding. None: as many as the documents have, so
            the shape differs between batches.
        capacity: document slots; None: the number of documents, rounded up to a power of two.
        max_seqlen_bound: upper bound on document length; None: the maximum, rounded up likewise.
        pad_token_id: token id for padding.
        boundaries: how to return the document boundaries, "packed_layout" or "cu_seq_lens".
        position_ids_start: position of a document's first token; RoBERTa and similar count from
            `padding_idx + 1`.
        extra: additional columns with one value per token, as a mapping of name to padding value; a
            feature with any other column raises.

    Raises, when called:
        ValueError: there are more than `total_tokens` tokens or `capacity` documents, or one is
            longer than `max_seqlen_bound`; a column is missing, unknown, of another length or not
            integer; the boundaries contradict one another, or leave tokens out; a batch of one row
            has no boundaries.

    A `DataLoader(pin_memory=True)` pins the layout too.
    """

    total_tokens: int | None = None
    capacity: int | None = None
    max_seqlen_bound: int | None = None
    pad_token_id: int = 0
    boundaries: str = "packed_layout"
    position_ids_start: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.boundaries not in ("packed_layout", "cu_seq_lens"):
            raise ValueError(
                "boundaries must be packed_layout or cu_seq_lens, got "
                f"{self.boundaries!r}; choose one."
            )
        for name in self.extra:
            if name in (*_KNOWN, *_BOUNDARIES, *_LOSS_MASKS):
                raise ValueError(
                    f"extra must name columns of your own, got {name!r}; leave it out."
                )

    def __call__(self, features: Any) -> dict[str, Any]:
        """Collate documents into one batch; see the class."""
        documents = [
            document
            for feature in _features(features)
            for row in _rows(feature)
            for document in self._documents(row)
        ]
        if not documents:
            raise ValueError("features must hold a document at least, got none; pass some.")
        layout = self._layout([len(document["input_ids"]) for document in documents])
        fills = {"input_ids": self.pad_token_id, "labels": IGNORED, **self.extra}
        batch: dict[str, Any] = {}
        for name, fill in fills.items():
            values = np.concatenate([document[name] for document in documents])
            kind = np.result_type(values.dtype, np.asarray(fill).dtype)
            row = np.full(layout.total_tokens, fill, kind)
            row[: values.size] = values
            batch[name] = torch.from_numpy(row)[None]
        # A position embedding table may have only max_seqlen_bound entries.
        positions = layout.position_ids()[None] % layout.max_seqlen_bound
        batch["position_ids"] = positions + self.position_ids_start
        batch["use_cache"] = False
        if self.boundaries == "packed_layout":
            return batch | {"packed_layout": layout}
        ends, longest = layout.cu_seqlens, layout.max_seqlen_bound
        return batch | {
            "cu_seq_lens_q": ends,
            "cu_seq_lens_k": ends,
            "max_length_q": longest,
            "max_length_k": longest,
        }

    def _layout(self, lengths: list[int]) -> PackedLayout:
        if self.total_tokens is not None and sum(lengths) > self.total_tokens:
            raise ValueError(
                f"features must hold at most total_tokens={self.total_tokens} tokens, got "
                f"{sum(lengths)} in {len(lengths)} documents; raise total_tokens, or pass fewer "
                "at a time: where an example is a whole row, per_device_train_batch_size=1 and "
                "per_device_eval_batch_size=1 (Trainer's default is 8)."
            )
        left = (self.total_tokens or 0) - sum(lengths)
        if self.boundaries == "cu_seq_lens" and left > 0:
            longest = self.max_seqlen_bound or max(lengths)
            whole, rest = divmod(left, longest)
            lengths = lengths + [longest] * whole + [rest] * bool(rest)
        return PackedLayout.from_lengths(
            lengths,
            total_tokens=self.total_tokens,
            capacity=self.capacity,
            max_seqlen_bound=self.max_seqlen_bound,
        )

    def _documents(self, row: Mapping[str, NDArray[Any]]) -> Iterator[dict[str, NDArray[Any]]]:
        """Yield the documents of one row, without padding; labels default to the input_ids."""
        names = (*_KNOWN, *_BOUNDARIES, *_LOSS_MASKS, *self.extra)
        for name in row:
            if name not in names:
                raise ValueError(
                    f"features must hold columns of {', '.join(names)}, got {name!r}; drop it, or "
                    f"pass extra={{{name!r}: padding value}} if it has one value per token."
                )
        for name in ("input_ids", *self.extra):
            if name not in row:
                raise ValueError(
                    f"features must hold {name}, got {', '.join(row)}; add the column."
                )
        for name, values in row.items():
            if values.size and values.dtype.kind not in "iub" and name not in self.extra:
                raise ValueError(
                    f"{name} must be integers, got {values.dtype}; convert the column."
                )
            if name not in ("seq_lengths", *_BOUNDARIES):
                _check_size(name, values, row["input_ids"])
        tokens = row["input_ids"]
        columns = {name: row[name] for name in ("labels", "input_ids", *self.extra) if name in row}
        columns = {"labels": tokens, **columns}
        for name in _LOSS_MASKS:
            if name in row:
                columns["labels"] = np.where(row[name] != 0, columns["labels"], IGNORED)
        kept = row.get("attention_mask", np.ones_like(tokens)) != 0
        ends = _ends(row, kept)
        _require_no_loss_after(ends[-1], kept, row)
        for start, stop in pairwise(ends):
            inside = kept[start:stop]
            if not inside.any():
                continue  # a run of padding
            document = {name: values[start:stop][inside] for name, values in columns.items()}
            labels = document["labels"].astype(np.int64)
            labels[0] = IGNORED
            yield document | {
                "input_ids": document["input_ids"].astype(np.int64),
                "labels": labels,
            }


def _features(given: Any) -> Iterator[Any]:
    """Flatten documents, or lists of documents as yielded by a dataset of packed rows."""
    if isinstance(given, Mapping):
        yield given
        return
    for feature in given:
        first = feature[0] if isinstance(feature, list | tuple) and feature else 0
        nested = not isinstance(first, int | np.integer) and not (
            isinstance(first, Tensor | np.ndarray) and first.ndim == 0
        )
        yield from _features(feature) if nested else (feature,)


def _rows(feature: Any) -> Iterator[dict[str, NDArray[Any]]]:
    """Yield the rows of a feature as one-dimensional arrays; a batch may have several rows."""
    alone = not isinstance(feature, Mapping)
    if alone:
        if not isinstance(feature, Sequence | np.ndarray | Tensor) or isinstance(feature, str):
            raise ValueError(
                f"features must be mappings with input_ids, got {type(feature).__name__}; pass "
                "examples of a tokenized dataset."
            )
        feature = {"input_ids": feature}  # the tokens alone
    arrays = {
        name: _array(name, value)
        for name, value in feature.items()
        if value is not None and name not in _NO_COLUMNS
    }
    tokens = arrays.get("input_ids")
    if tokens is None or tokens.ndim == 1:
        yield arrays
        return
    if tokens.ndim != 2 or (len(tokens) > 1 and any(name in arrays for name in _BOUNDARIES)):
        raise ValueError(
            "input_ids must be one row, or rows without cu_seq_lens_q, got shape "
            f"{list(tokens.shape)}; pass the rows one by one."
        )
    if len(tokens) == 1 and not alone and not any(name in arrays for name in _TELLING):
        raise ValueError(
            f"input_ids [1, T] must be given with one of {', '.join(_TELLING)}, got "
            f"{', '.join(arrays)}; make the collator that built the row return the boundaries "
            "(return_position_ids=True), or pass one document's tokens as [T]."
        )
    for name, values in arrays.items():
        shared = name == "position_ids" and len(values) == 1
        if name not in _BOUNDARIES and len(values) != len(tokens) and not shared:
            raise ValueError(
                f"{name} must have a row for each of {len(tokens)}, got {len(values)}; fix that "
                "column."
            )
    for index in range(len(tokens)):
        yield {
            name: values if name in _BOUNDARIES else values[index if len(values) > 1 else 0]
            for name, values in arrays.items()
        }


def _array(name: str, value: Any) -> NDArray[Any]:
    if isinstance(value, PackedLayout) and value.segments is not None:
        raise ValueError(
            "packed_layout must be of plain documents in PackedCollator, got trees; make the batch "
            "with TreeCollator."
        )
    if isinstance(value, PackedLayout):  # the batch was made by this collator
        value = value.cu_seqlens.tolist()
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        value = value.float() if value.dtype == torch.bfloat16 else value
    try:
        found = np.asarray(value)
    except ValueError as error:
        raise ValueError(
            f"{name} must have rows of equal length, got ragged rows; pass them one by one."
        ) from error
    return found[0] if name in _BOUNDARIES and found.ndim == 2 and len(found) == 1 else found


def _ends(row: Mapping[str, NDArray[Any]], kept: NDArray[np.bool_]) -> list[int]:
    """Return the boundaries of a row: the start of each document and the end of the last one."""
    tokens = row["input_ids"].size
    starts = np.zeros(tokens, bool)
    for name in ("position_ids", "seq_idx", "attention_mask"):
        steps = np.diff(row.get(name, starts[:0]).astype(np.int64))
        if name == "attention_mask" and not (row.get(name, starts) > 1).any():
            continue  # a mask of zeros and ones holds no document ids
        starts[1 : 1 + steps.size] |= steps != 1 if name == "position_ids" else steps != 0
    given_boundaries = [row[name].tolist() for name in _CUMULATIVE if name in row]
    if "seq_lengths" in row:
        given_boundaries.append([0, *np.cumsum(row["seq_lengths"]).tolist()])
        if given_boundaries[-1][-1] != tokens:
            raise ValueError(
                f"seq_lengths must sum to the row's {tokens} tokens, got "
                f"{given_boundaries[-1][-1]}; fix them."
            )
    if not given_boundaries:
        return [0, *np.flatnonzero(starts).tolist(), tokens]
    for ends in given_boundaries:
        if ends[0] != 0 or ends[-1] > tokens or any(b < a for a, b in pairwise(ends)):
            raise ValueError(
                f"boundaries must rise from 0 to the row's {tokens} tokens, got {ends[:8]}; make "
                "seq_lengths or cu_seq_lens_q again."
            )
    first: list[int] = given_boundaries[0]
    inside = np.setdiff1d(np.flatnonzero(starts & kept), first)
    inside = inside[inside < first[-1]]
    if inside.size or any(set(other) != set(first) for other in given_boundaries):
        where = int(inside[0]) if inside.size else given_boundaries[1][:8]
        raise ValueError(
            "position_ids, seq_idx, attention_mask, seq_lengths and cu_seq_lens must describe the "
            f"same documents, got another boundary at {where}; drop the wrong one."
        )
    return first


def _require_no_loss_after(
    end: int, kept: NDArray[np.bool_], row: Mapping[str, NDArray[Any]]
) -> None:
    """Raise unless all tokens past the last boundary are padding, as they would be dropped."""
    labels = row.get("labels", row["input_ids"])
    if (kept[end:] & (labels[end:] != IGNORED)).any():
        raise ValueError(
            f"boundaries must cover the row's tokens, got {end} of {kept.size}; end them at the "
            "last token, or mask the tokens after it (attention_mask 0 or labels -100)."
        )


def _check_size(name: str, values: NDArray[Any], tokens: NDArray[Any]) -> None:
    if values.shape != tokens.shape:
        raise ValueError(
            f"{name} must have a value for each of {tokens.size} tokens, got "
            f"{list(values.shape)}; fix that column."
        )
