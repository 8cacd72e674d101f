"""Multiple choice: rows `[B, choices, S]`, of which each choice is a row like any other."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from flexvarlen.patches.batch.given import tokens_of
from flexvarlen.patches.forward.steps import STEPS, before_forward

_MADE = ("position_ids", "attention_mask")  # from the documents


def before_choices(module: nn.Module, inputs: dict[str, Any]) -> dict[str, Any] | None:
    """`before_forward` of the choices as rows `[B · choices, S]`; results in the shape given."""
    tokens = tokens_of(inputs)
    if tokens is None:
        return before_forward(module, inputs)
    rows = tokens.shape[:2]
    names = [
        name
        for name, x in inputs.items()
        if isinstance(x, Tensor) and x.ndim > 2 and x.shape[:2] == rows
    ]
    flat = {name: inputs[name].flatten(0, 1) for name in names}
    prepared = before_forward(module, inputs | flat)
    if prepared is None:
        return None
    for name in {*names, *_MADE}:
        x = prepared.get(name)
        if isinstance(x, Tensor) and len(x) == rows.numel():
            prepared[name] = x.unflatten(0, rows)
    return prepared


CHOICES_STEPS = STEPS._replace(before=before_choices)
