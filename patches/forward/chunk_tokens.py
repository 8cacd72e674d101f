"""What `loss_chunk_tokens` and `mlp_chunk_tokens` share."""

from __future__ import annotations

import torch
from torch import Tensor

from flexvarlen.layout.arguments import to_int_or_none

Autocast = tuple[str, torch.dtype, bool]
"""Device type, dtype, and whether it is enabled: the arguments of `torch.autocast`."""


def check_chunk_tokens(
    name: str, value: int | None, usual: int, same_bits: int | None, why_not_both: str
) -> int | None:
    """The argument `name` of `patch_model`: a number of tokens, or None.

    Args:
        usual: a number that the error may name.
        same_bits: as in `patch_model`; None: not given.
        why_not_both: what `same_bits` does that excludes chunks.

    Raises:
        ValueError: it is no positive number of tokens, or `same_bits` is given too.
    """
    if value is None:
        return None
    tokens = to_int_or_none(value)
    if tokens is None or tokens < 1:
        raise ValueError(
            f"{name} must be a positive number of tokens, or None, got {value!r}; pass {usual}."
        )
    if same_bits is not None:
        raise ValueError(
            f"{name} must not be given with same_bits, {why_not_both}, got {tokens}; remove "
            "one of them."
        )
    return tokens


def autocast_of(x: Tensor) -> Autocast:
    """Autocast as it is now on the tensor's device."""
    kind = x.device.type
    return kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
