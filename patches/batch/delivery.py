"""`Delivery`: the state that a head and its base model share during one forward.

Shapes: T tokens of the row, or of the padded batch; M layers with E experts, K for each token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(eq=False)
class Delivery:
    """State shared by a head and its base model.

    Attributes:
        reached_base: whether the base model received the documents of its head.
        token_weights: int64 `[T]` or `[1, T]`, how often each token counts in the routers' loss, if
            the head is not to compute it; else None.
        router_logits: `[T, E]` of each layer, of the base model, for this loss.
        routes: int `[T, M, K]`, the experts that this loss counts, or None.
        replayed: routers that took `routed_experts`, in eager mode.
        hidden_states: the base model's last, if the head computes its loss in chunks.
        autocast: the autocast of the base model, then: device type, dtype and whether it is on.
    """

    reached_base: bool = False
    token_weights: Tensor | None = None
    router_logits: tuple[Tensor, ...] = ()
    routes: Tensor | None = None
    replayed: int = 0
    hidden_states: Tensor | None = None
    autocast: tuple[str, torch.dtype, bool] = ("cpu", torch.bfloat16, False)
