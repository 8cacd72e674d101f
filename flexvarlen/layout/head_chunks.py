"""Call a head on one chunk of tokens after the other, in the backward too, for `logprobs`.

Shapes: T tokens, C of a chunk; H = hidden size; V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flexvarlen.layout.arguments import to_int_or_none

BARE_HEAD = "_flexvarlen_bare_head"
"""The attribute of a head's linear layer after which its model scales or caps the logits."""

CHUNK_TOKENS = 1024
MOST_CHUNKS = 64
"""The most chunks of a head that learns in half precision, in which autograd sums its gradients."""


def check_head(head: Any) -> None:
    """Raise ValueError unless `head` maps hidden states to the logits of its model."""
    if head is not None and not callable(head):
        raise ValueError(
            f"head must be callable, got {type(head).__name__}; pass a module of the model's."
        )
    if hasattr(head, "base_model"):  # of transformers, or PEFT's around one
        raise ValueError(
            "head must map hidden states to logits, got a whole model, "
            f"{type(head).__name__}; pass flexvarlen.lm_head(model)."
        )
    if isinstance(head, nn.Module) and any(hasattr(x, BARE_HEAD) for x in head.modules()):
        raise ValueError(
            "head must scale or cap the logits as the patched model does (such as Granite, Cohere "
            f"2 and Gemma 2), got its {type(head).__name__} alone; pass flexvarlen.lm_head(model), "
            "or a function that does both."
        )


def by_chunk(
    score: Callable[..., tuple[Tensor, ...]],
    head: Any,
    chunk_tokens: int | None,
    x_TH: Tensor,
    *others_T: Tensor | None,
) -> list[Tensor]:
    """The scores `[T]` of all tokens, by `score(logits_CV, *others_C)` of one chunk after another.

    Args:
        head: maps hidden states to logits; None: `x_TH` is the logits. Its parameters must be the
            same in the backward, if it has a method `parameters`.
        chunk_tokens: C; None: as many as fit `CHUNK_TOKENS` and `MOST_CHUNKS`.

    Raises:
        ValueError: C is no positive integer, or makes too many chunks.
        RuntimeError: in the backward, parameters are not those of the forward.
    """
    parameters: Callable[[], Iterable[Tensor]] = getattr(head, "parameters", list)
    chunk = _chunk_tokens(parameters(), chunk_tokens, len(x_TH))
    checks = torch.is_grad_enabled() and not torch.compiler.is_compiling()
    learned = [(x, x._version) for x in parameters() if x.requires_grad] if checks else []

    def score_chunk(x_CH: Tensor, *others_C: Tensor | None) -> tuple[Tensor, ...]:
        logits_CV = x_CH if head is None else head(x_CH)
        now = [x for x in parameters() if x.requires_grad] if learned else []
        # As autograd checks what it saves. FSDP1 and accelerate's hooks replace these tensors.
        changed = any(x._version != version for x, version in learned)
        if changed or any(map(_is_of_other_call, now, (x for x, _ in learned))):
            raise RuntimeError(
                "parameters of a head must be the same in the backward, got some that were changed "
                "in place, or those of another functional_call; step the optimizer, or load "
                "weights, after the backward."
            )
        return score(logits_CV, *others_C)

    xs = x_TH.split(chunk)
    others = [[None] * len(xs) if x is None else x.split(chunk) for x in others_T]
    with _autocast_without_cache(x_TH.device.type):
        chunks = [
            checkpoint(score_chunk, *each, use_reentrant=False)
            for each in zip(xs, *others, strict=True)
        ]
    return [torch.cat(parts) for parts in zip(*chunks, strict=True)]


def _is_of_other_call(now: Tensor, in_forward: Tensor) -> bool:
    """Whether functional_call, which has ended, had put a tensor in a parameter's place."""
    return isinstance(now, nn.Parameter) and not isinstance(in_forward, nn.Parameter)


def _autocast_without_cache(device_type: str) -> AbstractContextManager[Any]:
    """Autocast without its cache, in which all chunks would share one cast of the weights.

    Their gradients would be summed in the low precision of that cast.
    """
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return nullcontext()
    dtype = torch.get_autocast_dtype(device_type)
    return torch.autocast(device_type, dtype, cache_enabled=False)


def _chunk_tokens(parameters: Iterable[Tensor], chunk_tokens: int | None, tokens: int) -> int:
    least = -(-tokens // MOST_CHUNKS)
    dtypes = (x.dtype for x in parameters if x.requires_grad and x.dtype.itemsize < 4)
    low = next(dtypes, None) if torch.is_grad_enabled() else None
    if chunk_tokens is None:
        return CHUNK_TOKENS if low is None else max(CHUNK_TOKENS, least)
    chunk = to_int_or_none(chunk_tokens)
    if chunk is None or chunk < 1:
        raise ValueError(
            f"chunk_tokens must be an integer, at least 1, got {chunk_tokens!r}; pass "
            f"{CHUNK_TOKENS}."
        )
    if low is not None and chunk < least:
        raise ValueError(
            f"chunks of a head must have at least {least} of {tokens} tokens, as the gradient of a "
            f"parameter in {low} is summed over the chunks in that dtype, got {chunk}; pass a "
            "larger chunk_tokens (to patch_model: loss_chunk_tokens), or train in float32."
        )
    return chunk
