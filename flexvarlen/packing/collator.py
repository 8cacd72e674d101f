"""`PackedCollator`: documents into one row of fixed shapes, with their boundaries.

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

from flexvarlen.layout import PackedLayout

IGNORED = -100
"""Of labels: no loss there, as torch's cross_entropy and transformers have it."""

_KNOWN = ("input_ids", "labels", "attention_mask", "position_ids", "seq_lengths", "seq_idx")
_BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
_LOSS_MASKS = ("completion_mask", "assistant_masks")


@dataclass
class PackedCollator:
    """Puts documents into one row whose shapes never change, for a `DataLoader` or `Trainer`.

    Called with what a data set yields, it gives a batch that a patched model takes as it is:

        input_ids     int64 `[1, T]`, `pad_token_id` behind the last document
        labels        int64 `[1, T]`; -100 at the first token of each document (which nothing before
                      it may predict) and at padding
        position_ids  int64 `[1, T]`, from `position_ids_start` in each document and in the padding
        packed_layout the `PackedLayout`, whose boundaries and longest document the host knows: no
                      forward reads the device back

    or, with `boundaries="cu_seq_lens"`, in place of the layout the names that transformers' own
    FlashAttention takes: `cu_seq_lens_q`, `cu_seq_lens_k` int32 `[capacity + 1]`, the last value
    repeated in the spare slots, and `max_length_q`, `max_length_k`, the bound.

    What is taken, alone, in a list, or in a list of lists (documents that `pack` put together):

        a document       `input_ids`, and `labels` or not; `attention_mask`: its zeros are dropped;
                         `completion_mask`, `assistant_masks`: no loss where they are zero
        several in one   the same with `seq_lengths` (TRL's packing), or `position_ids`, `seq_idx`
                         or document ids in `attention_mask` that tell them apart
        a batch          of `DataCollatorWithFlattening` or TRL's padding-free collator: the same
                         with rows, and `cu_seq_lens_q`

    Args:
        total_tokens: T; what the documents leave over is padding. None: the documents' tokens, so
            that each batch has its own shape.
        capacity: document slots; None: the documents, rounded up to a power of two.
        max_seqlen_bound: the longest document that shapes are made for; None: rounded up likewise.
        pad_token_id: of padding.
        boundaries: "packed_layout" or "cu_seq_lens".
        position_ids_start: of the first token of a document; RoBERTa and its kin count from
            `padding_idx + 1`.
        extra: names of other columns with one value a token, and what fills their padding; a
            feature with a column that is not known raises.

    Raises, when called:
        ValueError: more tokens than `total_tokens`, more documents than `capacity`, a longer one
            than `max_seqlen_bound`; a column that is missing, unknown, or of another length.

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

    def __call__(self, features: Any) -> dict[str, Any]:
        """One batch; see the class."""
        documents = [
            document
            for feature in _features(features)
            for row in _rows(feature)
            for document in self._documents(row)
        ]
        if not documents:
            raise ValueError("features must hold a document at least, got none; pass some.")
        layout = PackedLayout.from_lengths(
            [len(document["input_ids"]) for document in documents],
            total_tokens=self.total_tokens,
            capacity=self.capacity,
            max_seqlen_bound=self.max_seqlen_bound,
        )
        fills = {"input_ids": self.pad_token_id, "labels": IGNORED, **self.extra}
        batch: dict[str, Any] = {}
        for name, fill in fills.items():
            values = np.concatenate([document[name] for document in documents])
            row = np.full(layout.total_tokens, fill, values.dtype)
            row[: values.size] = values
            batch[name] = torch.from_numpy(row)[None]
        batch["position_ids"] = layout.position_ids()[None] + self.position_ids_start
        if self.boundaries == "packed_layout":
            return batch | {"packed_layout": layout}
        ends, longest = layout.cu_seqlens, layout.max_seqlen_bound
        return batch | {
            "cu_seq_lens_q": ends,
            "cu_seq_lens_k": ends,
            "max_length_q": longest,
            "max_length_k": longest,
        }

    def _documents(self, row: Mapping[str, NDArray[Any]]) -> Iterator[dict[str, NDArray[Any]]]:
        """The documents of one row, without padding; labels made where there are none."""
        names = (*_KNOWN, *_BOUNDARIES, *_LOSS_MASKS, *self.extra)
        for name in row:
            if name not in names:
                raise ValueError(
                    f"features must hold columns of {', '.join(names)}, got {name!r}; drop it, or "
                    f"pass extra={{{name!r}: what fills its padding}} if it has a value a token."
                )
        for name in ("input_ids", *self.extra):
            if name not in row:
                raise ValueError(
                    f"features must hold {name}, got {', '.join(row)}; add the column."
                )
        tokens = row["input_ids"]
        columns = {name: row[name] for name in ("input_ids", "labels", *self.extra) if name in row}
        columns = {"labels": tokens, **columns}
        kept = row.get("attention_mask", np.ones_like(tokens)) != 0
        for name in _LOSS_MASKS:
            if name in row:
                _check_size(name, row[name], tokens)
                columns["labels"] = np.where(row[name] != 0, columns["labels"], IGNORED)
        for name, values in (*columns.items(), ("attention_mask", kept)):
            _check_size(name, values, tokens)
        for start, stop in pairwise(_ends(row)):
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
    """Documents, or lists of them as a data set of packed rows yields, one by one."""
    if isinstance(given, Mapping):
        yield given
        return
    for feature in given:
        nested = isinstance(feature, list) and feature and not isinstance(feature[0], int)
        yield from _features(feature) if nested else (feature,)


def _rows(feature: Any) -> Iterator[dict[str, NDArray[Any]]]:
    """A feature's rows as arrays of one dimension; a batch of several rows has several."""
    if not isinstance(feature, Mapping):
        if isinstance(feature, Sequence | np.ndarray | Tensor):  # the tokens alone
            feature = {"input_ids": feature}
        else:
            raise ValueError(
                f"features must be mappings with input_ids, got {type(feature).__name__}; pass "
                "what a data set of token ids yields."
            )
    arrays = {
        name: np.asarray(value)
        for name, value in feature.items()
        if value is not None and name not in ("max_length_q", "max_length_k")
    }
    tokens = arrays.get("input_ids")
    if tokens is None or tokens.ndim == 1:
        yield arrays
        return
    if tokens.ndim != 2 or ("cu_seq_lens_q" in arrays and len(tokens) > 1):
        raise ValueError(
            "input_ids must be one row, or rows without cu_seq_lens_q, got shape "
            f"{list(tokens.shape)}; pass the rows one by one."
        )
    for index in range(len(tokens)):
        yield {
            name: values if name in _BOUNDARIES else values[index if len(values) > 1 else 0]
            for name, values in arrays.items()
        }


def _ends(row: Mapping[str, NDArray[Any]]) -> list[int]:
    """Where the documents of a row begin, and its end."""
    tokens = row["input_ids"].size
    if "cu_seq_lens_q" in row:
        ends = [int(end) for end in row["cu_seq_lens_q"]]
    elif "seq_lengths" in row:
        ends = [0, *np.cumsum(row["seq_lengths"]).tolist()]
        if ends[-1] != tokens:
            raise ValueError(
                f"seq_lengths must sum to the row's {tokens} tokens, got {ends[-1]}; mend them."
            )
    else:
        starts = np.zeros(tokens, bool)
        for name in ("position_ids", "seq_idx", "attention_mask"):
            if name in row:
                _check_size(name, row[name], row["input_ids"])
                steps = np.diff(row[name])
                starts[1:] |= steps != 1 if name == "position_ids" else steps != 0
        ends = [0, *np.flatnonzero(starts).tolist(), tokens]
    if ends[0] != 0 or ends[-1] > tokens or any(end < start for start, end in pairwise(ends)):
        raise ValueError(
            f"boundaries must rise from 0 to the row's {tokens} tokens, got {ends[:8]}; make "
            "seq_lengths or cu_seq_lens_q anew."
        )
    return ends


def _check_size(name: str, values: NDArray[Any], tokens: NDArray[Any]) -> None:
    if values.shape != tokens.shape:
        raise ValueError(
            f"{name} must have a value for each of {tokens.size} tokens, got "
            f"{list(values.shape)}; mend that column."
        )
