"""Router losses (`aux_loss`), by which a mixture balances its experts, of trees and of shards.

Where ranks share a row, heads skip their own router loss, and the base model's router logits are
kept for `add_router_loss`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flexvarlen.layout.labels import SAMPLE_COUNTS
from flexvarlen.parallel.router_loss import shard_router_loss
from flexvarlen.patches.attention.packed_forward import PackedForward
from flexvarlen.patches.batch.given import Given, Inputs
from flexvarlen.patches.batch.padded_batch import PaddedBatch
from flexvarlen.patches.batch.row import PackedRow
from flexvarlen.patches.models.layers import text_config_of
from flexvarlen.patches.models.verified import is_verified
from flexvarlen.patches.state import ATTRIBUTE, CONTEXT, ROUTES, Patch


def weigh_tokens(given: Given, row: PackedRow, packed: PackedForward, inputs: Inputs) -> None:
    """Give a head that balances experts the weights of tokens as its padding mask.

    These losses weigh each token by the mask, so where tokens stand for several samples it counts
    these.
    """
    if returns_router_logits(given) and _counts_samples(given, row):
        inputs["attention_mask"] = _token_weights(given, row)


def returns_router_logits(given: Given) -> bool:
    """Whether the forward returns the logits of its experts' routers."""
    asked = given.inputs.get("output_router_logits")
    return bool(getattr(given.config, "output_router_logits", False) if asked is None else asked)


def _counts_samples(given: Given, row: PackedRow) -> bool:
    """Whether tokens may stand for several samples."""
    has_counts = given.inputs.get(SAMPLE_COUNTS) is not None or row.targets.loss is not None
    return has_counts or row.layout.segments is not None


def _token_weights(given: Given, row: PackedRow) -> Tensor:
    """int64 `[1, T]`: for how many samples each token counts in a router's loss, 0 at padding.

    The head of a whole row gets it as attention_mask, by which `load_balancing_loss_func`
    multiplies each token.

    Raises:
        ValueError: none, or of another number of tokens.
        NotImplementedError: a head whose loss may be another, as Doge's is.

    No sync; traces under `fullgraph=True`.
    """
    layout, counts = row.layout, given.inputs.get(SAMPLE_COUNTS)
    _require_known_loss(given)
    if not _counts_samples(given, row):
        return layout.real_tokens().long()[None]
    if counts is None or counts.numel() != layout.total_tokens:
        got = "none" if counts is None else f"shape {tuple(counts.shape)}"
        raise ValueError(
            "sample_counts must give the samples that share each token, "
            f"[1, {layout.total_tokens}], with output_router_logits=True and a packed_layout of "
            f"trees, got {got}; take them from fv.share_prefixes."
        )
    weights: Tensor = counts.reshape(-1) * layout.real_tokens()
    return weights[None]


def weigh_tokens_or_defer(
    given: Given, row: PackedRow, packed: PackedForward, inputs: Inputs
) -> None:
    """`weigh_tokens`, or where routers replay, whose choice a head does not know, compute the loss.

    A head takes the experts with the largest logits.
    """
    change = weigh_tokens if row.routes is None else defer_router_loss
    change(given, row, packed, inputs)


def _require_known_loss(given: Given) -> None:
    parts = given.parts
    if not is_verified(parts.model_class, parts.model_config.model_type):
        raise NotImplementedError(
            "output_router_logits must be False for trees, for a row over several ranks and with "
            "routed_experts in a model that is not of a verified family, whose router loss may be "
            f"another, got True of {parts.model_class.__name__}; set it to False, or give each "
            "rank whole rows of plain documents."
        )


# ---- a loss that the head does not compute: of a row over ranks, or of replayed experts ----


def defer_router_loss(given: Given, row: PackedRow, packed: PackedForward, inputs: Inputs) -> None:
    """Let a head's base model return router logits, but the head not compute their loss.

    A head would compute it from its own rank's tokens alone, and of its routers' own choice. Heads
    without `router_aux_loss_coef`,
    as DeepSeek-V3's, have no such loss.
    """
    if returns_router_logits(given):
        weights = _token_weights(given, row)  # refuses heads whose loss may be another
        if hasattr(given.module, "router_aux_loss_coef"):
            packed.delivery.token_weights, packed.delivery.routes = weights, row.routes
            inputs["output_router_logits"] = False


def defer_router_loss_of_rows(given: Given, inputs: Inputs) -> None:
    """`defer_router_loss` of a padded batch, whose base model makes the packed row.

    Args:
        inputs: the head's arguments, with a `PaddedBatch` and experts to replay, `[B, S, M, K]`.
    """
    routes = inputs.get(ROUTES)
    if routes is None or not returns_router_logits(given):
        return
    _require_known_loss(given)
    if hasattr(given.module, "router_aux_loss_coef"):
        delivery = inputs[CONTEXT].delivery
        delivery.token_weights = (given.mask != 0).flatten().long()
        delivery.routes = routes.flatten(0, 1)
        inputs["output_router_logits"] = False


def request_router_logits(module: nn.Module, patch: Patch, inputs: Inputs) -> None:
    """Let a base model return the logits of its routers if its head needs them."""
    delivery = getattr(inputs.get(CONTEXT), "delivery", None)
    if delivery is not None and delivery.token_weights is not None:
        inputs["output_router_logits"] = True


def keep_router_logits(module: nn.Module, packed: PackedForward, outputs: Any) -> None:
    """Keep the logits of a base model's routers, as not every head returns them (TRL's)."""
    delivery = packed.delivery
    if delivery.token_weights is not None:
        delivery.router_logits = outputs["router_logits"]


def add_router_loss(module: Any, context: PackedForward | PaddedBatch, outputs: Any) -> None:
    """Give a head this rank's part of the row's loss. Waits for the other ranks of a shared row."""
    delivery = context.delivery
    if delivery.token_weights is None:
        return
    logits, weights, routes = delivery.router_logits, delivery.token_weights, delivery.routes
    group, top_k = module.__dict__[ATTRIBUTE].sequence_parallel_group, module.num_experts_per_tok
    outputs["aux_loss"] = shard_router_loss(logits, weights, top_k, group, routes)
    if outputs.get("loss") is not None:
        loss = outputs["loss"]
        outputs["loss"] = loss + torch.as_tensor(router_loss(module, outputs)).to(loss.device)


def router_loss(head: nn.Module, outputs: Any) -> Tensor | float:
    """What transformers' heads add to their loss to balance experts; 0 if they add none."""
    loss = outputs.get("aux_loss")
    if not isinstance(loss, Tensor):
        return 0.0
    coefficient: float | None = getattr(head, "router_aux_loss_coef", None)
    if coefficient is None:  # a head over images and text
        coefficient = text_config_of(head.config).router_aux_loss_coef
    return coefficient * loss
