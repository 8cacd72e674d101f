"""Read the input of `PackedCollator`: columns as rows of arrays, and document boundaries."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from numbers import Number
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flexvarlen.layout.labels import IGNORE_INDEX, why_not_labels
from flexvarlen.layout.packed_layout import PackedLayout
from flexvarlen.layout.routed_experts import ROUTED_EXPERTS
from flexvarlen.packing.images import (
    IMAGES,
    TOKEN_TYPES,
    check_images,
    has_images,
    read_images,
)

KNOWN = (
    "input_ids",
    "labels",
    "attention_mask",
    "position_ids",
    "seq_lengths",
    "seq_idx",
    ROUTED_EXPERTS,
)
_CUMULATIVE = ("cu_seq_lens_q", "cu_seq_lens_k", "packed_layout")
BOUNDARIES = (*_CUMULATIVE, "max_length_q", "max_length_k")
_NO_COLUMNS = ("max_length_q", "max_length_k", "use_cache")
_TELLING = ("position_ids", "seq_lengths", "seq_idx", "attention_mask", *_CUMULATIVE)
LOSS_MASKS = ("completion_mask", "assistant_masks")


def features_of(given: Any) -> Iterator[Any]:
    """Flatten documents, or lists of documents as yielded by a dataset of packed rows."""
    if isinstance(given, Mapping):
        yield given
        return
    if not isinstance(given, Iterable) or getattr(given, "ndim", 1) == 0:
        raise ValueError(_not_features(given))
    for feature in given:
        first = feature[0] if isinstance(feature, list | tuple) and feature else 0
        nested = not isinstance(first, Number) and not (
            isinstance(first, Tensor | np.ndarray) and first.ndim == 0
        )
        yield from features_of(feature) if nested else (feature,)


def is_list_of_documents(example: Any) -> bool:
    """Whether an example is a list of mappings or several token ids, as one chat may give."""
    if not isinstance(example, list | tuple) or not example:
        return False
    is_nested = isinstance(example[0], list | tuple) or getattr(example[0], "ndim", 0) > 0
    return isinstance(example[0], Mapping) or (is_nested and len(example) > 1)


def _not_features(given: Any) -> str:
    return (
        f"features must be mappings with input_ids, got {type(given).__name__}; pass examples "
        "from a tokenized dataset."
    )


def check_columns(feature: Mapping[str, Any], extra: Iterable[str]) -> None:
    """Raise for an unknown column, or if there are no input_ids."""
    tokens = feature.get("input_ids")
    if tokens is None:
        raise ValueError(
            f"features must have input_ids, got {', '.join(map(str, feature)) or 'no columns'}; "
            "tokenize the dataset."
        )
    names = (*KNOWN, *BOUNDARIES, *LOSS_MASKS, *TOKEN_TYPES, *IMAGES, *extra)
    for name, values in feature.items():
        if name in names or name in _NO_COLUMNS or values is None:
            continue
        first = values[0] if isinstance(values, list | tuple) and values else values
        if isinstance(values, Number):
            advice = "drop it, and give a classifier batch['labels'], a tensor [num_docs]"
        elif isinstance(first, str | Mapping):
            advice = "drop it, as it is not tokenized"
        else:
            advice = f"drop it, or pass extra={{{name!r}: padding value}} if each token has one"
        raise ValueError(
            f"features may only have the columns {', '.join(names)}, got {name!r}; {advice}."
        )


def differ(labels: NDArray[Any], tokens: NDArray[Any]) -> bool:
    """Whether a token has a label other than itself."""
    return bool(((labels != IGNORE_INDEX) & (labels != tokens)).any())


def require_a_kind(labels: NDArray[Any]) -> None:
    """Raise if labels that equal their tokens may be next-token labels or the tokens' own."""
    if labels[0] != IGNORE_INDEX and (labels == IGNORE_INDEX).any():
        raise ValueError(
            "next_token_labels must be set if labels may be either, got a label at a document's "
            "first token and -100 later; pass True (causal model) or False (masked LM)."
        )


def rows_of(feature: Any, extra: Iterable[str]) -> Iterator[dict[str, NDArray[Any]]]:
    """Yield the rows of a feature as one-dimensional arrays; a batch may have several rows."""
    alone = not isinstance(feature, Mapping)
    if alone:
        if not isinstance(feature, Sequence | np.ndarray | Tensor) or isinstance(feature, str):
            raise ValueError(_not_features(feature))
        feature = {"input_ids": feature}  # the tokens alone
    check_columns(feature, extra)
    arrays = {
        name: _array(name, value)
        for name, value in feature.items()
        if value is not None and name not in (*_NO_COLUMNS, *IMAGES)
    }
    arrays |= read_images(feature)
    tokens = arrays.get("input_ids")
    if tokens is None or tokens.ndim == 1:
        yield arrays
        return
    if tokens.ndim != 2 or (len(tokens) > 1 and any(name in arrays for name in BOUNDARIES)):
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
    if len(tokens) > 1 and has_images(arrays):
        raise ValueError(
            f"input_ids must be one document where it has images, got {len(tokens)} rows, of which "
            "nothing says whose the images are; call the processor for each document."
        )
    whole = (*BOUNDARIES, *IMAGES)
    for name, values in arrays.items():
        rows = values.shape[0] if values.ndim else 0
        shared = name == "position_ids" and rows == 1
        if name not in whole and rows != len(tokens) and not shared:
            raise ValueError(
                f"{name} must have a row for each of {len(tokens)}, got {rows}; fix that column."
            )
    for index in range(len(tokens)):
        yield {
            name: values if name in whole else values[index if len(values) > 1 else 0]
            for name, values in arrays.items()
        }


def _array(name: str, value: Any) -> NDArray[Any]:
    if isinstance(value, PackedLayout) and value.segments is not None:
        raise ValueError(
            "PackedCollator takes a packed_layout of plain documents, got trees; make the batch "
            "with TreeCollator."
        )
    if isinstance(value, PackedLayout):  # the batch was made by this collator
        value = value.cu_seqlens.tolist()
    if isinstance(value, Tensor):
        value = value.float() if value.dtype == torch.bfloat16 else value
        value = value.numpy(force=True)
    try:
        found = np.asarray(value)
    except ValueError as error:
        raise ValueError(
            f"{name} must have rows of equal length; pass ragged rows one by one."
        ) from error
    if name in ("input_ids", "labels") and found.dtype.kind in "iub":
        found = found.astype(np.int64, copy=False)  # -100 fits in no unsigned dtype
    return found[0] if name in BOUNDARIES and found.ndim == 2 and len(found) == 1 else found


def ends_of(row: Mapping[str, NDArray[Any]], kept: NDArray[np.bool_]) -> list[int]:
    """Return the boundaries of a row: the start of each document and the end of the last one."""
    tokens = row["input_ids"].size
    starts = np.zeros(tokens, bool)
    for name in ("position_ids", "seq_idx", "attention_mask"):
        steps = np.diff(row.get(name, starts[:0]).astype(np.int64))
        if name == "attention_mask" and not (row.get(name, starts) > 1).any():
            continue  # a mask of zeros and ones holds no document ids
        starts[1 : 1 + steps.size] |= steps != 1 if name == "position_ids" else steps != 0
    for name in ("seq_lengths", *_CUMULATIVE):
        if name in row and (row[name].ndim != 1 or row[name].size == 0):
            raise ValueError(
                f"{name} must be a list of integers, got shape {list(row[name].shape)}; pass one "
                "list for the row."
            )
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
            f"same documents, got different boundaries at {where}; drop the wrong column."
        )
    return first


def require_no_loss_after(
    end: int, kept: NDArray[np.bool_], row: Mapping[str, NDArray[Any]]
) -> None:
    """Raise unless all tokens past the last boundary are padding, as they would be dropped."""
    labels = row.get("labels", row["input_ids"])
    if (kept[end:] & (labels[end:] != IGNORE_INDEX)).any():
        raise ValueError(
            f"boundaries must cover the row's tokens, got {end} of {kept.size}; end them at the "
            "last token, or mask the tokens after them (attention_mask 0 or labels -100)."
        )


def check_size(name: str, values: NDArray[Any], tokens: NDArray[Any]) -> None:
    if name == "labels" and values.size == 1 and tokens.size > 1:
        raise ValueError(
            f"labels must have a value for each of {tokens.size} tokens, got one for the document; "
            "for a classifier drop the column, and set batch['labels'] to a tensor [num_docs] "
            "after the call."
        )
    shape = values.shape[:1] if name == ROUTED_EXPERTS else values.shape
    if shape != tokens.shape:
        raise ValueError(
            f"{name} must have a value for each of {tokens.size} tokens, got "
            f"{list(values.shape)}; fix that column."
        )


def check_row(row: dict[str, NDArray[Any]], extra: Iterable[str]) -> None:
    """Raise unless each token has an integer of each column and all of `extra` are there."""
    for name in extra:
        if name not in row:
            raise ValueError(f"features must have {name}, got {', '.join(row)}; add the column.")
    for name, values in row.items():
        if name in IMAGES:
            continue
        if values.size and values.dtype.kind not in "iub" and name not in extra:
            raise ValueError(f"{name} must be integers, got {values.dtype}; convert the column.")
        if name not in ("seq_lengths", *BOUNDARIES):
            check_size(name, values, row["input_ids"])
    tokens = row["input_ids"]
    if tokens.size and tokens.min() < 0:
        raise ValueError(
            f"input_ids must be at least 0, got {tokens.min()}; fix the document (only "
            "labels may be -100)."
        )
    if tokens.size and (has_images(row) or "mm_token_type_ids" in row):
        types = {name: row[name] for name in TOKEN_TYPES if name in row}
        if (mask := row.get("attention_mask")) is not None:
            types = {name: x[mask != 0] for name, x in types.items()}
        check_images(row | types)
    why = why_not_labels("labels", row["labels"]) if "labels" in row else None
    if why is not None:
        raise ValueError(why)
