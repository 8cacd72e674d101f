"""The distribution that an engine sampled from: its temperature, and the tokens that it kept.

Shapes: T = tokens; C = tokens of a chunk; V = vocabulary; K = ids kept for one token, at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flexvarlen.layout.arguments import int64s, require_int_at_least, whole_numbers
from flexvarlen.layout.boundaries import raise_or_assert
from flexvarlen.layout.labels import IGNORE_INDEX

NO_TOKEN = -1
"""In place of a token id in a sampling mask."""


def sampling_masks(
    kept: Sequence[Sequence[Sequence[int]]], prompt_tokens: Sequence[int]
) -> list[Tensor]:
    """The sampling masks of an engine, in the form that `token_logprobs` takes.

    Engines that sample with top-p, top-k or min-p can return the token ids that they kept:
    `sampling_mask.token_ids` of vLLM (`return_sampling_mask=True`), `output_token_sampling_mask` of
    SGLang.

    Args:
        kept: for each sample, for each token of its completion, the ids of the kept tokens, below V
            (not checked); ids in any order; an empty list: the whole vocabulary.
        prompt_tokens: for each sample, the number of tokens of its prompt, at least 1.

    Returns:
        For each sample int64 `[L, K]`, L the tokens of prompt and completion: in row t the ids kept
        for token t + 1, ascending, -1 after the last. Concatenate those of a packed row;
        `SharedPrefixes.fold(masks, -1)` makes those of a row of trees.

    Raises:
        ValueError: another number of prompts than of samples, a prompt without tokens, or ids that
            are no integers or negative.

    >>> sampling_masks([[[7, 8], [9]]], prompt_tokens=[2])
    [tensor([[-1, -1],
            [ 7,  8],
            [ 9, -1],
            [-1, -1]])]
    """
    if len(kept) != len(prompt_tokens):
        raise ValueError(
            f"prompt_tokens must have a number for each of {len(kept)} samples, got "
            f"{len(prompt_tokens)}; pass the tokens of each prompt."
        )
    widest = max((len(ids) for sample in kept for ids in sample), default=0)
    found = []
    for i, (sample, prompt) in enumerate(zip(kept, prompt_tokens, strict=True)):
        prompt = require_int_at_least(f"prompt_tokens[{i}]", prompt, 1)
        mask_LK = torch.full((prompt + len(sample), widest), NO_TOKEN)
        for t, ids in enumerate(sample):
            # Sorted, as samples that share a token must have equal rows.
            row = np.unique(int64s(f"kept[{i}][{t}]", ids, "pass token ids"))
            if (row < 0).any():
                raise ValueError(
                    f"kept[{i}][{t}] must hold token ids, at least 0, got {row.min()}; pass "
                    "what the engine returned."
                )
            mask_LK[prompt - 1 + t, : len(row)] = torch.from_numpy(row)
        found.append(mask_LK)
    return found


def require_temperature(temperature: Any) -> float:
    """The temperature.

    Raises:
        ValueError: it is not positive and finite.
    """
    if not isinstance(temperature, Real) or not 0 < float(temperature) < float("inf"):
        raise ValueError(
            f"temperature must be a positive number, got {temperature!r}; pass that of sampling."
        )
    return float(temperature)


def checked_sampling_mask(sampling_mask: Any, next_T: Tensor) -> Tensor | None:
    """The mask as `[T, K]`. Reads the device once; in a compiled graph it asserts instead.

    Raises:
        ValueError: the mask is no tensor of integers, has other tokens, or lacks a label.
    """
    if sampling_mask is None:
        return None
    if not isinstance(sampling_mask, Tensor) or sampling_mask.ndim < 2:
        raise ValueError(
            "sampling_mask must be a tensor of token ids for each token, got "
            f"{type(sampling_mask).__name__}; make it with flexvarlen.sampling_masks."
        )
    kept_TK = whole_numbers("sampling_mask", sampling_mask).flatten(0, -2)
    if len(kept_TK) != len(next_T):
        raise ValueError(
            f"sampling_mask must have ids for each of {len(next_T)} tokens, got shape "
            f"{tuple(sampling_mask.shape)}; make it with flexvarlen.sampling_masks."
        )
    masked_T = (next_T != IGNORE_INDEX) & (kept_TK >= 0).any(1)
    raise_or_assert(
        ~(masked_T & (kept_TK != next_T[:, None]).all(1)).any(),
        "sampling_mask must contain the label that follows each token, as an engine keeps the "
        "token that it samples; make it with flexvarlen.sampling_masks.",
    )
    return kept_TK


def sampled_logits(
    logits_CV: Tensor, temperature: float, kept_CK: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """The logits over the temperature, in `dtype`, -inf for tokens that were not kept."""
    if temperature != 1:
        logits_CV = logits_CV.to(dtype) / temperature
    if kept_CK is None:
        return logits_CV
    largest_C1 = kept_CK.amax(1, keepdim=True)  # in place of what is no token
    column = kept_CK.where(kept_CK >= 0, largest_C1.clamp(min=0))
    kept_CV = torch.zeros_like(logits_CV, dtype=torch.bool).scatter(1, column, True)
    return logits_CV.masked_fill(~(kept_CV | (largest_C1 < 0)), -torch.inf)
