"""The router loss, by which a mixture balances its experts, of a row that several ranks share.

For one row it is E · Σ_e f_e · P_e: E experts, f_e the times that tokens choose expert e, and P_e
the sum of its router probabilities, each over all layers and divided by their tokens (Switch
Transformer, equations 4 to 6, as transformers' `load_balancing_loss_func` computes it). f_e has no
gradient, and P_e is a sum over tokens. So the ranks add up f_e and the tokens, each takes its own
part of P_e, and their losses and gradients sum to those of the row. Where routers replay the
experts that an engine chose, f_e counts these.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def shard_router_loss(
    logits: tuple[Tensor, ...],
    weights_T: Tensor,
    top_k: int,
    group: Any,
    routes_TMK: Tensor | None = None,
) -> Tensor:
    """This rank's part of the loss of a row; the parts sum to it.

    Args:
        logits: of the router of each layer, `[T, E]`, for this rank's T tokens.
        weights_T: int64, how often each token counts: 0 at padding.
        top_k: the experts that a token chooses.
        group: the ranks that share the row. All of them must call this: it waits for the others.
            None: the row is whole.
        routes_TMK: the experts of each token in each layer, `[T, M, top_k]`, where routers replay
            an engine's; -1, or None: those that they choose.

    Returns:
        A float32 scalar, on the device of the first layer's logits.

    No sync with the host; traces under `fullgraph=True`.
    """
    device, experts = logits[0].device, logits[0].shape[-1]
    weights_T = weights_T.reshape(-1).to(device)
    counts = weights_T.new_zeros(experts + 1)  # by expert, and of tokens
    probabilities_E = torch.zeros(experts, device=device)
    for index, layer in enumerate(logits):
        of_token_TE = torch.softmax(layer.to(device), dim=-1)
        chosen_TK = of_token_TE.topk(top_k).indices
        if routes_TMK is not None:
            replayed_TK = routes_TMK[:, index].to(device, torch.int64)
            chosen_TK = torch.where(replayed_TK < 0, chosen_TK, replayed_TK)
        counts = counts.scatter_add(0, chosen_TK.flatten(), weights_T.repeat_interleave(top_k))
        counts[experts] += weights_T.sum()
        probabilities_E = probabilities_E + (of_token_TE.float() * weights_T[:, None]).sum(0)
    if group is not None:
        dist.all_reduce(counts, group=group)
    frequency_E = counts[:experts] / counts[experts]
    return experts * (frequency_E * probabilities_E / counts[experts]).sum()
