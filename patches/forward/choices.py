"""Multiple-choice heads, whose rows are `[B, choices, S]`: each choice is a row like any other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from flexvarlen.patches.forward.inputs import tokens_of
from flexvarlen.patches.models.heads import CHOICES
from flexvarlen.patches.state import Patch

Inputs = dict[str, Any]


def flatten_choices(patch: Patch, inputs: Inputs) -> tuple[Inputs, Callable[[Inputs], Inputs]]:
    """A head's keyword arguments with tokens `[B · choices, S]`, and a function that restores them.

    Returns:
        Of any other model the arguments themselves, and a function that returns what it is given.
    """
    tokens = tokens_of(inputs) if patch.parts.head == CHOICES else None
    if tokens is None:
        return inputs, lambda prepared: prepared
    rows = tokens.shape[:2]
    of_tokens = [
        name
        for name, x in inputs.items()
        if isinstance(x, Tensor) and x.ndim > 2 and x.shape[:2] == rows
    ]

    def restore(prepared: Inputs) -> Inputs:
        for name in {*of_tokens, "position_ids", "attention_mask"}:  # some are made from documents
            x = prepared.get(name)
            if isinstance(x, Tensor) and len(x) == rows.numel():
                prepared[name] = x.unflatten(0, rows)
        return prepared

    return inputs | {name: inputs[name].flatten(0, 1) for name in of_tokens}, restore
