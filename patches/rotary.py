"""Rotary tables computed once a compiled forward.

Inductor would fuse `cos` and `sin` into every layer's rotation, forward and backward: the same
trigonometry for each head, again and again. An operator it cannot see into keeps the tables. In
short rows, whose time is that of launches, reading them takes longer than computing them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flexvarlen.launch import SHORT_ROW


@torch.library.custom_op("flexvarlen::materialize", mutates_args=())
def materialize(x: Tensor) -> Tensor:
    """A copy of `x` that inductor keeps in memory instead of computing it at each use."""
    return x.clone()


@materialize.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def keep_tables(base: nn.Module) -> None:
    """From now on materialize what `base.rotary_emb` returns, inside compiled graphs."""
    forget_tables(base)
    rotary = getattr(base, "rotary_emb", None)
    if rotary is not None:
        rotary.register_forward_hook(_materialize_outputs)


def forget_tables(base: nn.Module) -> None:
    """Undo `keep_tables`."""
    rotary = getattr(base, "rotary_emb", None)
    if rotary is not None:
        hooks = rotary._forward_hooks
        for key in [key for key, hook in hooks.items() if hook is _materialize_outputs]:
            del hooks[key]


def _materialize_outputs(module: nn.Module, args: Any, output: Any) -> Any:
    """`output`: cos and sin `[B, S, head_dim]`, or one table for both."""
    if not torch.compiler.is_compiling():
        return output
    if isinstance(output, Tensor):
        return output if output.shape[1] <= SHORT_ROW else materialize(output)
    return output if output[0].shape[1] <= SHORT_ROW else tuple(map(materialize, output))
