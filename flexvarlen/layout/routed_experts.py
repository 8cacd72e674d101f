"""The experts that an inference engine chose for each token: its record, and a batch's column.

Shapes: L tokens of a sample, M layers with experts (mixtures), K experts of a token in each.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flexvarlen.layout.arguments import is_integer_tensor, require_int_at_least

ROUTED_EXPERTS = "routed_experts"
"""A batch's column: integers `[B, S, M, K]`, the experts of each token, -1 at all K of a token's
layer for the router's own choice."""

OWN_CHOICE = -1
_DTYPE = np.int16  # of a column: a model has fewer than 32,768 experts
_MOST_EXPERTS = int(np.iinfo(_DTYPE).max)
_ADVICE = "pass what the engine returned for these tokens"


def engine_routes(
    record: Any,
    num_tokens: int,
    *,
    num_experts: int,
    num_layers: int,
    top_k: int,
    start: int = 0,
) -> Tensor:
    """The `routed_experts` of a sample, a row for each token, from what an engine returned.

    Engines record the experts of every token but the last one, which they never run, and of layers
    with experts alone. vLLM (`enable_return_routed_experts=True`) returns an array `[n, M, K]` as
    `CompletionOutput.routed_experts`, from `SamplingParams.routed_experts_prompt_start` on; SGLang
    (`return_routed_experts=True`) the same as base64 of int32, in `meta_info["routed_experts"]`,
    from `routed_experts_start_len` on.

    Args:
        record: integers `[num_tokens - 1 - start, num_layers, top_k]`, uint8 to int64: an array, a
            tensor or nested lists; or base64 of these as int32, in this order. Logical expert ids.
        num_tokens: L, tokens of prompt and completion together.
        num_experts: experts of a layer.
        num_layers: M, layers with experts. Where an engine's record has dense layers too, take
            those with experts: `record[:, first_dense:]`.
        top_k: K, experts of a token.
        start: the token that the record begins with. Tokens before it take the router's own choice.

    Returns:
        int16 `[L, M, K]` on the CPU: -1 before `start` and at the last token.

    Raises:
        ValueError: another number of tokens, layers or experts, another dtype, an id that is no
            expert, or one that a token has twice; the message says where.

    >>> engine_routes([[[0, 2]], [[1, 0]]], 3, num_experts=4, num_layers=1, top_k=2).tolist()
    [[[0, 2]], [[1, 0]], [[-1, -1]]]
    """
    num_tokens = require_int_at_least("num_tokens", num_tokens, 1)
    start = require_int_at_least("start", start, 0)
    num_layers = require_int_at_least("num_layers", num_layers, 1)
    top_k = require_int_at_least("top_k", top_k, 1)
    if not top_k <= require_int_at_least("num_experts", num_experts, 1) <= _MOST_EXPERTS:
        raise ValueError(
            f"num_experts must be from top_k={top_k} to {_MOST_EXPERTS}, got {num_experts}; pass "
            "those of the model's config."
        )
    if start >= num_tokens:
        raise ValueError(
            f"start must be below num_tokens={num_tokens}, got {start}; pass the engine's own "
            "(routed_experts_prompt_start, routed_experts_start_len)."
        )
    routes = _from_base64(record, num_layers, top_k) if _is_text(record) else _as_array(record)
    if routes.shape[1:] != (num_layers, top_k):
        raise ValueError(
            f"{ROUTED_EXPERTS} must have shape [tokens, {num_layers}, {top_k}]: layers with "
            f"experts and their experts of a token, got {list(routes.shape)}; {_ADVICE} and this "
            "model, without dense layers."
        )
    expected = num_tokens - 1 - start
    if len(routes) != expected:
        raise ValueError(
            f"{ROUTED_EXPERTS} must have a row for each of tokens {start} to {num_tokens - 2}, "
            f"{expected} without the last token, got {len(routes)}; {_ADVICE}, and its start."
        )
    _check_ids(routes, num_experts, start)
    column = np.full((num_tokens, num_layers, top_k), OWN_CHOICE, _DTYPE)
    column[start:-1] = routes
    return torch.from_numpy(column)


def _is_text(record: Any) -> bool:
    return isinstance(record, str | bytes)


def _from_base64(record: str | bytes, num_layers: int, top_k: int) -> NDArray[Any]:
    try:
        raw = base64.b64decode(record, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(
            f"{ROUTED_EXPERTS} must be base64 where it is text, got {error}; {_ADVICE}."
        ) from error
    if len(raw) % (4 * num_layers * top_k):
        raise ValueError(
            f"{ROUTED_EXPERTS} must be int32 of {num_layers} layers and {top_k} experts for each "
            f"token, {4 * num_layers * top_k} bytes, got {len(raw)} bytes; {_ADVICE} and this "
            "model, without dense layers."
        )
    return np.frombuffer(raw, np.dtype("<i4")).reshape(-1, num_layers, top_k)


def _as_array(record: Any) -> NDArray[Any]:
    """The record as an array of integers of three dimensions."""
    try:
        found = np.asarray(record.numpy(force=True) if isinstance(record, Tensor) else record)
    except ValueError as error:  # ragged lists
        raise ValueError(
            f"{ROUTED_EXPERTS} must have as many layers and experts for each token, got ragged "
            f"lists; {_ADVICE}."
        ) from error
    if found.dtype.kind not in "iu" or found.ndim != 3:
        raise ValueError(
            f"{ROUTED_EXPERTS} must be integers [tokens, layers, experts], got {found.dtype} of "
            f"shape {list(found.shape)}; {_ADVICE}."
        )
    return found


def _check_ids(routes: NDArray[Any], num_experts: int, start: int) -> None:
    """Raise for the first id that is no expert, or that a token has twice in a layer."""
    ids = np.sort(routes.astype(np.int64), axis=-1)
    outside = (ids[..., 0] < 0) | (ids[..., -1] >= num_experts)
    twice = (ids[..., 1:] == ids[..., :-1]).any(-1)
    for wrong, contract in (
        (outside, f"from 0 to {num_experts - 1}"),
        (twice, "different experts of a token"),
    ):
        if wrong.any():
            token, layer = np.argwhere(wrong)[0].tolist()
            raise ValueError(
                f"{ROUTED_EXPERTS} must be {contract}, logical ids, got "
                f"{routes[token, layer].tolist()} at token {start + token} in layer {layer} of "
                f"those with experts; {_ADVICE}, and num_experts of its model."
            )


# ---- a column of samples ----


def routes_of_samples(
    samples: Sequence[Any], lengths: Sequence[int]
) -> list[NDArray[np.int16]] | None:
    """int16 `[L, M, K]` of each sample that is a mapping with the column; None if none has it.

    Raises:
        ValueError: only some have it, their layers or experts differ, or as `sample_routes`.
    """
    given = [x.get(ROUTED_EXPERTS) if isinstance(x, Mapping) else None for x in samples]
    missing = [index for index, x in enumerate(given) if x is None]
    if len(missing) == len(given):
        return None
    if missing:
        raise ValueError(
            f"{ROUTED_EXPERTS} must be given for all samples or for none, got none for sample "
            f"{missing[0]}; fill it with -1 where the router is to choose."
        )
    of_sample = ROUTED_EXPERTS + " of sample {}"
    routes = [
        sample_routes(of_sample.format(index), x, length)
        for index, (x, length) in enumerate(zip(given, lengths, strict=True))
    ]
    shapes = sorted({x.shape[1:] for x in routes})
    if len(shapes) > 1:
        raise ValueError(
            f"{ROUTED_EXPERTS} must have the same layers and experts in all samples, got "
            f"{' and '.join(map(str, shapes))}; pass those of one model."
        )
    return routes


def sample_routes(name: str, given: Any, num_tokens: int) -> NDArray[np.int16]:
    """int16 `[L, M, K]` of a sample's column.

    Raises:
        ValueError: it has no row for each token, or holds no integers.
    """
    found = _as_array(given)
    if len(found) != num_tokens:
        raise ValueError(
            f"{name} must have a row for each of {num_tokens} tokens, also the last one, got "
            f"{len(found)}; make it with fv.engine_routes."
        )
    if found.size and not OWN_CHOICE <= found.min() <= found.max() <= _MOST_EXPERTS:
        raise ValueError(
            f"{name} must be from -1 to {_MOST_EXPERTS}, got {found.min()} to {found.max()}; make "
            "it with fv.engine_routes."
        )
    return found.astype(_DTYPE)


def route_ids(routes: Sequence[NDArray[np.int16]]) -> list[NDArray[np.int64]]:
    """For each sample int64 `[L]`: numbers of which two tokens' are equal if their routes are.

    Args:
        routes: integers `[L, M, K]` of each sample.
    """
    flat = np.concatenate([x.reshape(len(x), -1) for x in routes])
    of_token = np.dtype((np.void, flat.dtype.itemsize * flat.shape[1]))
    as_bytes = np.ascontiguousarray(flat).view(of_token)
    _, ids = np.unique(as_bytes[:, 0], return_inverse=True)
    return np.split(ids.astype(np.int64), np.cumsum([len(x) for x in routes])[:-1])


# ---- a batch's column ----


def why_not_routes(routes: Any, tokens: tuple[int, ...], layers: int, top_k: int) -> str | None:
    """Why a batch's column does not fit its tokens and the model, or None. Reads no values."""
    advice = "make it with fv.engine_routes of this model's records"
    if not isinstance(routes, Tensor) or not is_integer_tensor(routes):
        got = routes.dtype if isinstance(routes, Tensor) else type(routes).__name__
        return f"{ROUTED_EXPERTS} must be an integer tensor, got {got}; {advice}."
    if routes.shape != (*tokens, layers, top_k):
        return (
            f"{ROUTED_EXPERTS} must have shape {[*tokens, layers, top_k]}: rows and tokens of "
            "input_ids, the model's layers with experts, and the experts of a token, got "
            f"{list(routes.shape)}; {advice}."
        )
    return None


def are_routes(routes: Tensor, num_experts: int) -> Tensor:
    """bool 0-d: whether all K of a token's layer are different experts, or -1. No sync."""
    ids = routes.sort(-1).values
    own = (ids == OWN_CHOICE).all(-1)
    different = (ids[..., 1:] != ids[..., :-1]).all(-1)
    return (own | (different & (ids[..., 0] >= 0) & (ids[..., -1] < num_experts))).all()
