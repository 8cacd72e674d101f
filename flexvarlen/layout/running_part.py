"""The part of a tree that runs now, as operators find it.

What differs from part to part must not be in a compiled graph. So a graph takes the number of a
part, an int64 tensor `[]` on the host, by which its operators find the part that runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

ENDED = (
    "a part of a tree must run inside its loop, got one of a loop that has ended or gone on; run "
    "`for part in shared.parts(model, max_tokens)`."
)

_RUNNING: dict[int, Any] = {}


def begin_part(part: Any) -> None:
    """Let operators find a `flexvarlen.trees.part.TreePart` by its number, until `end_part`."""
    _RUNNING[int(part.number)] = part


def end_part(part: Any) -> None:
    """End what `begin_part` began."""
    _RUNNING.pop(int(part.number), None)


def running_part(number: Tensor) -> Any:
    """The part of this number, of any loop.

    Raises:
        RuntimeError: its loop has ended, or is at another part.
    """
    found = _RUNNING.get(int(number))
    if found is None:
        raise RuntimeError(ENDED)
    return found


def expects_backward(inputs: Sequence[Tensor]) -> bool:
    """Whether the backward of a function with these inputs must run.

    A reentrant checkpoint runs its forward without gradients; the backward runs it again.
    """
    return not torch.is_grad_enabled() or any(x.requires_grad for x in inputs)
